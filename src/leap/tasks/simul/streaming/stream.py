"""Translation of a source that is still arriving, at a cost per step that does not grow.

    interpreter = Interpreter(model, vocabulary, WaitK(3))
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

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from leap.errors import ConfigError, FileError, InputError
from leap.layers.attention import DotProductAttention
from leap.models.fbank import LeapformerFeatureExtractor
from leap.models.states import States
from leap.ops.state import State, load_states, save_states, state
from leap.reports.files import read_json
from leap.tasks.files import reading_model
from leap.tasks.simul.audio.pauses import Pauses
from leap.tasks.simul.model import Translator, load_run
from leap.tasks.simul.paths import Paths, Resolved
from leap.tasks.simul.streaming.policies import Offline, Policy, read_policy
from leap.tasks.simul.streaming.search import Open, search
from leap.tasks.simul.streaming.sources import Chunk, Source, SpeechSource, TextSource
from leap.tasks.simul.vocabulary import BOS, EOS, PAD, SPACE, UNK, Vocabulary, Words

SPELLS_NOTHING = (BOS, PAD, UNK)
FEW = 10
"""Pieces that may be written whatever the source's length."""
DRAFT = 32
"""Longest draft of what may follow, in pieces: what agreement is looked for in."""
LONGEST_WORD = 64
"""Pieces after which a word is taken for complete, lest it grow for ever."""


@state
class Kept(State):
    """What a stream keeps besides the model's states, for a file."""

    counts: Tensor
    held: Tensor
    drafts: Tensor
    pieces: Tensor | None = None
    begun: Tensor | None = None
    last: Tensor | None = None
    source_count: Tensor | None = None
    frames: Tensor | None = None
    rest: Tensor | None = None
    quiet: Tensor | None = None
    memory: Tensor | None = None
    sound: Tensor | None = None
    voices: Tensor | None = None


class Interpreter:
    """A model with a policy: what all its streams share.

    Args:
        model: of text or of speech.
        vocabulary: of both languages.
        policy: when to read and when to write.
        extractor: makes frames of sound, for a model of speech.
        chunk_size: source states that are read at once, 0 for all when the source has ended; by
            default 1 for text and 4 for speech.
        longest: pieces to write for each source state, besides a few; more are not written, so that
            no model runs away.
        reset: begin anew where a sentence ends, or in a pause of speech, and at the latest after
            so many source states: for sources much longer than those the model was trained on.
        beam: hypotheses to search for the best end of a sentence with, once all of it has been
            read; 1 for greedy decoding to the end.
        language: ISO 639 code of the source, by which ends of sentences in text are told.
        pauses: by what pauses of speech are told: loudness, or silero (silero-vad).
    """

    def __init__(
        self,
        model: Translator,
        vocabulary: Vocabulary,
        policy: Policy,
        *,
        extractor: LeapformerFeatureExtractor | None = None,
        chunk_size: int | None = None,
        longest: float = 2.0,
        reset: int | None = None,
        beam: int = 1,
        language: str = "en",
        pauses: Pauses = "loudness",
    ) -> None:
        is_speech = model.main_input_name == "input_features"
        if is_speech and extractor is None:
            raise ConfigError("a model of speech needs the extractor that makes frames of sound")
        if chunk_size is None:
            chunk_size = 4 if is_speech else 1
        if chunk_size < 0:
            raise ConfigError(f"chunk_size={chunk_size} must be 1 or more, or 0 for all")
        if longest <= 0 or (reset is not None and reset < 1):
            raise ConfigError(f"longest={longest} and reset={reset} must be more than 0")
        if beam < 1:
            raise ConfigError(f"beam={beam} must be 1 or more")
        vocabulary.check_fits(model.config.vocab_size, "the model")
        self.model = model.eval()
        self.vocabulary = vocabulary
        self.policy = policy
        self.extractor = extractor if is_speech else None
        self.chunk_size = chunk_size
        self.longest = longest
        self.reset = reset
        self.beam = beam
        self.language = language
        self.pauses = pauses
        start = model.config.decoder_start_token_id
        self.start = BOS if start is None else start
        self.space = vocabulary.pieces.index(SPACE) if SPACE in vocabulary.pieces else None
        cross: Any = model.get_decoder().layers[-1].cross_attention
        if policy.window and not isinstance(cross, DotProductAttention):
            raise ConfigError(f"{policy.name} needs a cross-attention whose weights are known")
        window = getattr(cross, "window", None)
        if window is not None and policy.too_new and window <= chunk_size * policy.too_new:
            raise ConfigError(
                f"{policy.name} trusts nothing of the last {chunk_size * policy.too_new} source "
                f"states, and the model sees no more than cross_window={window}; it would write "
                "nothing before the end"
            )
        self.blank = self._blank()

    def stream(self) -> "Stream":
        """A new stream."""
        return Stream(self.pool(1))

    def pool(self, n: int) -> "StreamPool":
        """So many new streams, to be stepped together."""
        rows = [self.row() for _ in range(n)]
        return StreamPool(self, rows, self.blank.select(torch.zeros(n, dtype=torch.long)))

    def load(self, path: str | Path) -> "Stream":
        """The stream that `Stream.save` wrote, to be gone on with."""
        states = load_states(path, self.model.device)
        kept = states.pop("stream", None)
        found = States(states)
        if not isinstance(kept, Kept) or found.layout() != self.blank.layout():
            raise FileError(f"{path} holds no stream of this model and policy")
        row = self.row()
        try:
            row.restore(kept.to("cpu"))
        except (AttributeError, TypeError) as error:
            raise FileError(f"{path} holds no stream of this kind of source") from error
        return Stream(StreamPool(self, [row], found))

    def row(self) -> "Row":
        """All of a new stream but the model's states."""
        source: Source
        if self.extractor is None:
            source = TextSource(self.vocabulary, self.chunk_size, self.reset, self.language)
        else:
            per_state = self.model.config.frames_per_state
            source = SpeechSource(
                self.extractor, per_state, self.chunk_size, self.reset, self.pauses
            )
        return Row(source, self.vocabulary.words(), self.start)

    def limit(self, row: "Row") -> int:
        """How many pieces may have been written by now."""
        return int(self.longest * row.n_read) + FEW

    def read(self, chunk: Tensor, states: States) -> States:
        """Read one more chunk, and remember what had been read before, if the policy looks back."""
        after = self.model.read(chunk.to(self.model.device), states)
        if not self.policy.window:
            return after
        earlier: Any = states.of("cross")[-1]
        return after.with_part("before", [earlier.without_values(), *states.of("before")[:-1]])

    def write(
        self, last: Sequence[int], states: States, may_end: Sequence[bool]
    ) -> tuple[list[int], States, Tensor | None]:
        """The likeliest subwords that follow, and attention to the last chunks, newest first.

        Args:
            last: one for each row.
            states: of the rows.
            may_end: whether a row may end here; if not, it has to say something.
        """
        given = torch.tensor(last, device=self.model.device)
        logits, after, shares = self.model.write_with_shares(
            given.unsqueeze(1), states, states.of("before")
        )
        attention = None
        if shares is not None:
            before = shares.mean(dim=1)[:, -1]  # over the heads
            attention = torch.cat([1 - before[:, :1], -before.diff(dim=1)], dim=1)
        scores = self._allowed(logits, given, torch.tensor(may_end))
        return scores.argmax(dim=-1).tolist(), after, attention

    def score(self, last: Tensor, states: States, may_end: Tensor) -> tuple[Tensor, States]:
        """Scores of what may follow the last subwords; -inf for what must not."""
        logits, after = self.model.write(last.to(self.model.device).unsqueeze(1), states)
        return self._allowed(logits, last, may_end), after

    def _allowed(self, logits: Tensor, last: Tensor, may_end: Tensor) -> Tensor:
        """Scores of what may follow the last token; -inf for what must not."""
        scores = logits[:, -1].clone()
        scores[:, list(SPELLS_NOTHING)] = -torch.inf
        must_say = ~may_end.to(scores.device)
        scores[must_say, EOS] = -torch.inf
        if self.space is not None:  # One space after another says nothing either.
            is_space = last.to(scores.device) == self.space
            scores[must_say & is_space, self.space] = -torch.inf
        return scores

    @torch.no_grad()
    def _blank(self) -> States:
        """What the model keeps of nothing, in one row."""
        model, device = self.model, self.model.device
        nothing = torch.zeros(1, 0, dtype=torch.long, device=device)
        source = nothing
        if self.extractor is not None:
            source = torch.zeros(1, 0, self.extractor.feature_size, device=device)
            source = source.to(model.dtype)
        states = model.write(nothing, model.read(source))[1]
        if self.policy.window:
            earlier: Any = states.of("cross")[-1]
            states = states.with_part("before", [earlier.without_values()] * self.policy.window)
        return states


@dataclass
class Row:
    """All that one stream is but the model's states."""

    source: Source
    words: Words
    last: int
    """The piece written last."""
    n_read: int = 0
    """Source states of this sentence."""
    n_written: int = 0
    """Pieces of this sentence."""
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
        """Write one more piece."""
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

    def kept(self) -> Kept:
        """All there is to save."""
        counts = [self.last, self.n_read, self.n_written, int(self.is_heard), int(self.is_said)]
        drafts = [piece for draft in self.drafts for piece in (*draft, EOS)]
        parts = {"counts": counts, "held": self.words.held, "drafts": drafts}
        tensors = {
            name: torch.tensor(values, dtype=torch.long)[None] for name, values in parts.items()
        }
        return Kept(**tensors, **self.source.kept())

    def restore(self, kept: Kept) -> None:
        """Go on from what was saved."""
        if (kept.frames is None) == isinstance(self.source, SpeechSource):
            raise AttributeError("another kind of source")
        self.last, self.n_read, self.n_written, is_heard, is_said = kept.counts[0].tolist()
        self.is_heard, self.is_said = bool(is_heard), bool(is_said)
        self.words.held = kept.held[0].tolist()
        draft: list[int] = []
        for piece in kept.drafts[0].tolist():
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
        save_states(path, {**self._pool.states.by_name, "stream": self._row.kept()})

    @property
    def n_bytes(self) -> int:
        """Memory it takes, the model not counted."""
        return self._pool.states.n_bytes + self._row.kept().n_bytes

    @property
    def _row(self) -> Row:
        return self._pool.rows[0]


class StreamPool:
    """Streams that are stepped as one batch, each with the words it would have had alone.

    `Interpreter.pool` makes one of new streams, `StreamPool.join` one of any; `split` gives them
    back.
    """

    def __init__(self, interpreter: Interpreter, rows: list[Row], states: States) -> None:
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
            Stream(StreamPool(self.interpreter, [row], self.states.select(torch.tensor([i]))))
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

    @torch.no_grad()
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
                blank = self.interpreter.blank.select(torch.zeros(len(ended), dtype=torch.long))
                self._put(ended, blank)

    def _read(self, chunks: dict[int, Chunk]) -> None:
        same_size = defaultdict(list)
        for i, chunk in chunks.items():
            same_size[len(chunk.content)].append(i)
        for size, rows in same_size.items():
            if size:
                content = torch.stack([chunks[i].content for i in rows])
                if content.is_floating_point():
                    content = content.to(self.interpreter.model.dtype)
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
                after = after.select(torch.tensor(kept, dtype=torch.long))
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
            tokens = torch.tensor(written, device=self.interpreter.model.device)
            self._put(chosen, self.interpreter.model.write(tokens, self._states(chosen))[1])
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
                states = states.select(torch.tensor(kept, dtype=torch.long))
                going_on = [going_on[place] for place in kept]
        return list(drafts.values())

    def _states(self, rows: list[int]) -> States:
        if rows == list(range(len(self.rows))):
            return self.states
        return self.states.select(torch.tensor(rows))

    def _put(self, rows: list[int], new: States) -> None:
        """Replace the states of some rows."""
        n = len(self.rows)
        if rows == list(range(n)):
            self.states = new
            return
        others = [i for i in range(n) if i not in rows]
        if others:
            new = self.states.select(torch.tensor(others)).concat([new])
        self.states = new.select(torch.tensor([*others, *rows]).argsort())


@dataclass(frozen=True)
class Trained:
    """What a run has left: a model, and how it learnt to read."""

    model: Translator
    vocabulary: Vocabulary
    extractor: LeapformerFeatureExtractor | None
    paths: Resolved

    def interpreter(
        self,
        policy: str | Policy,
        *,
        chunk_size: int | None = None,
        longest: float = 2.0,
        reset: int | None = None,
        beam: int = 1,
        pauses: Pauses = "loudness",
    ) -> Interpreter:
        """The model with a policy.

        Args:
            policy: or its name, where a wait has the ratio of the training, unless it says.
            chunk_size: states that are read at once, 0 for all; by default the fewest of the
                training, offline the most.
            longest, reset, beam, pauses: see `Interpreter`.
        """
        if isinstance(policy, str):
            policy = read_policy(policy, self.paths.ratio)
        if chunk_size is None:
            choose = max if isinstance(policy, Offline) else min
            chunk_size = choose(self.paths.chunk_sizes, key=lambda size: size or math.inf)
        return Interpreter(
            self.model,
            self.vocabulary,
            policy,
            extractor=self.extractor,
            chunk_size=chunk_size,
            longest=longest,
            reset=reset,
            beam=beam,
            language=getattr(self.model.config, "source_language", "en"),
            pauses=pauses,
        )


def load_trained(run: Path) -> Trained:
    """The model of a run folder, or of the folder of its model."""
    model, vocabulary = load_run(run)
    folder = run / "model" if (run / "model").is_dir() else run
    extractor = None
    if model.main_input_name == "input_features":
        with reading_model(folder):
            extractor = LeapformerFeatureExtractor.from_pretrained(str(folder))
    settings = folder.parent / "config.json"
    has_settings = folder.name == "model" and settings.is_file()
    found = read_json(settings) if has_settings else {}
    with reading_model(folder.parent):
        paths = Paths(ratio=found.get("ratio"), chunk_sizes=found.get("chunk_sizes"))
        resolved = paths.resolved(is_speech=extractor is not None)
    return Trained(model, vocabulary, extractor, resolved)


def _common(drafts: Sequence[Sequence[int]]) -> list[int]:
    """What all begin with."""
    found = []
    for pieces in zip(*drafts, strict=False):
        if len(set(pieces)) > 1:
            break
        found.append(pieces[0])
    return found
