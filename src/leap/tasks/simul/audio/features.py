"""Statistics of frames over a corpus, and frames with gaps to learn from (SpecAugment)."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from leap.errors import ConfigError, FileError, InputError, first_line
from leap.models.fbank import LeapformerFeatureExtractor
from leap.runtime.fbank import Frames, Samples, as_samples
from leap.tasks.simul.audio.files import RATE, Audio, read_frames, read_sound

SMALLEST_DEVIATION = 1e-2
"""Of a band that hardly ever changes, as of pure silence: it is not blown up."""


def load_sound(audio: Audio, rate: int = RATE) -> Samples:
    """A recording as `read_sound` gives it, or a `FileError` if it holds what is no number."""
    try:
        return as_samples(read_sound(audio, rate))
    except InputError as error:
        raise FileError(f"{audio.path}: {error}") from error


def load_frames(audio: Audio, extractor: LeapformerFeatureExtractor) -> Frames:
    """Frames of a recording, not normalised: those that were stored, or made now of its sound."""
    if audio.holds_features:
        frames = read_frames(audio)
        if frames.shape[1] != extractor.feature_size:
            raise FileError(
                f"{audio.path} holds frames of {frames.shape[1]} bands, not "
                f"{extractor.feature_size}"
            )
        if not np.isfinite(frames).all():
            raise FileError(
                f"{audio.path} holds frames at byte {audio.start} that are no finite numbers"
            )
    else:
        frames = extractor.frames(load_sound(audio, extractor.sampling_rate))
    if not len(frames):
        raise FileError(f"{audio.path} is too short for a single frame of 10 ms")
    return frames


class Statistics:
    """Mean and deviation of each band, over all frames that were added (global CMVN).

    Args:
        n_bins: bands of a frame.
    """

    def __init__(self, n_bins: int = 80) -> None:
        self.count = 0
        self.total = np.zeros(n_bins)
        self.squares = np.zeros(n_bins)

    def add(self, frames: Frames) -> None:
        """Count the frames of one more recording."""
        wide = frames.astype(np.float64)
        self.count += len(wide)
        self.total += wide.sum(axis=0)
        self.squares += (wide**2).sum(axis=0)

    @property
    def mean(self) -> Float[np.ndarray, " bins"]:
        """Of each band."""
        return (self.total / max(self.count, 1)).astype(np.float32)

    @property
    def std(self) -> Float[np.ndarray, " bins"]:
        """Of each band, never quite 0."""
        exact = self.total / max(self.count, 1)
        variance = np.maximum(self.squares / max(self.count, 1) - exact**2, 0)
        return np.maximum(np.sqrt(variance), SMALLEST_DEVIATION).astype(np.float32)

    def save(self, path: Path) -> None:
        """Write `mean` and `std` to an npz file, as fairseq's gcmvn.npz has them."""
        np.savez(path, mean=self.mean, std=self.std)


def read_statistics(path: Path) -> tuple[Float[np.ndarray, " bins"], Float[np.ndarray, " bins"]]:
    """Mean and deviation of each band, from an npz file."""
    try:
        with np.load(path, allow_pickle=False) as found:
            mean, std = (np.asarray(found[name], np.float32) for name in ("mean", "std"))
    except FileNotFoundError as error:
        raise FileError(f"no statistics of frames at {path}") from error
    except Exception as error:
        raise FileError(
            f"{path} is no npz file with mean and std of frames ({first_line(error)})"
        ) from error
    return mean, std


@dataclass(frozen=True)
class SpecAugment:
    """Gaps in time and frequency, drawn anew at each call, from torch's random numbers.

    The names of the published settings are in `SPEC_AUGMENT`. Frames must have been normalised:
    gaps are 0. There is no warping in time.
    """

    frequency_gaps: int = 1
    frequency_width: int = 27
    """Largest width of a gap, in bands."""
    time_gaps: int = 1
    time_width: int = 100
    """Largest width of a gap, in frames."""
    time_share: float = 1.0
    """Largest share of a recording that one gap takes."""

    def __post_init__(self) -> None:
        for name in ("frequency_gaps", "frequency_width", "time_gaps", "time_width"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}={getattr(self, name)} must be 0 or more")
        if not 0 <= self.time_share <= 1:
            raise ConfigError(f"time_share={self.time_share} is a share, from 0 to 1")

    def __call__(self, frames: Float[Tensor, "t c"]) -> Float[Tensor, "t c"]:
        """A copy with gaps."""
        frames = frames.clone()
        n_frames, n_bins = frames.shape
        for _ in range(self.frequency_gaps):
            start, end = _gap(n_bins, min(self.frequency_width, n_bins))
            frames[:, start:end] = 0
        for _ in range(self.time_gaps):
            start, end = _gap(n_frames, min(self.time_width, int(n_frames * self.time_share)))
            frames[start:end] = 0
        return frames


SPEC_AUGMENT = {
    "lb": SpecAugment(1, 27, 1, 100, 1.0),
    "ld": SpecAugment(2, 27, 2, 100, 1.0),
    "sm": SpecAugment(2, 15, 2, 70, 0.2),
    "ss": SpecAugment(2, 27, 2, 70, 0.2),
}
"""The settings of the SpecAugment paper: LibriSpeech basic and double, Switchboard mild and
strong."""


def _gap(length: int, widest: int) -> tuple[int, int]:
    width = int(torch.randint(widest + 1, ()))
    start = int(torch.randint(length - width + 1, ()))
    return start, start + width
