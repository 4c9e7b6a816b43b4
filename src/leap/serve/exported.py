"""Exported models as the engine and the streams take them: by onnxruntime, without torch."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from leap.errors import FileError
from leap.runtime.graph import empty_state
from leap.runtime.manifest import Manifest, read_manifest
from leap.runtime.text import Continuation
from leap.runtime.translator import Translator
from leap.runtime.writer import Past, Writer
from leap.serve.protocol import Kept, Logits, Spell

TASKS = ("lm", "text", "speech")
Row = Mapping[str, np.ndarray]
"""The state of one text, by names of tensors; or, where sizes are constant, of several."""


def manifest_of(folder: Path) -> Manifest:
    """The manifest of a folder of `leap export`, whatever its model is for."""
    return read_manifest(folder, TASKS)


class ExportedModel:
    """An exported language model.

    Texts are read as one batch where the graph's states keep their size. Those of softmax attention
    grow with each text, and the graph knows no pads: such texts are read one by one.

    Args:
        folder: what `leap export` made.
        threads: how many to compute with.
    """

    def __init__(self, folder: Path, threads: int = 1) -> None:
        self.writer = writer = Writer(folder, threads=threads)
        codec, manifest = writer.codec, writer.manifest
        self.name = folder.resolve().name
        self.vocab_size = manifest.vocabulary
        self.end = codec.eos_id if codec.spells_line_ends else None
        self.max_length = manifest.n_positions
        self.is_constant = manifest.is_constant

    def encode(self, text: str) -> list[int]:
        """Tokens of a text."""
        tokens: list[int] = self.writer.codec.tokens(text).tolist()
        return tokens

    def begin(self) -> list[int]:
        """An end of text, as `leap lm generate` begins."""
        return [self.writer.codec.eos_id]

    def speller(self, prompt: str, read: Sequence[int]) -> Spell:
        """Spells what follows a prompt, of which the last tokens are `read`."""
        return Continuation(self.writer.codec, prompt, read).take

    def empty(self) -> list[Row]:
        """The state of one row that has read nothing."""
        return [empty_state(self.writer.manifest.states)]

    def read(
        self, tokens: Sequence[Sequence[int]], state: Sequence[Row]
    ) -> tuple[Logits, list[Row]]:
        """Read one token or more in each row: the logits after the last, and the new state."""
        if not self.is_constant:
            return self._one_by_one(tokens, state)
        joined = self.join([state])[0]
        same: dict[int, list[int]] = {}
        for i, row in enumerate(tokens):
            same.setdefault(len(row), []).append(i)
        if len(same) == 1:
            logits, after = self._read(np.array(tokens), joined)
            return logits, [after]
        parts = [
            self._read(np.array([tokens[i] for i in rows]), _rows(joined, rows))
            for rows in same.values()
        ]
        order = np.argsort([i for rows in same.values() for i in rows])
        logits = np.concatenate([logits for logits, _ in parts])[order]
        return logits, [_rows(_joined([after for _, after in parts]), order.tolist())]

    def join(self, states: Sequence[Sequence[Row]]) -> list[Row]:
        """The rows of all these states as one."""
        rows = [row for state in states for row in state]
        return [_joined(rows)] if self.is_constant else rows

    def select(self, state: Sequence[Row], rows: Sequence[int]) -> list[Row]:
        """Some of the rows."""
        if self.is_constant:
            return [_rows(state[0], rows)]
        return [state[i] for i in rows]

    def n_bytes(self, state: Sequence[Row]) -> int:
        """Memory that a state takes."""
        return sum(x.nbytes for row in state for x in row.values())

    def save(self, kept: Kept, path: Path) -> None:
        """Write a text to a file that `leap lm generate --state` can go on from."""
        self.writer.save(path, Past(kept.state[0], kept.n_read, tuple(kept.tail[-1:])))

    def load(self, path: Path) -> Kept:
        """Read what `save` or `leap lm generate --state` wrote."""
        past = self.writer.load(path)
        if past.n_rows != 1 or not past.unread:
            raise FileError(f"{path} holds no single text to go on with; save one by this server")
        return Kept([past.states], past.unread, past.n_tokens)

    def _read(self, tokens: np.ndarray, states: Row) -> tuple[Logits, Row]:
        logits, after = self.writer.logits(tokens, Past(states))
        return logits[:, -1], after.states

    def _one_by_one(
        self, tokens: Sequence[Sequence[int]], state: Sequence[Row]
    ) -> tuple[Logits, list[Row]]:
        found = [self._read(np.array([each]), row) for each, row in zip(tokens, state, strict=True)]
        return np.concatenate([logits for logits, _ in found]), [after for _, after in found]


class ExportedTranslation:
    """An exported translation model, for `leap.serve.translate.Translations`.

    Args:
        folder: what `leap export` made.
        threads: how many to compute with.
    """

    def __init__(self, folder: Path, threads: int = 1) -> None:
        self._first = Translator(folder, "offline", threads=threads)
        self.extractor = self._first.extractor

    def interpreter(self, policy: str, **options: Any) -> Translator:
        """The model with a policy; the graphs are those of all others."""
        return Translator(self._first.folder, policy, like=self._first, **options)


def _joined(rows: Sequence[Row]) -> Row:
    if len(rows) == 1:
        return rows[0]
    return {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}


def _rows(states: Row, rows: Sequence[int]) -> Row:
    return {name: x[list(rows)] for name, x in states.items()}
