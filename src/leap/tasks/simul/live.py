"""Translation of what is typed, piped in or played, a word at a time, with how late each came."""

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from leap.errors import ConfigError
from leap.tasks.simul.audio import read_sound
from leap.tasks.simul.stream import Interpreter, load_interpreter


@dataclass(frozen=True, kw_only=True)
class StreamConfig:
    """Translate text from standard input as it comes, or a sound file, word by word.

    Each line of text is a sentence. Sound may have any rate, and one channel or more.
    """

    run: Path = Path("runs/simul")
    """Run folder of leap simul train."""
    policy: str = "wait-3"
    """When to write: wait-3, offline, agree-2, align-2, tail-0.3, with any numbers."""
    sound: Path | None = None
    """Sound file to translate, for a model of speech; by default text comes from standard input."""
    real_time: bool = False
    """Hear the file at the speed at which it was spoken; by default as fast as can be."""
    segment: int = 320
    """Of sound: milliseconds that come at once."""
    chunk_size: int | None = None
    """Source states read at once; by default 1 of text, 4 of speech, and offline all."""
    reset: int | None = None
    """Begin anew at the end of a sentence or in a pause, and at the latest after so many states."""

    def __post_init__(self) -> None:
        if self.segment < 1:
            raise ConfigError(f"segment={self.segment} must be 1 or more")


@dataclass(frozen=True)
class Written:
    """A word of the translation."""

    word: str
    lag: float
    """Words of text that were read and have no counterpart yet, this one counted; or, of sound,
    seconds from the beginning of the stretch that let it be said until it was."""


def translate(config: StreamConfig, text: TextIO | None = None) -> Iterator[Written]:
    """Words as they are written.

    Args:
        config: what to translate, and how.
        text: where text comes from; standard input by default.
    """
    interpreter = load_interpreter(
        config.run, config.policy, chunk_size=config.chunk_size, reset=config.reset
    )
    if (interpreter.extractor is None) != (config.sound is None):
        wants = "text, so give no sound" if config.sound else "speech, so give a sound file"
        raise ConfigError(f"{config.run} translates {wants}")
    if config.sound is None:
        yield from _text(interpreter, sys.stdin if text is None else text)
    else:
        yield from _sound(interpreter, config)


def _text(interpreter: Interpreter, text: TextIO) -> Iterator[Written]:
    stream = interpreter.stream()
    n_read = n_written = 0
    for line in text:
        for word in line.split():
            n_read += 1
            for said in stream.push([word]):
                n_written += 1
                yield Written(said, n_read - n_written + 1)
        for said in stream.finish():
            n_written += 1
            yield Written(said, n_read - n_written + 1)
        n_written = n_read  # The next sentence starts with no lead and no arrears.


def _sound(interpreter: Interpreter, config: StreamConfig) -> Iterator[Written]:
    assert config.sound is not None and interpreter.extractor is not None
    rate = interpreter.extractor.sampling_rate
    sound = read_sound(config.sound, rate)
    size = -(-config.segment * rate // 1000)
    stream = interpreter.stream()
    started, computed = time.perf_counter(), 0.0
    for start in range(0, len(sound), size):
        end = min(start + size, len(sound))
        if config.real_time:
            time.sleep(max(0.0, started + end / rate - time.perf_counter()))
        before = time.perf_counter()
        words = stream.push(sound[start:end])
        if end == len(sound):
            words += stream.finish()
        # Computing waits for the sound, or for the computing before it.
        computed = max(computed, end / rate) + time.perf_counter() - before
        for word in words:
            yield Written(word, computed - start / rate)
