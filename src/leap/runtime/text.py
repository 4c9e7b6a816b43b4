"""Text to tokens and back, by a tokenizer of the tokenizers library.

A document ends with the end-of-text token. Where a tokenizer cannot spell a line's end
(SentencePiece takes it for a space), each line ends with that token instead.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from leap.errors import ConfigError, FileError, first_line

CHUNK = 1 << 16
"""Characters encoded at once: long texts are cut at line ends, where no token can be cut."""


class TextCodec:
    """A tokenizer as language modelling uses it.

    Args:
        backend: the tokenizer.
        eos_id: its end-of-text token.
    """

    def __init__(self, backend: Tokenizer, eos_id: int) -> None:
        self._backend = backend
        self.eos_id = eos_id
        probe = self._encode_all(["a\nb"])[0]
        self.spells_line_ends = "\n" in backend.decode(probe)
        if self.spells_line_ends:
            # So that a text about <|endoftext|> does not end there.
            backend.encode_special_tokens = True

    @property
    def fingerprint(self) -> str:
        """Tells tokenizers apart: equal only if they make the same tokens of every text."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]

    def to_json(self) -> str:
        """The tokenizer as its file has it."""
        return self._backend.to_str()

    def tokens(self, text: str) -> np.ndarray:
        """Tokens of some text, without an end."""
        if self.spells_line_ends:
            found = [np.asarray(ids, np.int32) for ids in self._encode_all(list(chunks(text)))]
            return np.concatenate([np.empty(0, np.int32), *found])
        lines = self._encode_all(text.split("\n"))
        ended = [token for line in lines for token in (*line, self.eos_id)]
        return np.array(ended[:-1], np.int32)  # What follows the last line's end.

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

    def _encode_all(self, texts: list[str]) -> list[list[int]]:
        encoded = self._backend.encode_batch_fast(texts, add_special_tokens=False)
        return [found.ids for found in encoded]


class Continuation:
    """The text that follows a prompt, token by token.

    Args:
        codec: the tokenizer.
        prompt: the text that was given.
        read: the tokens that were read last. They are decoded too, else SentencePiece would take
            what follows for the first word of a text, with no space before it.
    """

    def __init__(self, codec: TextCodec, prompt: str, read: Sequence[int]) -> None:
        self._decode = codec.stream()
        before = "".join(map(self._decode, read))
        # A space that ends a prompt is one that SentencePiece does not read.
        self._space_given = prompt.endswith(" ") and not before.endswith(" ")

    def take(self, token: int) -> str:
        """The text that one more token completes."""
        piece = self._decode(token)
        if piece and self._space_given:
            piece = piece.removeprefix(" ")
            self._space_given = False
        return piece


def read_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a file."""
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises nothing more specific.
        raise FileError(f"{path} is no tokenizers file ({first_line(error)})") from error


def check_prompt(prompt: str) -> None:
    """Refuse a prompt that no tokenizer can spell: bytes of a command line that are not UTF-8."""
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"prompt={prompt!r} is not text in UTF-8 (character {error.start}); convert it, for "
            "instance with iconv"
        ) from error


def chunks(text: str) -> Iterator[str]:
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
