"""Which part of the source each word of a translation rests on: strike it out, and see.

    recording = Recording.of(interpreter)
    stream = recording.stream(interpreter)
    ...                                  # push and finish as with any stream
    for sentence in recording.sentences:
        sentence.rests_on(interpreter)   # [target words, units of the source], in nats

A unit is a word of text, or a stretch of sound. What is struck out is as if it had never been
there; every subword is scored after what had been read when it was written, so that what came later
counts for nothing. It takes one reading of the sentence in as many rows as there are units.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from jaxtyping import Bool, Float

from leap.runtime.streaming.sources import Chunk
from leap.runtime.streaming.stream import Interpreter, Row, Stream, StreamPool
from leap.runtime.streaming.vocabulary import EOS, SPACE, Subwords

MOST_UNITS = 32
"""Units of a sentence of speech; the chunks of longer ones are taken together."""
MOST_ROWS = 64
"""Rows that are scored at once."""


@dataclass(frozen=True)
class Unit:
    """A part of the source that can be struck out."""

    start: int
    end: int
    """Places of its subwords or frames in the sentence."""
    text: str | None
    """The word; None of sound."""


@dataclass
class Sentence:
    """What was read and written of one sentence, in order."""

    chunks: list[Chunk] = field(default_factory=list)
    pieces: list[int] = field(default_factory=list)
    after: list[int] = field(default_factory=list)
    """Chunks that had been read when each subword was written."""
    words: list[str] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    """How many subwords had been written at the end of each word."""

    def units(self, vocabulary: Subwords) -> list[Unit]:
        """Words of the source, or stretches of sound."""
        if not self.chunks:
            return []
        if self.chunks[0].content.ndim > 1:
            return self._stretches()
        pieces = np.concatenate([chunk.content for chunk in self.chunks]).tolist()
        starts = [
            i for i, x in enumerate(pieces) if x != EOS and (vocabulary.begins_word(x) or not i)
        ]
        n = len(pieces) - (pieces[-1] == EOS)
        found = []
        for start, end in zip(starts, [*starts[1:], n], strict=True):
            word = "".join(vocabulary.pieces[x] for x in pieces[start:end]).replace(SPACE, "")
            if word:
                found.append(Unit(start, end, word))
        return found

    def _stretches(self) -> list[Unit]:
        edges = np.cumsum([0, *(len(chunk.content) for chunk in self.chunks)]).tolist()
        together = -(-len(self.chunks) // MOST_UNITS)
        cuts = [*edges[:-1:together], edges[-1]]
        return [Unit(a, b, None) for a, b in pairwise(cuts) if b > a]

    def rests_on(self, interpreter: Interpreter) -> Float[np.ndarray, "words units"]:
        """How far the log-probability of each word falls without each unit, in nats."""
        units = self.units(interpreter.vocabulary)
        n = sum(len(chunk.content) for chunk in self.chunks)
        kept = np.ones((1 + len(units), n), bool)
        for row, unit in enumerate(units, start=1):
            kept[row, unit.start : unit.end] = False
        n_rows = MOST_ROWS if interpreter.can_join else 1
        found = [
            self._score(interpreter, kept[i : i + n_rows]) for i in range(0, len(kept), n_rows)
        ]
        scores = np.concatenate(found)
        falls = np.cumsum(scores[:1] - scores[1:], axis=1)
        upto = np.concatenate([np.zeros((len(units), 1)), falls], axis=1)
        edges = [0, *self.ends]
        rows = [upto[:, end] - upto[:, start] for start, end in pairwise(edges)]
        return np.stack(rows) if rows else np.zeros((0, len(units)))

    def _score(
        self, interpreter: Interpreter, kept: Bool[np.ndarray, "rows source"]
    ) -> Float[np.ndarray, "rows pieces"]:
        """The log-probability of each subword, in rows that keep only some of the source."""
        n = len(kept)
        states = interpreter.blank.select([0] * n)
        scores = np.zeros((n, len(self.pieces)))
        n_chunks = place = 0
        last = interpreter.start
        for i, (piece, after) in enumerate(zip(self.pieces, self.after, strict=True)):
            for chunk in self.chunks[n_chunks:after]:
                size = len(chunk.content)
                states = _read(interpreter, states, chunk.content, kept[:, place : place + size])
                place += size
            n_chunks = after
            logits, states, _ = interpreter.logits(np.full((n, 1), last), states)
            shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
            scores[:, i] = shifted[:, piece] - np.log(np.exp(shifted).sum(axis=1))
            last = piece
        return scores


def _read(
    interpreter: Interpreter, states: object, content: np.ndarray, kept: np.ndarray
) -> object:
    """Read a chunk, of which each row keeps some."""
    groups: dict[bytes, list[int]] = {}
    for row, mask in enumerate(kept):
        groups.setdefault(mask.tobytes(), []).append(row)
    parts, order = [], []
    for rows in groups.values():
        chosen: object = states.select(rows)  # type: ignore[attr-defined]
        left = content[kept[rows[0]]]
        if len(left):
            chosen = interpreter.read(np.repeat(left[None], len(rows), axis=0), chosen)
        parts.append(chosen)
        order += rows
    if len(parts) == 1:
        return parts[0]
    joined = parts[0].concat(parts[1:])  # type: ignore[attr-defined]
    return joined.select(np.argsort(order).tolist())


@dataclass
class Recording(Row):
    """A stream's row that remembers what was read and written."""

    sentences: list[Sentence] = field(default_factory=lambda: [Sentence()])

    @classmethod
    def of(cls, interpreter: Interpreter) -> "Recording":
        """That of a new stream."""
        row = interpreter.row()
        return cls(row.source, row.words, row.last)

    def stream(self, interpreter: Interpreter) -> Stream:
        """The stream, which is to be pushed and finished as any other."""
        return Stream(StreamPool(interpreter, [self], interpreter.blank.select([0])))

    def take(self) -> Chunk | None:
        """The next chunk, counted as read."""
        chunk = super().take()
        if chunk is not None:
            self.sentences[-1].chunks.append(chunk)
        return chunk

    def write(self, piece: int) -> None:
        """Write one more subword."""
        sentence = self.sentences[-1]
        before = len(self.new)
        sentence.pieces.append(piece)
        sentence.after.append(len(sentence.chunks))
        super().write(piece)
        self._complete(sentence, self.new[before:], len(sentence.pieces) - len(self.words.held))

    def begin(self, start: int) -> None:
        """End the sentence, and begin another."""
        sentence, before = self.sentences[-1], len(self.new)
        super().begin(start)
        self._complete(sentence, self.new[before:], len(sentence.pieces))
        self.sentences.append(Sentence())

    def _complete(self, sentence: Sentence, words: Sequence[str], end: int) -> None:
        for word in words:
            sentence.words.append(word)
            sentence.ends.append(end)
