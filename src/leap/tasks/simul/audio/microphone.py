"""Sound from a microphone, as it is spoken."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np

from leap.errors import ConfigError, LeapError, first_line
from leap.extras import install_command
from leap.runtime.fbank import Samples
from leap.tasks.simul.audio.files import RATE, Resampler

BLOCK = 20
"""Milliseconds that the microphone gives at once."""
PATIENCE = 0.1
"""Seconds between two looks at whether to stop, where no sound comes."""


@dataclass(frozen=True)
class Heard:
    """A stretch of sound."""

    samples: Samples
    """At the rate of the model."""
    seconds: float
    """How long it is."""
    arrived: float
    """When all of it was there, in seconds of any clock."""


def listen(
    stopped: Callable[[], bool],
    *,
    rate: int = RATE,
    milliseconds: int = 320,
    device: str | None = None,
) -> Iterator[Heard]:
    """What is spoken, a stretch at a time, until it is stopped; the last one may be shorter.

    Nothing is lost while the caller is busy: what is spoken meanwhile waits. Where the microphone
    has another rate, a stretch is a few hundredths of a second late.

    Args:
        stopped: whether to end.
        rate: samples per second to return; the microphone may have another.
        milliseconds: of a stretch.
        device: number of the microphone, or part of its name; by default the system's.
    """
    sounddevice = _sounddevice()
    chosen = int(device) if device is not None and device.isdigit() else device
    waiting: SimpleQueue[tuple[float, np.ndarray]] = SimpleQueue()

    def take(block: np.ndarray, *_: Any) -> None:
        waiting.put((time.perf_counter(), block.copy()))

    try:
        found = round(sounddevice.query_devices(chosen, "input")["default_samplerate"])
        stream = sounddevice.InputStream(
            samplerate=found,
            blocksize=-(-BLOCK * found // 1000),
            device=chosen,
            channels=1,
            callback=take,
        )
    except (sounddevice.PortAudioError, ValueError) as error:
        which = "" if device is None else f" {device!r}"
        raise ConfigError(
            f"no microphone{which} can be used ({first_line(error)}); python -m sounddevice lists "
            "what there is"
        ) from error
    resampler, size = Resampler(found, rate), -(-milliseconds * rate // 1000)
    ready, arrived = np.zeros(0, np.float32), time.perf_counter()
    with stream:
        while not (stopped() and waiting.empty()):
            try:
                arrived, block = waiting.get(timeout=PATIENCE)
            except Empty:
                if not stream.active:
                    raise LeapError("the microphone has gone") from None
                continue
            ready = np.concatenate([ready, resampler.push(block)])
            while len(ready) >= size:
                yield Heard(ready[:size], size / rate, arrived)
                ready = ready[size:]
    ready = np.concatenate([ready, resampler.push(np.zeros(0, np.float32), last=True)])
    if len(ready):
        yield Heard(ready, len(ready) / rate, arrived)


def _sounddevice() -> Any:
    try:
        import sounddevice
    except ImportError as error:
        raise ConfigError(
            f"a microphone needs sounddevice: {install_command('microphone')}"
        ) from error
    except OSError as error:
        raise ConfigError(
            f"sounddevice cannot be used ({first_line(error)}); it needs PortAudio, for instance "
            "apt install libportaudio2"
        ) from error
    return sounddevice
