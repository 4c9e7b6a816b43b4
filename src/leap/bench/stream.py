"""How long one more word of a stream takes, against how much of it has been read.

A step of text reads one subword of the source and writes one of the target. A step of speech makes
frames of 320 ms of sound, reads the states they give, and writes one subword. Our translation model
does it on states of constant size, whether it sees the source by linear attention (`leapformer`) or
by softmax attention to a window of it (`leapformer-window`). Beside it is the same model with
softmax attention everywhere, in two ways: with all its keys and values kept (`softmax-cache`), and
with the source encoded anew at each step by an encoder that sees all of it (`softmax-reencode`), as
the authors' system does.

All have random weights, which take as long as trained ones. Ours really reads the source and writes
the target up to where it is timed, one subword per step. For softmax attention that would take time
in the square of the length, so its KV cache is filled with random numbers instead: a step costs
the same whatever it holds. A step copies it as it takes new ones in; that is in the time.

Every step begins from the same states, so that nothing grows from turn to turn.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from leap.bench.measure import Call
from leap.bench.run import Report, Steps, Timed, TurnsConfig, report_on, time_by_turns
from leap.errors import ConfigError
from leap.models import (
    LeapformerForSeq2SeqLM,
    LeapformerForSpeechSeq2Seq,
    LeapformerSeq2SeqConfig,
    LeapformerSpeechConfig,
    States,
)
from leap.models.fbank import LeapformerFeatureExtractor
from leap.ops.softmax import SoftmaxState
from leap.reports.progress import Progress, silent

OURS, WINDOW = "leapformer", "leapformer-window"
CACHE, REENCODE = "softmax-cache", "softmax-reencode"
AT_ONCE = 1000
"""States read, or subwords written, at once on the way to a length; no matter to what is timed."""
STATES_PER_STEP = 4
"""Of speech: what comes between two subwords that are written."""
N_SUBSAMPLING = 3
"""Of speech: 8 frames of 10 ms make a state."""

Kind = Literal["text", "speech"]


@dataclass(frozen=True, kw_only=True)
class StreamBenchConfig(TurnsConfig):
    """Measure the time of one more word of a stream, beside softmax and re-encoding.

    Of text and of speech. Our model reads the stream; softmax attention has a KV cache
    filled with random numbers, as reading would take it quadratic time. Prints tables; writes
    results.json, results.md and stream.png.
    """

    lengths: tuple[int, ...] = (100, 1000, 10_000, 100_000)
    """Subwords of text read, and as many written, before the one that is timed."""
    sound: tuple[int, ...] = (10, 60, 600, 3600)
    """Seconds of speech heard before the 320 ms that are timed."""
    longest_reencoded: int = 10_000
    """Beyond this many subwords, or states of 80 ms, the source is not re-encoded, which would
    take too long."""
    hidden_size: int = 128
    """Width of the models."""
    layers: int = 3
    """Layers of the encoder, and of the decoder."""
    heads: int = 4
    """Heads of each attention."""
    cross_window: int = 128
    """States of the source that the model with a window sees."""
    vocabulary: int = 6000
    """Subwords in the vocabulary."""
    output: Path = Path("runs/bench-stream")
    """Folder to write the results to."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_at_least_one(
            "lengths", "sound", "hidden_size", "layers", "heads", "cross_window", "vocabulary"
        )
        if not self.lengths and not self.sound:
            raise ConfigError("nothing to measure: give at least one of lengths or sound")


@dataclass(frozen=True, kw_only=True)
class StreamResult(Timed):
    """What one model took for a step after one length."""

    kind: Kind
    model: str
    length: int
    """Subwords of text, or seconds of speech."""
    real_time_factor: float | None
    """Of speech: that over the time in which the sound of a step arrives."""
    state_bytes: int
    """Memory of what is kept of the stream, or, encoding anew, made each time."""


StreamReport = Report[StreamBenchConfig, StreamResult]


@torch.no_grad()
def measure(config: StreamBenchConfig, progress: Progress = silent) -> StreamReport:
    """Measure all models, by turns, at each length of text and of speech."""
    return report_on(config, _results(config, progress))


def _results(config: StreamBenchConfig, progress: Progress) -> Iterator[StreamResult]:
    sources = [
        source
        for source, lengths in ((Text(config), config.lengths), (Speech(config), config.sound))
        if lengths
    ]
    total = sum(
        3 + (source.n_states(length) <= config.longest_reencoded)
        for source in sources
        for length in source.lengths
    )
    steps = Steps(progress, total=total)
    for source in sources:
        yield from _measure(config, source, steps)


class Source(ABC):
    """What arrives, a step at a time, and the models that translate it.

    Args:
        config: sizes.
        lengths: after which to measure.
    """

    kind: Kind
    states_per_step: int
    step_seconds: float | None = None
    """How long a step takes to arrive, if that takes time."""

    def __init__(self, config: StreamBenchConfig, lengths: Sequence[int]) -> None:
        self.config = config
        self.lengths = sorted(set(lengths))
        self.random = torch.Generator().manual_seed(config.seed)

    def model(self, name: str) -> LeapformerForSeq2SeqLM:
        """The model of a line, with random weights."""
        torch.manual_seed(self.config.seed)
        settings: dict[str, Any] = {
            "vocab_size": self.config.vocabulary,
            "hidden_size": self.config.hidden_size,
            "n_layer": self.config.layers,
            "n_head": self.config.heads,
            "attention": "softmax" if name in (CACHE, REENCODE) else "leapformer",
        }
        if name == WINDOW:
            settings |= {"cross_attention": "softmax", "cross_window": self.config.cross_window}
        model = self._build(settings)
        return model.eval().to(self.config.chosen_device())  # type: ignore[no-untyped-call]

    def pieces(self, n: int) -> Tensor:
        """Random subwords, `[1, n]`."""
        drawn = torch.randint(4, self.config.vocabulary, (1, n), generator=self.random)
        return drawn.to(self.config.chosen_device())

    @abstractmethod
    def n_states(self, length: int) -> int:
        """States of the encoder after so much of the source."""

    @abstractmethod
    def draw(self, n_states: int) -> Tensor:
        """A source of `n_states` states, as a model reads it."""

    @abstractmethod
    def arrive(self) -> Tensor:
        """What a step reads, made of what arrives."""

    @abstractmethod
    def _build(self, settings: dict[str, Any]) -> LeapformerForSeq2SeqLM: ...


class Text(Source):
    """Subwords of text: one is a state, and a step."""

    kind: Kind = "text"
    states_per_step = 1

    def __init__(self, config: StreamBenchConfig) -> None:
        super().__init__(config, config.lengths)
        self.piece = self.pieces(1)

    def n_states(self, length: int) -> int:
        """As many as subwords."""
        return length

    def draw(self, n_states: int) -> Tensor:
        """Random subwords."""
        return self.pieces(n_states)

    def arrive(self) -> Tensor:
        """A subword."""
        return self.piece

    def _build(self, settings: dict[str, Any]) -> LeapformerForSeq2SeqLM:
        return LeapformerForSeq2SeqLM(LeapformerSeq2SeqConfig(**settings))


class Speech(Source):
    """Sound, of which frames are made as part of a step."""

    kind: Kind = "speech"
    states_per_step = STATES_PER_STEP
    step_seconds = STATES_PER_STEP * 2**N_SUBSAMPLING / 100

    def __init__(self, config: StreamBenchConfig) -> None:
        super().__init__(config, config.sound)
        self.extractor = LeapformerFeatureExtractor()
        n_samples = int(self.step_seconds * self.extractor.sampling_rate)
        noise = np.random.default_rng(config.seed).standard_normal(n_samples, np.float32)
        self.samples = np.clip(0.1 * noise, -1, 1)

    def n_states(self, length: int) -> int:
        """Those of whole steps."""
        return round(length / self.step_seconds) * STATES_PER_STEP

    def draw(self, n_states: int) -> Tensor:
        """Random frames."""
        shape = 1, n_states * 2**N_SUBSAMPLING, self.extractor.feature_size
        return torch.randn(shape, generator=self.random).to(self.config.chosen_device())

    def arrive(self) -> Tensor:
        """Frames of the sound of one step."""
        frames = self.extractor.stream().push(self.samples)
        return torch.from_numpy(frames).unsqueeze(0).to(self.config.chosen_device())

    def _build(self, settings: dict[str, Any]) -> LeapformerForSeq2SeqLM:
        return LeapformerForSpeechSeq2Seq(
            LeapformerSpeechConfig(**settings, n_subsampling=N_SUBSAMPLING)
        )


def _measure(config: StreamBenchConfig, source: Source, steps: Steps) -> Iterator[StreamResult]:
    ours, softmax = {name: source.model(name) for name in (OURS, WINDOW)}, source.model(CACHE)
    kept, before = dict.fromkeys(ours, States({})), 0
    for length in source.lengths:
        n_states = source.n_states(length)
        for name, model in ours.items():
            kept[name] = read_on(model, source, kept[name], n_states - before)
        before = n_states
        filled = fill(softmax, source, n_states)
        calls: dict[str, Call] = {
            name: partial(_step, model, source, kept[name]) for name, model in ours.items()
        }
        calls[CACHE] = partial(_step, softmax, source, filled)
        sizes = {name: states.n_bytes for name, states in kept.items()} | {CACHE: filled.n_bytes}
        if n_states <= config.longest_reencoded:
            heard = source.draw(n_states)
            written = States({}).with_part("self", filled.of("self"))
            calls[REENCODE] = partial(_step, softmax, source, written, heard)
            sizes[REENCODE] = sizes[CACHE]
        doing = f"after {length} {'s of speech' if source.step_seconds else 'subwords'}"
        for name, timed in time_by_turns(calls, steps, doing, config).items():
            factor = None if source.step_seconds is None else timed.seconds / source.step_seconds
            yield StreamResult(
                kind=source.kind,
                model=name,
                length=length,
                real_time_factor=factor,
                state_bytes=sizes[name],
                **vars(timed),
            )


@torch.no_grad()
def read_on(model: LeapformerForSeq2SeqLM, source: Source, states: States, n_states: int) -> States:
    """Read `n_states` more states of the source, and write a subword for each step of them."""
    for start in range(0, n_states, AT_ONCE):
        states = model.read(source.draw(min(AT_ONCE, n_states - start)), states)
    n_pieces = n_states // source.states_per_step
    for start in range(0, n_pieces, AT_ONCE):
        pieces = source.pieces(min(AT_ONCE, n_pieces - start))
        _, states = model.model.decoder.write(pieces, states)
    return states


@torch.no_grad()
def fill(model: LeapformerForSeq2SeqLM, source: Source, n_states: int) -> States:
    """What a model with softmax attention has after `n_states` states, its KV cache random."""
    states = read_on(model, source, States({}), source.states_per_step)
    filled = {}
    for name, state in states.by_name.items():
        if isinstance(state, SoftmaxState):
            per_step = 1 if name.startswith("self") else source.states_per_step
            n = n_states * per_step // source.states_per_step
            k, v = (
                torch.randn(*x.shape[:2], n, x.shape[3], generator=source.random).to(x)
                for x in (state.k, state.v)
            )
            filled[name] = replace(state, k=k, v=v, length=torch.full_like(state.length, n))
    return States({**states.by_name, **filled})


@torch.no_grad()
def _step(
    model: LeapformerForSeq2SeqLM, source: Source, states: States, heard: Tensor | None = None
) -> None:
    """Read a step on top of states, or of all that was heard, which is encoded anew; and write."""
    arrived = source.arrive()
    if heard is not None:
        arrived = torch.cat([heard, arrived], dim=1)
    model.write(source.pieces(1), model.read(arrived, states))
