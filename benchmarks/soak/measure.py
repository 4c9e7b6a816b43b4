"""Many streams of speech that join a pool and leave it at random: do they stay small, and right?

    python benchmarks/soak/measure.py

A tiny model with random weights translates sound made up of notes and pauses. Each stream gets
parts of various lengths, or none for a while, and leaves at a random time, when another joins. What
each has said is compared with what it says alone, its sound given at once. What is kept, and the
work per second of sound, are counted rather than timed. Writes results.json and results.md beside
this file, or to --output.
"""

import gc
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
from torch import Tensor

from leap.bench.report import where
from leap.bench.run import describe_machine
from leap.models.fbank import LeapformerFeatureExtractor
from leap.runtime.fbank import Samples
from leap.runtime.streaming.policies import read_policy
from leap.runtime.streaming.stream import StreamPool
from leap.runtime.streaming.vocabulary import EOS
from leap.tasks.simul.model import ModelConfig, build_model
from leap.tasks.simul.streaming.stream import Interpreter
from leap.tasks.simul.vocabulary import train_vocabulary

WORDS = (
    "one two three four five six seven eight nine ten eins zwei drei vier sechs sieben acht neun"
)
RATE, NOTE = 16000, 1600
QUARTERS = 4
EVERY = 5
"""Rounds from one count of all tensors to the next, as it looks at all objects."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Let streams join and leave, and look at what they keep."""

    streams: int = 50
    """Streams at any time."""
    seconds: float = 3600.0
    """Of sound, of all streams together."""
    stay: float = 20.0
    """Seconds of sound after which a stream leaves, on average."""
    policy: str = "align-2"
    """When to write."""
    reset: int = 100
    """Begin anew in a pause, and at the latest after this number of states."""
    seed: int = 0
    """Random seed."""
    output: Path = Path(__file__).parent
    """Folder for the results."""


@dataclass
class Guest:
    """One stream, while it stays."""

    seed: int
    sound: list[Samples] = field(default_factory=list)
    words: list[str] = field(default_factory=list)


@dataclass
class Counts:
    """What is kept and done, of each round."""

    state_bytes: list[int] = field(default_factory=list)
    """Of all streams: the model's states."""
    source_bytes: list[int] = field(default_factory=list)
    """Of all streams: sound that was not read yet, and what else is kept of the source."""
    tensors: list[int] = field(default_factory=list)
    """Tensors in the program."""
    steps: list[int] = field(default_factory=list)
    """Rows that the model has read or written."""
    last_steps: int = 0
    """Those of the end, when all leave at once, which are of no round."""
    sound: list[float] = field(default_factory=list)
    """Seconds of sound that came."""
    seconds: list[float] = field(default_factory=list)
    """CPU time it took."""

    def quarters(self) -> list[dict[str, float]]:
        """The most that was kept in each quarter of the rounds, and work per second of sound."""
        found = []
        for part in np.array_split(np.arange(len(self.steps)), QUARTERS):
            of = slice(int(part[0]), int(part[-1]) + 1)
            sound = sum(self.sound[of])
            found.append(
                {
                    "state_bytes": max(self.state_bytes[of]),
                    "source_bytes": max(self.source_bytes[of]),
                    "tensors": max(self.tensors[of]),
                    "steps_per_second": sum(self.steps[of]) / sound,
                    "real_time_factor": sum(self.seconds[of]) / sound,
                }
            )
        return found


def make_interpreter(settings: Settings, counts: list[int]) -> Interpreter:
    """A random model in double precision; `counts` gets the rows of each of its steps."""
    torch.manual_seed(settings.seed)
    vocabulary = train_vocabulary([WORDS], size=60)
    sizes = {"hidden_size": 16, "feed_forward_size": 16, "n_layer": 1, "encoder_layers": 1}
    config = ModelConfig(**sizes, n_head=2, dropout=0.0, ctc_weight=0.0)
    extractor = LeapformerFeatureExtractor(feature_size=8, mean=[12.0] * 8, std=[3.0] * 8)
    model: Any = build_model(config, vocabulary, 8).double()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(2)
        model.lm_head.weight[EOS] *= 1.3
    for name in ("read", "write_with_shares"):
        step = getattr(model, name)

        def counted(rows: Tensor, *given: Any, step: Any = step) -> Any:
            counts.append(len(rows))
            return step(rows, *given)

        setattr(model, name, counted)
    policy = read_policy(settings.policy, 4)
    return Interpreter(
        model, vocabulary, policy, extractor=extractor, reset=settings.reset, longest=1.0
    )


def parts(seed: int) -> Iterator[Samples | None]:
    """Sound without end, in parts of various lengths; None where nothing comes for a while."""
    random = np.random.default_rng(seed)
    while True:
        if random.random() < 0.1:
            yield None
            continue
        notes = [
            np.sin(np.arange(NOTE) * random.uniform(0.05, 1.5)) * random.uniform(0.05, 0.9)
            for _ in range(random.integers(1, 5))
        ]
        if random.random() < 0.1:
            notes = [np.zeros(4 * NOTE)]
        yield np.concatenate(notes).astype(np.float32)[: -int(random.integers(1, NOTE))]


def soak(
    settings: Settings, interpreter: Interpreter, work: list[int]
) -> tuple[Counts, list[Guest]]:
    """Run the streams: what was counted, and all of them, as the last leave in the end.

    Args:
        settings: how many, and how long.
        interpreter: whose streams they are.
        work: gets the rows of each step of the model.
    """
    random = np.random.default_rng(settings.seed)
    guests = [Guest(seed) for seed in range(settings.streams)]
    sources = [parts(guest.seed) for guest in guests]
    pool, counts, left = interpreter.pool(settings.streams), Counts(), []
    while sum(counts.sound) < settings.seconds:
        work.clear()
        before = time.process_time()
        given = [next(source) for source in sources]
        for guest, sound in zip(guests, given, strict=True):
            guest.sound += [] if sound is None else [sound]
        came = sum(len(sound) for sound in given if sound is not None) / RATE
        chance = came / settings.streams / settings.stay
        leaving = [i for i in range(settings.streams) if random.random() < chance]
        for words in (pool.push(given), pool.finish(leaving)):
            for guest, new in zip(guests, words, strict=True):
                guest.words += new
        if leaving:
            streams = pool.split()
            for i in leaving:
                left.append(guests[i])
                guests[i] = Guest(settings.streams + len(left))
                sources[i], streams[i] = parts(guests[i].seed), interpreter.stream()
            pool = StreamPool.join(streams)
            del streams
        counts.seconds.append(time.process_time() - before)
        counts.sound.append(came)
        counts.steps.append(sum(work))
        counts.state_bytes.append(pool.states.n_bytes)
        kept = [part for row in pool.rows for part in row.kept().values()]
        counts.source_bytes.append(sum(part.nbytes for part in kept))
        is_due = len(counts.tensors) % EVERY == 0
        counts.tensors.append(n_tensors() if is_due else counts.tensors[-1])
    work.clear()
    for guest, new in zip(guests, pool.finish(), strict=True):
        guest.words += new
    counts.last_steps = sum(work)
    return counts, left + guests


def n_tensors() -> int:
    """Tensors in the program."""
    return sum(issubclass(type(each), Tensor) for each in gc.get_objects())


def main(settings: Settings) -> dict[str, Any]:
    """Run the streams, and each that has left alone; write what came out, and return it."""
    work: list[int] = []
    interpreter = make_interpreter(settings, work)
    counts, left = soak(settings, interpreter, work)
    work.clear()
    same = 0
    for guest in left:
        stream = interpreter.stream()
        sound = np.concatenate([np.zeros(0, np.float32), *guest.sound])
        same += stream.push(sound) + stream.finish() == guest.words
    found = {
        "left": len(left),
        "same_alone": same,
        "steps": sum(counts.steps) + counts.last_steps,
        "steps_alone": sum(work),
        "words": sum(len(guest.words) for guest in left),
        "seconds_of_sound": sum(counts.sound),
        "quarters": counts.quarters(),
    }
    write(settings, found)
    return found


def write(settings: Settings, found: dict[str, Any]) -> None:
    """Write the numbers, and a table of them."""
    machine = describe_machine(torch.device("cpu"), torch.get_num_threads())
    rows = "\n".join(
        f"| {i} | {each['state_bytes']:,} | {each['source_bytes']:,} | {each['tensors']:,} | "
        f"{each['steps_per_second']:.1f} | {each['real_time_factor']:.3f} |"
        for i, each in enumerate(found["quarters"], start=1)
    )
    page = f"""# Streams that join and leave

`python benchmarks/soak/measure.py`: {settings.streams} streams at any time under {settings.policy},
{found["seconds_of_sound"]:,.0f} s of sound in all; {where(machine)}.

| quarter | bytes of states | bytes of sources | tensors | steps per s of sound | real-time factor |
| --- | --: | --: | --: | --: | --: |
{rows}

The most of each quarter, of all streams together; steps are rows that the model has read or
written, {found["steps"]:,} in all, and {found["steps_alone"]:,} by the same streams alone. Of
{found["left"]:,} streams, {found["same_alone"]:,} had said what they say alone,
{found["words"]:,} words in all.
"""
    settings.output.mkdir(parents=True, exist_ok=True)
    (settings.output / "results.md").write_text(page)
    given = {name: value for name, value in asdict(settings).items() if name != "output"}
    numbers = {"settings": given, "machine": machine, "results": found}
    (settings.output / "results.json").write_text(json.dumps(numbers, indent=1) + "\n")


if __name__ == "__main__":
    main(tyro.cli(Settings))
