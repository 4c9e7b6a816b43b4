"""Text to tokens and back: bytes, a SentencePiece or tokenizers file, or one trained on the text.

All of them are Hugging Face tokenizers, saved beside the model for `AutoTokenizer` to find. A
document ends with the end-of-text token. Where a tokenizer cannot spell a line's end
(SentencePiece takes it for a space), each line ends with that token instead, as in LEAP's own
experiments.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tokenizers.decoders import DecodeStream
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerFast, T5Tokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

from leap.errors import ConfigError, FileError
from leap.tasks.files import first_line
from leap.tasks.sentencepiece import read_sentencepiece

END = "<|endoftext|>"
KNOWN_ENDS = (END, "</s>", "<eos>", "<|end_of_text|>", "<|eot_id|>", "[EOS]", "[SEP]")
CHUNK = 1 << 16
"""Characters encoded at once: long texts are cut at line ends, where no token can be cut."""
SMALLEST_VOCABULARY = 257


def check_prompt(prompt: str) -> None:
    """Refuse a prompt that no tokenizer can spell: bytes of a command line that are not UTF-8."""
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"prompt={prompt!r} is not text in UTF-8 (character {error.start}); convert it, for "
            "instance with iconv"
        ) from error


class TextTokenizer:
    """A Hugging Face tokenizer as language modelling uses it.

    Args:
        hugging_face: a fast tokenizer with an end-of-text token.
    """

    def __init__(self, hugging_face: PreTrainedTokenizerFast) -> None:
        self.hugging_face = hugging_face
        self._backend: Tokenizer = hugging_face.backend_tokenizer
        self.eos_id: int = hugging_face.eos_token_id
        probe = self._encode_all(["a\nb"])[0]
        self.spells_line_ends = "\n" in self._backend.decode(probe)
        if self.spells_line_ends:
            # So that a text about <|endoftext|> does not end there.
            self._backend.encode_special_tokens = True
        self._is_bytes = self.vocab_size == 257 and self.encode("\0\xff").tolist() == [0, 195, 191]

    @property
    def vocab_size(self) -> int:
        """Number of different tokens."""
        return len(self.hugging_face)

    @property
    def fingerprint(self) -> str:
        """Tells tokenizers apart: equal only if they make the same tokens of every text."""
        return hashlib.sha256(self._backend.to_str().encode()).hexdigest()[:16]

    def encode(self, text: str) -> Tensor:
        """Tokens of some text, without an end."""
        if self.spells_line_ends:
            pieces = [np.asarray(ids, np.int32) for ids in self._encode_all(list(_chunks(text)))]
            return torch.from_numpy(np.concatenate([np.empty(0, np.int32), *pieces]))
        lines = self._encode_all(text.split("\n"))
        ended = [token for line in lines for token in (*line, self.eos_id)]
        return torch.tensor(ended[:-1], dtype=torch.int32)  # What follows the last line's end.

    def encode_documents(self, documents: Iterable[str]) -> Tensor:
        """Tokens of whole documents, each with an end."""
        end = torch.tensor([self.eos_id], dtype=torch.int32)
        tokens: list[Tensor] = []
        for text in documents:
            if self._is_bytes:
                found = torch.from_numpy(np.frombuffer(text.encode(), np.uint8).astype(np.int32))
            else:
                found = self.encode(text)
            tokens.append(found)
            if self.spells_line_ends or not text.endswith("\n"):
                tokens.append(end)
        return torch.cat(tokens) if tokens else end[:0]

    def decode(self, tokens: Sequence[int]) -> str:
        """The text that some tokens spell."""
        if self.spells_line_ends:
            return self._backend.decode(list(tokens), skip_special_tokens=True)
        lines: list[list[int]] = [[]]
        for token in tokens:
            if token == self.eos_id:
                lines.append([])
            else:
                lines[-1].append(token)
        return "\n".join(self._backend.decode(line, skip_special_tokens=True) for line in lines)

    def stream(self) -> Callable[[int], str]:
        """A function that takes one token after another, and gives the text each one completes."""
        stream = DecodeStream(skip_special_tokens=True)

        def step(token: int) -> str:
            nonlocal stream
            if token == self.eos_id and not self.spells_line_ends:
                stream = DecodeStream(skip_special_tokens=True)
                return "\n"
            return stream.step(self._backend, token) or ""

        return step

    def continuation(self, prompt: str, read: Sequence[int]) -> Callable[[int], str]:
        """A function like that of `stream`, for tokens that follow a prompt.

        Args:
            prompt: the text before.
            read: its tokens, or the last of them. They are decoded too, else SentencePiece takes
                what follows for the first word of a text, with no space before it.
        """
        decode = self.stream()
        before = "".join(map(decode, read))
        # A space that ends a prompt SentencePiece does not read, and would give once more.
        space_given = prompt.endswith(" ") and not before.endswith(" ")

        def step(token: int) -> str:
            nonlocal space_given
            piece = decode(token)
            if piece and space_given:
                piece = piece.removeprefix(" ")
                space_given = False
            return piece

        return step

    def save(self, folder: Path) -> None:
        """Write the tokenizer, for `load` or `AutoTokenizer` to read."""
        self.hugging_face.save_pretrained(str(folder))

    def _encode_all(self, texts: list[str]) -> list[list[int]]:
        encoded = self._backend.encode_batch_fast(texts, add_special_tokens=False)
        return [found.ids for found in encoded]


def load_tokenizer(folder: Path) -> TextTokenizer:
    """The tokenizer that was saved to a folder."""
    try:
        found = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:
        raise FileError(f"no tokenizer in {folder} ({first_line(error)})") from error
    if not isinstance(found, PreTrainedTokenizerFast) or found.eos_token_id is None:
        raise FileError(f"the tokenizer in {folder} is not one that leap lm train leaves there")
    return TextTokenizer(found)


def make_tokenizer(
    kind: str = "bytes", train_size: int | None = None, documents: Iterable[str] = ()
) -> TextTokenizer:
    """A tokenizer by the settings of a run.

    Args:
        kind: "bytes", or the path of a SentencePiece (.model) or tokenizers (.json) file.
        train_size: train one with so many tokens instead.
        documents: the text to train it on.
    """
    if train_size is not None:
        if kind != "bytes":
            raise ConfigError(
                f"tokenizer={kind} and train_tokenizer={train_size}: give one of them"
            )
        return train_tokenizer(documents, train_size)
    if kind == "bytes":
        return byte_tokenizer()
    path = Path(kind).expanduser()
    if not path.is_file():
        raise FileError(
            f"no tokenizer at {kind}; give 'bytes', or a SentencePiece (.model) or "
            "tokenizers (.json) file"
        )
    return _from_json(path) if path.suffix == ".json" else _from_sentencepiece(path)


def byte_tokenizer() -> TextTokenizer:
    """256 bytes and the end of a text: nothing to learn, and nothing that cannot be spelt."""
    vocabulary = {character: byte for byte, character in bytes_to_unicode().items()}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return _wrap(backend, END)


def train_tokenizer(documents: Iterable[str], vocab_size: int) -> TextTokenizer:
    """Byte-level BPE of the pairs that are most frequent in a text."""
    if vocab_size < SMALLEST_VOCABULARY:
        raise ConfigError(
            f"train_tokenizer={vocab_size} is too small; there are 256 bytes and the end of a "
            f"text, so give {SMALLEST_VOCABULARY} or more"
        )
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    chunks = (chunk for text in documents for chunk in _chunks(text))
    backend.train_from_iterator(chunks, trainer)
    if backend.get_vocab_size() < vocab_size:
        raise FileError(
            f"the text is too short to find {vocab_size} tokens in it; it has "
            f"{backend.get_vocab_size()}, so give train_tokenizer as much, or more text"
        )
    return _wrap(backend, END)


def _from_json(path: Path) -> TextTokenizer:
    try:
        backend = Tokenizer.from_file(str(path))
    except Exception as error:
        raise FileError(f"{path} is no tokenizers file ({first_line(error)})") from error
    ends = [name for name in KNOWN_ENDS if backend.token_to_id(name) is not None]
    if not ends:
        raise FileError(
            f"{path} has no end-of-text token; add one of {', '.join(KNOWN_ENDS)} to it"
        )
    return _wrap(backend, ends[0])


def _from_sentencepiece(path: Path) -> TextTokenizer:
    found = read_sentencepiece(path, extra="lm")
    spec = found.spec
    if found.merges is None and (spec.pad_id, spec.eos_id, spec.unk_id) == (0, 1, 2):
        # T5's layout; Hugging Face's T5 has 100 tokens more, for its pretraining.
        return TextTokenizer(
            T5Tokenizer(vocab=found.vocabulary, _spm_precompiled_charsmap=found.charsmap)
        )
    if spec.eos_id < 0:
        raise FileError(f"{path} has no end-of-text token; train it with eos_id")
    return _wrap(found.tokenizer(), found.piece(spec.eos_id), unk_token=found.piece(spec.unk_id))


def _wrap(backend: Tokenizer, end: str, **special: str) -> TextTokenizer:
    return TextTokenizer(
        PreTrainedTokenizerFast(
            tokenizer_object=backend,
            eos_token=end,
            bos_token=end,
            pad_token=end,
            clean_up_tokenization_spaces=False,
            **special,
        )
    )


def _chunks(text: str) -> Iterator[str]:
    """A text in pieces of some length, cut where a line ends and another, not blank, begins."""
    start = 0
    while start < len(text):
        cut = min(start + CHUNK, len(text))
        while cut < len(text):
            cut = text.find("\n", cut) + 1 or len(text)
            if cut < len(text) and text[cut] != "\n":
                break
        yield text[start:cut]
        start = cut
