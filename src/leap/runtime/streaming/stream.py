"""Translation of a source that is still arriving, at a cost per step that does not grow.

    interpreter = ...               # an exported model, or one in torch, with a policy
    stream = interpreter.stream()
    stream.push("A man in")        # the words that can be said by now
    stream.push(" an orange hat.")
    stream.finish()                # all the others; the stream is then as new

The words are those of greedy decoding under the policy's schedule, all at once, however the input
is cut; what is left to say when the source has ended may be searched for (`beam`). Only whole words
come out, none is taken back, and all have come when the source has ended.
A stream is small: it can be forked, saved, and stepped with many others as one batch
(`StreamPool`).
"""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from leap.errors import ConfigError, InputError
from leap.runtime.fbank import Extractor
from leap.runtime.streaming.pauses import Pauses
from leap.runtime.streaming.policies import Policy
from leap.runtime.streaming.search import Open, search
from leap.runtime.streaming.sources import Chunk, Source, SpeechSource, TextSource
from leap.runtime.streaming.vocabulary import BOS, EOS, PAD, SPACE, UNK, Subwords, Words

SPELLS_NOTHING = (BOS, PAD, UNK)
FEW = 10
"""Subwords that may be written whatever the source's length."""
DRAFT = 32
"""Longest draft of what may follow, in subwords: what agreement is looked for in."""
LONGEST_WORD = 64
"""Subwords after which a word is taken for complete, lest it grow for ever."""


class Interpreter(ABC):
    """A model with a policy: what all its streams share. What computes is up to those below it.

    States are theirs: whatever has `select` for some rows, `concat` for more, and `n_bytes`.

    Args:
        vocabulary: of both languages.
        policy: when to read and when to write.
        start: what a translation begins with.
        extractor: makes frames of sound, for a model of speech; None for one of text.
        frames_per_state: of a model of speech.
        chunk_size: source states that are read at once, 0 for all when the source has ended; by
            default 1 for text and 4 for speech.
        longest: subwords to write for each source state, besides a few; more are not written, so
            that no model runs away.
        reset: begin anew where a sentence ends, or in a pause of speech, and at the latest after
            this number of source states: for sources much longer than those of the training.
        beam: hypotheses to search for the best end of a sentence with, once all of it has been
            read; 1 for greedy decoding to the end.
        language: ISO 639 code of the source, by which ends of sentences in text are told.
        pauses: by what pauses of speech are told: loudness, or silero (silero-vad).
    """

    blank: Any
    """What the model keeps of nothing, in one row."""
    can_join: bool = True
    """Whether streams can be stepped together wherever each of them is."""

    def __init__(
        self,
        vocabulary: Subwords,
        policy: Policy,
        *,
        start: int = BOS,
        extractor: Extractor | None = None,
        frames_per_state: int = 1,
        chunk_size: int | None = None,
        longest: float = 2.0,
        reset: int | None = None,
        beam: int = 1,
        language: str = "en",
        pauses: Pauses = "loudness",
    ) -> None:
        if chunk_size is None:
            chunk_size = 1 if extractor is None else 4
        if chunk_size < 0:
            raise ConfigError(f"chunk_size={chunk_size} must be 1 or more, or 0 for all")
        if longest <= 0 or (reset is not None and reset < 1):
            raise ConfigError(f"longest={longest} and reset={reset} must be more than 0")
        if beam < 1:
            raise ConfigError(f"beam={beam} must be 1 or more")
        self.vocabulary = vocabulary
        self.policy = policy
        self.start = start
        self.extractor = extractor
        self.frames_per_state = frames_per_state
        self.chunk_size = chunk_size
        self.longest = longest
        self.reset = reset
        self.beam = beam
        self.language = language
        self.pauses = pauses
        self.space = vocabulary.pieces.index(SPACE) if SPACE in vocabulary.pieces else None

    @abstractmethod
    def read(self, chunk: np.ndarray, states: Any) -> Any:
        """Read one more chunk, `[b, n]` or `[b, n, bins]`, and remember what the policy needs."""

    @abstractmethod
    def logits(
        self, tokens: np.ndarray, states: Any
    ) -> tuple[Float[np.ndarray, "b v"], Any, Float[np.ndarray, "b n"] | None]:
        """Write tokens `[b, t]`: logits of what follows the last, and the states after it.

        And how much of its attention is on what had been read before each of the last n chunks, the
        newest first, if the policy looks at that.
        """

    @abstractmethod
    def save(self, path: str | Path, states: Any, kept: Mapping[str, np.ndarray]) -> None:
        """Write a stream to a file."""

    @abstractmethod
    def load(self, path: str | Path) -> "Stream":
        """The stream that `Stream.save` wrote, to be gone on with."""

    def stream(self) -> "Stream":
        """A new stream."""
        return Stream(self.pool(1))

    def pool(self, n: int) -> "StreamPool":
        """`n` new streams, to be stepped together."""
        return StreamPool(self, [self.row() for _ in range(n)], self.blank.select([0] * n))

    def row(self) -> "Row":
        """All of a new stream but the model's states."""
        source: Source
        if self.extractor is None:
            source = TextSource(self.vocabulary, self.chunk_size, self.reset, self.language)
        else:
            source = SpeechSource(
                self.extractor, self.frames_per_state, self.chunk_size, self.reset, self.pauses
            )
        return Row(source, self.vocabulary.words(), self.start)

    def limit(self, row: "Row") -> int:
        """How many subwords may have been written by now."""
        return int(self.longest * row.n_read) + FEW

    def write(
        self, last: Sequence[int], states: Any, may_end: Sequence[bool]
    ) -> tuple[list[int], Any, Float[np.ndarray, "b n"] | None]:
        """The likeliest subwords that follow, and attention to the last chunks, newest first.

        Args:
            last: one for each row.
            states: of the rows.
            may_end: whether a row may end here; if not, it has to say something.
        """
        given = np.array(last)
        logits, after, before = self.logits(given[:, None], states)
        attention = None
        if before is not None:
            attention = np.concatenate([1 - before[:, :1], -np.diff(before, axis=1)], axis=1)
        scores = self._allowed(logits, given, np.array(may_end))
        return scores.argmax(axis=-1).tolist(), after, attention

    def score(
        self, last: np.ndarray, states: Any, may_end: np.ndarray
    ) -> tuple[Float[np.ndarray, "b v"], Any]:
        """Scores of what may follow the last subwords; -inf for what must not."""
        logits, after, _ = self.logits(last[:, None], states)
        return self._allowed(logits, last, may_end), after

    def _allowed(
        self, logits: Float[np.ndarray, "b v"], last: np.ndarray, may_end: np.ndarray
    ) -> Float[np.ndarray, "b v"]:
        """Scores of what may follow the last token; -inf for what must not."""
        scores = logits.copy()
        scores[:, list(SPELLS_NOTHING)] = -np.inf
        must_say = ~may_end
        scores[must_say, EOS] = -np.inf
        if self.space is not None:  # One space after another says nothing either.
            scores[must_say & (last == self.space), self.space] = -np.inf
        return scores


@dataclass
class Row:
    """All that one stream is but the model's states."""

    source: Source
    words: Words
    last: int
    """The subword written last."""
    n_read: int = 0
    """Source states of this sentence."""
    n_written: int = 0
    """Subwords of this sentence."""
    is_heard: bool = False
    """Whether there was anything but silence in this sentence."""
    is_said: bool = False
    """Whether anything of this sentence's translation was written that spells something."""
    is_ended: bool = False
    """Whether all of this sentence has been read."""
    drafts: list[list[int]] = field(default_factory=list)
    """The last hypotheses of what follows, for policies that compare them."""
    new: list[str] = field(default_factory=list)
    """Words that were written and not handed out yet."""

    @property
    def may_end(self) -> bool:
        """Whether the translation may end here: a source that holds something has one."""
        return self.is_said or not self.is_ended

    def take(self) -> Chunk | None:
        """The next chunk, counted as read."""
        chunk = self.source.take(self.n_read)
        if chunk is not None:
            self.n_read += chunk.n_states
            self.is_heard |= chunk.is_heard
            self.is_ended = chunk.is_last
        return chunk

    def write(self, piece: int) -> None:
        """Write one more subword."""
        self.last = piece
        self.n_written += 1
        self.is_said |= self.words.vocabulary.pieces[piece] != SPACE
        self.new += self.words.push(piece)
        if len(self.words.held) >= LONGEST_WORD:
            self.new += self.words.finish()

    def begin(self, start: int) -> None:
        """End the sentence, its last word being complete, and begin another."""
        self.new += self.words.finish()
        self.last, self.n_read, self.n_written = start, 0, 0
        self.is_heard = self.is_said = self.is_ended = False
        self.drafts = []

    def handed_out(self) -> list[str]:
        """The new words."""
        new, self.new = self.new, []
        return new

    def fork(self) -> "Row":
        """The same, to go another way."""
        words = Words(self.words.vocabulary, list(self.words.held))
        drafts = [list(draft) for draft in self.drafts]
        return replace(
            self, source=self.source.fork(), words=words, drafts=drafts, new=list(self.new)
        )

    def kept(self) -> dict[str, np.ndarray]:
        """All there is to save, each with a row for this stream."""
        counts = [self.last, self.n_read, self.n_written, int(self.is_heard), int(self.is_said)]
        drafts = [piece for draft in self.drafts for piece in (*draft, EOS)]
        parts = {"counts": counts, "held": self.words.held, "drafts": drafts}
        arrays = {name: np.array(values, np.int64)[None] for name, values in parts.items()}
        return arrays | self.source.kept()

    def restore(self, kept: Mapping[str, np.ndarray]) -> None:
        """Go on from what was saved."""
        self.last, self.n_read, self.n_written, is_heard, is_said = kept["counts"][0].tolist()
        self.is_heard, self.is_said = bool(is_heard), bool(is_said)
        self.words.held = kept["held"][0].tolist()
        draft: list[int] = []
        for piece in kept["drafts"][0].tolist():
            if piece == EOS:
                self.drafts.append(draft)
                draft = []
            else:
                draft.append(piece)
        self.source.restore(kept)


class Stream:
    """One source that is still arriving; `Interpreter.stream` makes it."""

    def __init__(self, pool: "StreamPool") -> None:
        self._pool = pool

    def push(self, source: Any) -> list[str]:
        """Take more of the source, and give the words that can be said by now.

        Args:
            source: text, in which white space completes a word, or a list of whole words; or
                samples of sound from -1 to 1, at the extractor's rate. As little as wanted.
        """
        return self._pool.push([source])[0]

    def finish(self) -> list[str]:
        """Say that the source has ended: all words that are left. The stream is then as new."""
        return self._pool.finish()[0]

    def fork(self) -> "Stream":
        """Another stream that goes on from here."""
        return Stream(StreamPool(self._pool.interpreter, [self._row.fork()], self._pool.states))

    def save(self, path: str | Path) -> None:
        """Write the stream to a safetensors file, for `Interpreter.load`."""
        self._pool.interpreter.save(path, self._pool.states, self._row.kept())

    @property
    def n_bytes(self) -> int:
        """Memory it takes, the model not counted."""
        return self._pool.states.n_bytes + sum(x.nbytes for x in self._row.kept().values())

    @property
    def _row(self) -> Row:
        return self._pool.rows[0]


class StreamPool:
    """Streams that are stepped as one batch, each with the words it would have had alone.

    `Interpreter.pool` makes one of new streams, `StreamPool.join` one of any; `split` gives them
    back.
    """

    def __init__(self, interpreter: Interpreter, rows: list[Row], states: Any) -> None:
        self.interpreter = interpreter
        self.rows = rows
        self.states = states

    @classmethod
    def join(cls, streams: Sequence[Stream]) -> "StreamPool":
        """The streams, which go on in the pool; they should not be used on their own then."""
        pools = [stream._pool for stream in streams]
        if not pools or any(pool.interpreter is not pools[0].interpreter for pool in pools):
            raise InputError("join one or more streams of one interpreter")
        states = pools[0].states.concat([pool.states for pool in pools[1:]])
        return cls(pools[0].interpreter, [pool.rows[0] for pool in pools], states)

    def split(self) -> list[Stream]:
        """The streams, each on its own again; the pool should not be used then."""
        return [
            Stream(StreamPool(self.interpreter, [row], self.states.select([i])))
            for i, row in enumerate(self.rows)
        ]

    def __len__(self) -> int:
        return len(self.rows)

    def push(self, sources: Sequence[Any]) -> list[list[str]]:
        """Take more of each source, None for nothing, and give each stream's new words."""
        if len(sources) != len(self.rows):
            raise InputError(f"{len(sources)} sources for {len(self.rows)} streams")
        # Into forks first: an error in one source leaves the others, and itself, as they were.
        taken = [
            row.source if x is None else row.source.fork()
            for row, x in zip(self.rows, sources, strict=True)
        ]
        for source, more in zip(taken, sources, strict=True):
            if more is not None:
                source.push(more)
        for row, source in zip(self.rows, taken, strict=True):
            row.source = source
        return self._run()

    def finish(self, which: Sequence[int] | None = None) -> list[list[str]]:
        """Say that sources have ended: those of the given streams, or all. New words of all."""
        for i in range(len(self.rows)) if which is None else which:
            self.rows[i].source.finish()
        return self._run()

    def _run(self) -> list[list[str]]:
        """Read and write in turn until there is nothing left to read."""
        while True:
            chunks = {i: row.take() for i, row in enumerate(self.rows)}
            read = {i: chunk for i, chunk in chunks.items() if chunk is not None}
            if not read:
                return [row.handed_out() for row in self.rows]
            self._read(read)
            going_on = [i for i in read if not self.rows[i].is_ended]
            if self.interpreter.policy.drafts:
                self._agree(going_on)
                going_on = []
            ended = [i for i in read if self.rows[i].is_ended]
            if self.interpreter.beam > 1:
                self._complete(ended)
                self._write(going_on)
            else:
                self._write([*going_on, *ended])
            for i in ended:
                self.rows[i].begin(self.interpreter.start)
            if ended:
                blank = self.interpreter.blank.select([0] * len(ended))
                self._put(ended, blank)

    def _read(self, chunks: dict[int, Chunk]) -> None:
        same_size = defaultdict(list)
        for i, chunk in chunks.items():
            same_size[len(chunk.content)].append(i)
        for size, rows in same_size.items():
            if size:
                content = np.stack([chunks[i].content for i in rows])
                self._put(rows, self.interpreter.read(content, self._states(rows)))

    def _write(self, rows: list[int]) -> None:
        """Write in all these rows, until each has ended or has to read on."""
        while rows := [i for i in rows if self._may_write(i)]:
            pieces, after, attention = self.interpreter.write(
                [self.rows[i].last for i in rows],
                self._states(rows),
                [self.rows[i].may_end for i in rows],
            )
            trusted = [True] * len(rows)
            if attention is not None:
                trusted = self.interpreter.policy.trusts(attention).tolist()
            kept = []
            for place, (i, piece) in enumerate(zip(rows, pieces, strict=True)):
                # An end before the source's means that there is nothing to say yet.
                if piece != EOS and (trusted[place] or self.rows[i].is_ended):
                    self.rows[i].write(piece)
                    kept.append(place)
            if len(kept) < len(rows):
                after = after.select(kept)
                rows = [rows[place] for place in kept]
            if rows:
                self._put(rows, after)

    def _complete(self, rows: list[int]) -> None:
        """Search for the rest of sentences that have been read to their ends."""
        rows = [i for i in rows if self._may_write(i)]
        if not rows:
            return
        interpreter = self.interpreter
        sentences = [
            Open(row.last, interpreter.limit(row) - row.n_written, row.is_said)
            for row in (self.rows[i] for i in rows)
        ]
        found = search(
            interpreter.score,
            self._states(rows),
            sentences,
            interpreter.beam,
            lambda piece: interpreter.vocabulary.pieces[piece] != SPACE,
        )
        for i, pieces in zip(rows, found, strict=True):
            for piece in pieces:
                self.rows[i].write(piece)

    def _may_write(self, i: int) -> bool:
        row, interpreter = self.rows[i], self.interpreter
        if not row.is_heard or row.n_written >= interpreter.limit(row):
            return False
        return row.is_ended or interpreter.policy.may_write(row.n_read, row.n_written)

    def _agree(self, rows: list[int]) -> None:
        """Write what the last drafts of each row begin with in common."""
        rows = [i for i in rows if self._may_write(i)]
        agreed = defaultdict(list)
        for i, draft in zip(rows, self._drafts(rows), strict=True):
            row = self.rows[i]
            row.drafts = [*row.drafts, draft][-self.interpreter.policy.drafts :]
            common = _common(row.drafts)
            room = row.n_read - row.n_written
            if len(row.drafts) == self.interpreter.policy.drafts and common[:room]:
                agreed[len(common[:room])].append((i, common[:room]))
        for n, found in agreed.items():
            chosen = [i for i, _ in found]
            written = [[self.rows[i].last, *pieces[:-1]] for i, pieces in found]
            _, after, _ = self.interpreter.logits(np.array(written), self._states(chosen))
            self._put(chosen, after)
            for i, pieces in found:
                row = self.rows[i]
                row.drafts = [draft[n:] for draft in row.drafts]
                for piece in pieces:
                    row.write(piece)

    def _drafts(self, rows: list[int]) -> list[list[int]]:
        """What would follow in each row if nothing more were read."""
        drafts: dict[int, list[int]] = {i: [] for i in rows}
        states = self._states(rows) if rows else self.states
        going_on = list(rows)
        for _ in range(DRAFT):
            if not going_on:
                break
            pieces, states, _ = self.interpreter.write(
                [drafts[i][-1] if drafts[i] else self.rows[i].last for i in going_on],
                states,
                [self.rows[i].may_end for i in going_on],
            )
            kept = []
            for place, (i, piece) in enumerate(zip(going_on, pieces, strict=True)):
                row = self.rows[i]
                full = row.n_written + len(drafts[i]) >= self.interpreter.limit(row)
                if piece != EOS and not full:
                    drafts[i].append(piece)
                    kept.append(place)
            if len(kept) < len(going_on):
                states = states.select(kept)
                going_on = [going_on[place] for place in kept]
        return list(drafts.values())

    def _states(self, rows: list[int]) -> Any:
        if rows == list(range(len(self.rows))):
            return self.states
        return self.states.select(rows)

    def _put(self, rows: list[int], new: Any) -> None:
        """Replace the states of some rows."""
        n = len(self.rows)
        if rows == list(range(n)):
            self.states = new
            return
        others = [i for i in range(n) if i not in rows]
        if others:
            new = self.states.select(others).concat([new])
        self.states = new.select(np.argsort([*others, *rows]).tolist())


def _common(drafts: Sequence[Sequence[int]]) -> list[int]:
    """What all begin with."""
    found = []
    for pieces in zip(*drafts, strict=False):
        if len(set(pieces)) > 1:
            break
        found.append(pieces[0])
    return found
