"""Translation of what is typed, piped in, played or spoken, a word at a time, and how late each is.

for event in translate(StreamConfig(run=Path("runs/simul"))):
    print(event)

Written(word='zwei', lag=3, delay=3)
Written(word='und', lag=3, delay=4)
...
Ended(n_words=4, source_length=6, lagging=2.8)
"""

import codecs
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from leap.errors import ConfigError, InputError, refuse_given
from leap.runtime.fbank import Samples
from leap.runtime.manifest import is_export
from leap.runtime.shipped import shipped
from leap.runtime.streaming.pauses import Pauses, best_installed
from leap.runtime.streaming.policies import Offline
from leap.runtime.streaming.sources import check_word
from leap.runtime.streaming.stream import Interpreter, Stream
from leap.runtime.translator import Translator
from leap.tasks.simul.audio.files import read_sound
from leap.tasks.simul.audio.microphone import Heard, listen
from leap.tasks.simul.scoring.metrics import Amount, latency

TRAINED = Path("runs/simul")
"""Where leap simul train puts its model, unless told."""
SHIPPED = "en-de"
"""The model that is taken where none was trained."""
LONG = 200
"""States after which a sentence is taken for ended, unless told: 16 seconds of sound."""
BLOCK = 4096
"""Bytes of text to take at once, if there are as many."""


@dataclass(frozen=True, kw_only=True)
class StreamConfig:
    """Translate text as it comes, a sound file or what is spoken, word by word, with the lag.

    Text comes from standard input, where lines end sentences too. Sound may have any rate, and one
    channel or more.
    """

    run: Path | None = None
    """Run folder of leap simul train, or a folder of leap export; by default runs/simul where it is
    there, else, of text, the model that comes with the package: everyday sentences from English to
    German."""
    policy: str = "wait-3"
    """When to write: wait-3, offline, agree-2, align-2, tail-0.3, with any numbers."""
    sound: Path | None = None
    """Sound file to translate, for a model of speech; by default text is read from the input."""
    real_time: bool = False
    """Hear the file at the speed at which it was spoken; by default as fast as can be."""
    microphone: bool = False
    """Translate what is spoken, for a model of speech, until Ctrl-C."""
    device: str | None = None
    """Which microphone: its number, or part of its name, as python -m sounddevice lists them; by
    default that of the system."""
    segment: int = 320
    """Of sound: milliseconds that come at once."""
    chunk_size: int | None = None
    """States read at once, 0 for all; by default the fewest of the training, offline the most."""
    reset: int | None = None
    """Begin anew at the end of a sentence or in a pause, at the latest after this many states, 0
    for never; by default 200, and never with sound that is heard as a whole, offline. Models know
    sentences: of two that follow each other they would translate the first."""
    pauses: Pauses | None = None
    """By what pauses of speech are told: loudness, or silero, which is silero-vad; by default that
    where it is installed."""
    beam: int = 1
    """Hypotheses to search for the end of a translation with, once the source has ended."""
    lag: bool = True
    """Show the lag of each word: the words behind, or for sound the milliseconds."""

    def __post_init__(self) -> None:
        if self.segment < 1:
            raise ConfigError(f"segment={self.segment} must be 1 or more")
        if self.reset is not None and self.reset < 0:
            raise ConfigError(f"reset={self.reset} must be 1 or more, or 0 for never")
        if self.microphone and self.sound is not None:
            raise ConfigError("give a sound file or the microphone, not both")
        if self.real_time and self.sound is None:
            raise ConfigError("real_time is for a sound file: give one")
        if self.device is not None and not self.microphone:
            raise ConfigError(f"device={self.device} is for a microphone: give --microphone")

        if not self.is_sound:
            refuse_given(self, ("segment", "pauses"), "of sound, and text is translated")

    @property
    def is_sound(self) -> bool:
        """Whether sound is translated, not text."""
        return self.microphone or self.sound is not None

    @property
    def is_shipped(self) -> bool:
        """Whether the model that comes with the package is taken."""
        return self.run is None and not TRAINED.exists() and not self.is_sound

    @property
    def model(self) -> Path:
        """The folder of the model."""
        return shipped(SHIPPED) if self.is_shipped else self.run or TRAINED


@dataclass(frozen=True)
class Written:
    """A word of the translation."""

    word: str
    lag: Amount
    """Words of text that were read and have no counterpart yet, this one counted; or, of sound,
    milliseconds from the beginning of the stretch that let it be said until it was."""
    delay: Amount
    """Words of this sentence that had been read, or milliseconds of sound that had been heard."""


@dataclass(frozen=True)
class Ended:
    """The end of a line of text, or of all sound."""

    n_words: int
    source_length: Amount
    """Words, or milliseconds."""
    lagging: float | None
    """LAAL, the translation taken for as long as it should be; None without a word."""


Event = Written | Ended


def translate(
    config: StreamConfig,
    text: TextIO | None = None,
    stopped: Callable[[], bool] = lambda: False,
) -> Iterator[Event]:
    """Words as they are written, and the ends of sentences.

    Args:
        config: what to translate, and how.
        text: where text comes from; standard input by default.
        stopped: whether to listen no longer.
    """
    is_sound, model = config.is_sound, config.model
    by_default = None if is_sound and config.policy == Offline().name else LONG
    interpreter = _interpreter(
        model,
        config.policy,
        chunk_size=config.chunk_size,
        reset=by_default if config.reset is None else config.reset or None,
        beam=config.beam,
        pauses=config.pauses or best_installed(),
    )
    if (interpreter.extractor is not None) != is_sound:
        wants = "text, so give no sound" if is_sound else "speech: give a sound or --microphone"
        raise ConfigError(f"{model} translates {wants}")
    if interpreter.extractor is None:
        yield from text_events(interpreter.stream(), sys.stdin if text is None else text)
        return
    rate = interpreter.extractor.sampling_rate
    if config.microphone:
        heard = listen(stopped, rate=rate, milliseconds=config.segment, device=config.device)
    else:
        assert config.sound is not None
        sound = read_sound(config.sound, rate)
        heard = played(sound, rate, config.segment, real_time=config.real_time)
    yield from sound_events(interpreter.stream(), heard)


def _interpreter(run: Path, policy: str, **options: Any) -> Interpreter:
    """The model of a folder with a policy: in torch, which is imported here, or exported."""
    if is_export(run):
        return Translator(run, policy, **options)
    from leap.tasks.simul.streaming.stream import load_trained

    return load_trained(run).interpreter(policy, **options)


def text_events(stream: Stream, text: Iterable[str]) -> Iterator[Event]:
    """Words of the translation of a text, of which each line ends what comes before it."""
    delays: list[Amount] = []
    n_read = 0

    def written(words: list[str]) -> Iterator[Written]:
        for word in words:
            delays.append(n_read)
            yield Written(word, n_read - len(delays) + 1, n_read)

    for word in _words(text):
        if word is not None:
            n_read += 1
            yield from written(stream.push([word]))
        else:
            yield from written(stream.finish())
            yield _ended(delays, n_read)
            delays, n_read = [], 0


def _words(text: Iterable[str]) -> Iterator[str | None]:
    """Words as soon as white space follows, and None at the end of each line.

    The last line may have no end, and then there is one if there is anything in it.
    """
    begun, is_open = "", False
    for block in _blocks(text):
        *lines, begun = (begun + block).split("\n")
        for line in lines:
            yield from line.split()
            yield None
        words = begun.split()
        is_open = bool(words) or (is_open and not lines)
        is_cut = bool(words) and not begun[-1].isspace()
        begun = words.pop() if is_cut else ""
        check_word(begun)
        yield from words
    yield from begun.split()
    if is_open:
        yield None


def _blocks(text: Iterable[str]) -> Iterator[str]:
    """What has come by now, again and again: a pipe need not have ended its line."""
    binary = getattr(text, "buffer", None)
    if binary is None:
        yield from text
        return
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        while block := binary.read1(BLOCK):
            yield decoder.decode(block)
        yield decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        raise InputError("what comes in is not text in UTF-8; convert it, with iconv") from error


def played(
    sound: Samples, rate: int, milliseconds: int, *, real_time: bool = False
) -> Iterator[Heard]:
    """A recording, as if it were spoken now, so many milliseconds at a time."""
    size = -(-milliseconds * rate // 1000)
    started = time.perf_counter()
    for start in range(0, len(sound), size):
        samples = sound[start : start + size]
        arrived = started + (start + len(samples)) / rate
        if real_time:
            time.sleep(max(0.0, arrived - time.perf_counter()))
        yield Heard(samples, len(samples) / rate, arrived)


def sound_events(stream: Stream, heard: Iterator[Heard]) -> Iterator[Event]:
    """Words of the translation of what is heard."""
    delays: list[Amount] = []
    length = begun = now = 0.0

    def written(words: list[str]) -> Iterator[Written]:
        for word in words:
            delays.append(1000 * length)
            yield Written(word, 1000 * (now - begun), 1000 * length)

    for part in heard:
        before = time.perf_counter()
        words = stream.push(part.samples)
        # Computing waits for the sound, or for the computing before it.
        now = max(now, part.arrived) + time.perf_counter() - before
        begun = part.arrived - part.seconds
        length += part.seconds
        yield from written(words)
    before = time.perf_counter()
    words = stream.finish()
    now += time.perf_counter() - before
    yield from written(words)
    yield _ended(delays, 1000 * length)


def _ended(delays: list[Amount], length: Amount) -> Ended:
    lagging = float(latency(delays, length)["LAAL"]) if delays else None
    return Ended(len(delays), length, lagging)
