"""Sentences joined into long streams, translated without a word of where each ends.

What comes out is cut into the sentences of the references (`leap.tasks.simul.scoring.resegment`),
with delays that count from where each began, so that quality and latency can be told as of
sentences. And each step is timed, to show what a step costs at any place of a stream.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from leap.errors import ConfigError
from leap.reports.plots import Line, Panel, plot
from leap.reports.table import KIB
from leap.runtime.fbank import Samples
from leap.tasks.simul.audio.files import read_sound
from leap.tasks.simul.corpora.corpus import Sentence
from leap.tasks.simul.scoring.metrics import Amount, Instance
from leap.tasks.simul.scoring.resegment import resegment
from leap.tasks.simul.streaming.stream import Interpreter

BINS = 40
"""Points of a curve of the cost: medians over as many stretches of the streams."""


@dataclass(frozen=True)
class Step:
    """One more word of a stream, or one more stretch of its sound."""

    stream: int
    position: Amount
    """Words or milliseconds of the stream, this step's included."""
    seconds: float
    """Computing."""
    state_bytes: int
    """Memory of what is kept of the stream after it."""


@dataclass
class Translated:
    """A stream, and what came out."""

    sentences: Sequence[Sentence]
    spans: list[tuple[Amount, Amount]] = field(default_factory=list)
    """Where each sentence begins in the stream, and how long it is."""
    words: list[str] = field(default_factory=list)
    delays: list[Amount] = field(default_factory=list)
    elapsed: list[Amount] = field(default_factory=list)
    """Of each word of speech, its delay and all computing up to it; of text, 0."""
    times: list[Amount] = field(default_factory=list)
    """Of each word of speech, when it really came, as computing goes on while listening."""
    steps: list[Step] = field(default_factory=list)

    @property
    def length(self) -> Amount:
        """Of the source."""
        return self.steps[-1].position if self.steps else 0

    def whole(self, index: int) -> Instance:
        """The stream as one instance."""
        return Instance(
            prediction=" ".join(self.words),
            reference=" ".join(sentence.target for sentence in self.sentences),
            delays=self.delays,
            source_length=self.length,
            elapsed=self.elapsed,
            index=index,
            source=f"stream-{index}",
        )

    def cut(self, first: int) -> list[Instance]:
        """Its sentences, with delays that count from the beginning of each.

        Args:
            first: number of the first.
        """
        references = [sentence.target for sentence in self.sentences]
        found: list[list[int]] = [[] for _ in references]
        for i, place in enumerate(resegment(self.words, references)):
            found[place].append(i)
        end, is_timed = sum(self.spans[-1]), bool(self.times)
        return [
            Instance(
                prediction=" ".join(self.words[i] for i in chosen),
                reference=sentence.target,
                delays=[self.delays[i] - begin for i in chosen],
                source_length=length,
                elapsed=[self.elapsed[i] - begin if is_timed else 0 for i in chosen],
                times=[self.times[i] - begin for i in chosen] if is_timed else (),
                index=index,
                source=sentence.source,
                end=end - begin,
            )
            for index, (sentence, (begin, length), chosen) in enumerate(
                zip(self.sentences, self.spans, found, strict=True), start=first
            )
        ]


def sound_of(sentence: Sentence, rate: int) -> Samples:
    """The recording of a sentence, at a rate."""
    if sentence.audio is None:
        raise ConfigError(f"sentence {sentence.id} is not spoken")
    if sentence.audio.holds_features:
        raise ConfigError(f"sentence {sentence.id} has frames, but no recording to stream")
    return read_sound(sentence.audio, rate)


def join(sentences: Sequence[Sentence], size: float | None) -> Sequence[Sequence[Sentence]]:
    """Streams of sentences, in order.

    Args:
        sentences: text, or recordings.
        size: words of text, or minutes of sound, after which a stream ends with its sentence; None
            for one stream of all.
    """
    if size is None:
        return [sentences]
    streams: list[list[Sentence]] = [[]]
    filled = 0.0
    for sentence in sentences:
        if filled >= size:
            streams.append([])
            filled = 0.0
        streams[-1].append(sentence)
        is_text = sentence.audio is None
        filled += len(sentence.source.split()) if is_text else (sentence.n_frames or 0) / 6000
    return streams


def translate_long(
    interpreter: Interpreter,
    sentences: Sequence[Sentence],
    *,
    index: int = 0,
    segment: int = 320,
    pause: int = 500,
    tell: Callable[[int], None] = lambda done: None,
) -> Translated:
    """Translate one stream, timing each step.

    Args:
        interpreter: the model with its policy.
        sentences: to be joined.
        index: the stream's number.
        segment: milliseconds of sound that come at once.
        pause: milliseconds of silence between sentences of sound.
        tell: is told how many sentences have begun.
    """
    found = Translated(sentences)
    stream = interpreter.stream()
    if interpreter.extractor is None:
        parts = _words(sentences, found.spans, tell)
    else:
        rate = interpreter.extractor.sampling_rate
        joined = _sound(sentences, rate, pause, found.spans, tell)
        parts = _blocks(joined, -(-segment * rate // 1000), rate)
    is_speech = interpreter.extractor is not None
    spent = now = 0.0
    for part, position, is_last in parts:
        started = time.perf_counter()
        words = stream.push(part)
        if is_last:
            words += stream.finish()
        cost = time.perf_counter() - started
        spent += 1000 * cost
        now = max(now, position) + 1000 * cost  # As in `real_time`, but for every step.
        found.words += words
        found.delays += [position] * len(words)
        found.elapsed += [position + spent if is_speech else 0] * len(words)
        found.times += [now] * len(words) if is_speech else []
        found.steps.append(Step(index, position, cost, stream.n_bytes))
    return found


def _words(
    sentences: Sequence[Sentence], spans: list[tuple[Amount, Amount]], tell: Callable[[int], None]
) -> Iterator[tuple[Any, Amount, bool]]:
    texts = [sentence.source.split() for sentence in sentences]
    total, position = sum(map(len, texts)), 0
    for number, words in enumerate(texts, start=1):
        spans.append((position, len(words)))
        for word in words:
            position += 1
            yield [word], position, position == total
        tell(number)


def _sound(
    sentences: Sequence[Sentence],
    rate: int,
    pause: int,
    spans: list[tuple[Amount, Amount]],
    tell: Callable[[int], None],
) -> Iterator[Samples]:
    silence = np.zeros(pause * rate // 1000, np.float32)
    position = 0
    for number, sentence in enumerate(sentences, start=1):
        sound = sound_of(sentence, rate)
        spans.append((1000 * position / rate, 1000 * len(sound) / rate))
        yield sound
        if number < len(sentences):
            yield silence
        position += len(sound) + len(silence)
        tell(number)


def _blocks(
    sounds: Iterator[Samples], size: int, rate: int
) -> Iterator[tuple[Samples, Amount, bool]]:
    """The same sound in parts of one size, each with its end in milliseconds, the last one told."""
    waiting = np.zeros(0, np.float32)
    position = 0
    for sound in sounds:
        waiting = np.concatenate([waiting, sound])
        while len(waiting) > size:
            position += size
            yield waiting[:size], 1000 * position / rate, False
            waiting = waiting[size:]
    if len(waiting):
        yield waiting, 1000 * (position + len(waiting)) / rate, True


def cost_curve(steps: Sequence[Step]) -> tuple[list[float], list[float], list[float]]:
    """Positions, and the median seconds and bytes of the steps around each."""
    if not steps:
        return [], [], []
    positions = np.array([step.position for step in steps], dtype=float)
    place = np.minimum((positions / positions.max() * BINS).astype(int), BINS - 1)
    bins = sorted(set(place.tolist()))
    seconds = np.array([step.seconds for step in steps])
    sizes = np.array([step.state_bytes for step in steps])
    return (
        [float(positions[place == i].mean()) for i in bins],
        [float(np.median(seconds[place == i])) for i in bins],
        [float(np.median(sizes[place == i])) for i in bins],
    )


def plot_cost(curves: dict[str, Sequence[Step]], unit: str, title: str) -> Figure:
    """Time of a step and size of what is kept, against the place in the stream."""
    scale, shown = (60_000, "minutes") if unit == "ms" else (1, unit)
    found = {name: cost_curve(steps) for name, steps in curves.items()}
    panels = [
        Panel(
            x=f"place in the stream ({shown})",
            y=label,
            lines=[
                Line(
                    name, [(x / scale, y * factor) for x, y in zip(curve[0], curve[i], strict=True)]
                )
                for name, curve in found.items()
            ],
            y_limits=(0, None),
        )
        for i, label, factor in ((1, "per step (ms, median)", 1000), (2, "state (KiB)", 1 / KIB))
    ]
    return plot(panels, title, n_columns=1, shared=True)
