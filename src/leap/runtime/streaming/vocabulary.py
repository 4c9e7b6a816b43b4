"""Words to subwords and back, also while the words still arrive.

Subwords never reach over white space: encoding word by word gives those of the whole sentence. A
word that is being written is complete when the next one begins.

Special ones come first, in fairseq's order: bos 0, pad 1, eos 2, unk 3.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tokenizers import Tokenizer

from leap.errors import ConfigError

BOS, PAD, EOS, UNK = range(4)
SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")
SPACE = "▁"
"""What a subword begins with where a word begins."""


class Subwords:
    """Subwords, as translation uses them.

    Args:
        backend: the tokenizer.
    """

    def __init__(self, backend: Tokenizer) -> None:
        self._backend = backend
        # So that a text about </s> does not end there.
        backend.encode_special_tokens = True
        self.pieces = [str(backend.id_to_token(i)) for i in range(backend.get_vocab_size())]
        """Every subword by its id."""

    def to_json(self) -> str:
        """The tokenizer as its file has it."""
        return self._backend.to_str()

    def __len__(self) -> int:
        return len(self.pieces)

    def encode(self, text: str) -> list[int]:
        """Subwords of a sentence or a word, without an end.

        Those of a sentence are those of its words, one after another.
        """
        return self.encode_all([text])[0]

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """The same of many sentences at once."""
        # What Python takes for white space is the end of a word, whatever the normaliser thinks.
        spaced = [" ".join(text.split()) for text in texts]
        found = self._backend.encode_batch_fast(spaced, add_special_tokens=False)
        return [encoding.ids for encoding in found]

    def begins_word(self, piece: int) -> bool:
        """Whether a word begins with this subword, so that the one before it is complete."""
        return self.pieces[piece].startswith(SPACE)

    def words(self) -> "Words":
        """What puts subwords together to words, as they come."""
        return Words(self)

    def decode(self, pieces: Iterable[int]) -> str:
        """The text that some subwords spell; special ones spell nothing."""
        words = self.words()
        return " ".join([word for piece in pieces for word in words.push(piece)] + words.finish())

    def check_fits(self, size: int, what: str) -> None:
        """Refuse a model that was made for another vocabulary.

        Args:
            size: how many subwords the model knows.
            what: the model's name, for the error.
        """
        if size != len(self):
            raise ConfigError(
                f"{what} knows {size} subwords, but the vocabulary has {len(self)}; give the "
                "vocabulary it was trained with"
            )


@dataclass
class Words:
    """Subwords in, words out, each as soon as it is complete. To fork it, copy `held`."""

    vocabulary: Subwords
    held: list[int] = field(default_factory=list)
    """Subwords of the word that is not complete yet."""

    def push(self, piece: int) -> list[str]:
        """Take one more subword, and give the word that it completes, if it does."""
        if piece in (BOS, PAD, EOS, UNK):
            return []
        complete = self.finish() if self.vocabulary.begins_word(piece) else []
        self.held.append(piece)
        return complete

    def finish(self) -> list[str]:
        """The last word, if there is one, since no subword follows."""
        word = "".join(self.vocabulary.pieces[piece] for piece in self.held).replace(SPACE, "")
        self.held = []
        return [word] if word else []
