"""Sound from files and microphones: any rate, one channel or several, to the rate of the model."""

import io
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from leap.errors import ConfigError, FileError, first_line
from leap.extras import install_command
from leap.runtime.fbank import Frames, Samples

RATE = 16000
"""Samples per second that our models take."""
Sound = Float[np.ndarray, " samples"] | Float[np.ndarray, "samples channels"]
Resampled = Float[np.ndarray, " resampled"]


@dataclass(frozen=True)
class Audio:
    """A sound in a file: all of it, or a stretch.

    The file is a recording, of which a stretch is counted in samples; or an .npy or .zip file with
    features [frames, bins], of which a stretch is an array's place in the file, counted in bytes.
    """

    path: Path
    start: int = 0
    length: int | None = None
    """None: to the end."""

    @property
    def holds_features(self) -> bool:
        """Whether the file holds features rather than a recording."""
        return self.path.suffix in (".npy", ".zip")


def read_sound(audio: Audio | Path, rate: int = RATE) -> Samples:
    """A recording, from -1 to 1, its channels mixed into one.

    Args:
        audio: a sound file, or a stretch of one.
        rate: samples per second to return; a file with another rate is resampled.

    Raises:
        FileError: if there is no file, or no sound in it.
    """
    audio = Audio(audio) if isinstance(audio, Path) else audio
    path = audio.path
    if not path.is_file():
        raise FileError(f"no sound file at {path}")
    soundfile = _import("soundfile")
    try:
        with soundfile.SoundFile(str(path)) as file:
            if audio.start:
                file.seek(audio.start)
            frames = -1 if audio.length is None else audio.length
            samples = file.read(frames, dtype="float32")
            found = file.samplerate
    except Exception as error:  # soundfile's own errors, and those of the C library under it.
        raise FileError(
            f"{path} is no sound file that can be read ({first_line(error)})"
        ) from error
    if not len(samples):
        raise FileError(f"{path} holds no sound{' at that place' * bool(audio.start)}")
    return resample(mix(samples), found, rate)


def decode_sound(content: bytes, rate: int = RATE) -> Samples:
    """The recording that the bytes of a sound file hold, as `read_sound` gives it."""
    try:
        samples, found = _import("soundfile").read(io.BytesIO(content), dtype="float32")
    except RuntimeError as error:
        raise FileError(f"these bytes are no sound file ({first_line(error)})") from error
    return resample(mix(samples), found, rate)


def sound_facts(path: Path) -> tuple[int, int]:
    """How many samples a sound file has, and how many per second."""
    if not path.is_file():
        raise FileError(f"no sound file at {path}")
    try:
        found = _import("soundfile").info(str(path))
    except RuntimeError as error:
        raise FileError(
            f"{path} is no sound file that can be read ({first_line(error)})"
        ) from error
    return found.frames, found.samplerate


def write_sound(path: Path, samples: Samples, rate: int = RATE) -> None:
    """Write a wav file of 16 bits."""
    _import("soundfile").write(str(path), samples, rate, subtype="PCM_16", format="WAV")


def mix(samples: Sound) -> Samples:
    """One channel: the mean of all."""
    return samples if samples.ndim == 1 else samples.mean(axis=1)


def resample(samples: Samples, rate: int, to: int = RATE) -> Resampled:
    """The same sound at another rate."""
    if rate == to:
        return samples
    return _import("soxr").resample(samples.astype(np.float32), rate, to)


class Resampler:
    """The same for sound that is still arriving: in all, the samples that `resample` gives.

    A few milliseconds are held back until more comes, or the end.

    Args:
        rate: samples per second that come in.
        to: samples per second that go out.
    """

    def __init__(self, rate: int, to: int = RATE) -> None:
        if rate < 1:
            raise ConfigError(f"a rate of {rate} samples per second is none")
        self._stream = (
            None if rate == to else _import("soxr").ResampleStream(rate, to, 1, dtype="float32")
        )

    def push(self, samples: Sound, *, last: bool = False) -> Resampled:
        """What is ready of the sound so far; with `last`, all that is left."""
        mixed = mix(samples).astype(np.float32)
        return mixed if self._stream is None else self._stream.resample_chunk(mixed, last=last)


def read_frames(audio: Audio) -> Frames:
    """Frames that were stored in a file, as float32."""
    try:
        with audio.path.open("rb") as file:
            file.seek(audio.start)
            content = file.read(-1 if audio.length is None else audio.length)
        frames = np.load(io.BytesIO(content), allow_pickle=False)
    except FileNotFoundError as error:
        raise FileError(f"no features at {audio.path}") from error
    except Exception as error:
        raise FileError(
            f"{audio.path} holds no features at byte {audio.start} ({first_line(error)})"
        ) from error
    if frames.ndim != 2:
        raise FileError(f"{audio.path} holds no frames of features at byte {audio.start}")
    return frames.astype(np.float32)


def write_frames(path: Path, frames: dict[str, Frames]) -> list[Audio]:
    """Store frames as float16, in a zip file that is not compressed, and say where each is.

    Args:
        path: of the file, which appears when it is complete.
        frames: of recordings, by their names.
    """
    unfinished = path.with_name(f".{path.name}.part")
    with zipfile.ZipFile(unfinished, "w", zipfile.ZIP_STORED) as archive:
        for name, values in frames.items():
            content = io.BytesIO()
            np.save(content, values.astype(np.float16), allow_pickle=False)
            archive.writestr(f"{name}.npy", content.getvalue())
    unfinished.replace(path)
    return stored_frames(path)


def stored_frames(path: Path) -> list[Audio]:
    """Where each array of a zip file is, in order."""
    found = []
    with zipfile.ZipFile(path) as archive, path.open("rb") as file:
        for entry in archive.infolist():
            # A local header of 30 bytes, the last four of which tell of what follows it.
            file.seek(entry.header_offset + 26)
            name, extra = np.frombuffer(file.read(4), "<u2").tolist()
            start = entry.header_offset + 30 + name + extra
            found.append(Audio(path, start, entry.file_size))
    return found


def _import(name: str) -> Any:
    try:
        return __import__(name)
    except ImportError as error:
        raise ConfigError(f"reading sound needs {name}: {install_command('simul')}") from error
