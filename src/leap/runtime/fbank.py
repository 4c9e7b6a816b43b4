"""Sound to frames: the logarithm of the energy in each mel band, every 10 ms, as Kaldi has it.

    frame     25 ms of sound, less its mean, less 0.97 of the sample before, by Povey's window
    band      the power spectrum, by triangles equally wide in mel = 1127 ln(1 + f / 700)
    value     ln(max(energy, 2^-23))

A frame is computed from its own 25 ms of sound and from nothing else. So a recording that is still
arriving gives, bit for bit, the frames of the whole one, and all that a stream has to keep are the
samples that no frame has begun with yet.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from jaxtyping import Float

from leap.errors import ConfigError, InputError

Samples = Float[np.ndarray, " samples"]
Frames = Float[np.ndarray, "frames bins"]

FULL_SCALE = 32768
"""Kaldi's largest sample; ours is 1."""
LOUDEST = 32.0
"""Sample that cannot be meant to lie between -1 and 1."""
LOWEST, PREEMPHASIS = 20.0, 0.97
"""Where the first band begins, in Hz; and the share of the sample before that is taken off."""
SLOWEST = 1000
"""Samples per second that sound has at the least."""
FLOOR = 2.0**-23
"""The least energy of a band."""


class Extractor(ABC):
    """What makes frames of sound, whole or as it arrives."""

    feature_size: int
    sampling_rate: int
    lead: int
    mean: Sequence[float] | None
    std: Sequence[float] | None

    @abstractmethod
    def raw_frames(self, samples: Samples) -> Frames:
        """Frames of samples."""

    def frames(self, sound: Any) -> Frames:
        """Frames of a whole recording, not normalised; see `as_samples` for what it may be."""
        return self.raw_frames(np.concatenate([np.zeros(self.lead, np.float32), as_samples(sound)]))

    def normalise(self, frames: Frames) -> Frames:
        """Frames with the training data's mean and deviation taken out, if these are known."""
        if self.mean is not None:
            frames = frames - np.asarray(self.mean, np.float32)
        if self.std is not None:
            frames = frames / np.asarray(self.std, np.float32)
        return frames

    def energy(self, frames: Frames) -> Float[np.ndarray, " frames"]:
        """Mean log energy of normalised frames; that of no sound at all is about -16."""
        if self.std is not None:
            frames = frames * np.asarray(self.std, np.float32)
        if self.mean is not None:
            frames = frames + np.asarray(self.mean, np.float32)
        return frames.mean(axis=1)

    def n_frames(self, n_samples: int) -> int:
        """How many frames `n_samples` samples give."""
        return max(0, (self.lead + n_samples - self.window) // self.step + 1)

    def stream(self) -> "FrameStream":
        """What makes the same frames of sound that is still arriving."""
        return FrameStream(self)

    @property
    def window(self) -> int:
        """Samples of a frame."""
        return self.sampling_rate * 25 // 1000

    @property
    def step(self) -> int:
        """Samples from one frame to the next."""
        return self.sampling_rate * 10 // 1000


class FilterBank(Extractor):
    """Frames by numpy alone.

    Args:
        feature_size: mel bands.
        sampling_rate: of the sound, in Hz.
        lead: samples of silence put in front of every recording.
        mean, std: of each band over the training data; frames are normalised by them.
    """

    def __init__(
        self,
        feature_size: int = 80,
        sampling_rate: int = 16000,
        lead: int = 240,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
    ) -> None:
        if feature_size < 1 or sampling_rate < SLOWEST or lead < 0:
            raise ConfigError(
                f"feature_size={feature_size} must be 1 or more, sampling_rate={sampling_rate} "
                f"{SLOWEST} or more, and lead={lead} 0 or more"
            )
        self.feature_size = feature_size
        self.sampling_rate = sampling_rate
        self.lead = lead
        self.mean = mean
        self.std = std

    def raw_frames(self, samples: Samples) -> Frames:
        """Frames of samples."""
        n = max(0, (len(samples) - self.window) // self.step + 1)
        if not n:
            return np.zeros((0, self.feature_size), np.float32)
        x = np.lib.stride_tricks.sliding_window_view(samples, self.window)[:: self.step]
        x = x.astype(np.float64) * FULL_SCALE
        x = x - x.mean(axis=1, keepdims=True)
        x = x - PREEMPHASIS * np.concatenate([x[:, :1], x[:, :-1]], axis=1)
        spectrum = np.fft.rfft(x * _povey(self.window), _size(self.window), axis=1)
        energy = np.abs(spectrum[:, :-1]) ** 2 @ _bands(
            self.sampling_rate, self.feature_size, self.window
        )
        return np.log(np.maximum(energy, FLOOR)).astype(np.float32)


class FrameStream:
    """Frames of sound as it arrives, normalised: those of the whole recording, bit for bit.

    Args:
        extractor: that would make the frames of the whole.
    """

    def __init__(self, extractor: Extractor) -> None:
        self.extractor = extractor
        self.rest = np.zeros(extractor.lead, np.float32)
        """Samples that frames to come begin with: all there is to keep, to copy or to save."""

    def push(self, samples: Samples) -> Frames:
        """The frames that more sound completes, of which there may be none."""
        sound = np.concatenate([self.rest, as_samples(samples)])
        frames = self.extractor.raw_frames(sound)
        self.rest = sound[len(frames) * self.extractor.step :]
        return self.extractor.normalise(frames)

    def fork(self) -> "FrameStream":
        """Another stream that goes on from here."""
        other = FrameStream(self.extractor)
        other.rest = self.rest.copy()
        return other


def as_samples(sound: Any) -> Samples:
    """Samples from -1 to 1 as float32; integers of 16 bits are scaled, others must be that already.

    A little more than 1, as resampling gives, is let pass.
    """
    samples = np.asarray(sound)
    if samples.ndim != 1:
        raise InputError(
            f"a recording has one axis, but this has the shape {list(samples.shape)}; give one "
            "channel"
        )
    if samples.dtype == np.int16:
        return samples.astype(np.float32) / FULL_SCALE
    limit = 1 if samples.dtype.kind in "iu" else LOUDEST
    samples = samples.astype(np.float32)
    if not np.isfinite(samples).all():
        raise InputError("the recording holds samples that are no finite numbers")
    if len(samples) and (loudest := float(np.abs(samples).max())) > limit:
        raise InputError(
            f"the recording holds a sample of {loudest:g}; give numbers from -1 to 1, or integers "
            "of 16 bits (np.int16)"
        )
    return samples


def _size(window: int) -> int:
    """Points of the Fourier transform: the next power of two."""
    return 1 << (window - 1).bit_length()


@lru_cache
def _povey(window: int) -> Float[np.ndarray, " w"]:
    hann = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(window) / (window - 1))
    return hann**0.85


@lru_cache
def _bands(sampling_rate: int, n_bins: int, window: int) -> Float[np.ndarray, "f bins"]:
    """How much of each frequency every band takes."""
    size = _size(window)
    edges = np.linspace(_mel(LOWEST), _mel(sampling_rate / 2), n_bins + 2)
    at = _mel(np.arange(size // 2) * (sampling_rate / size))[:, None]
    left, centre, right = edges[:-2], edges[1:-1], edges[2:]
    rising, falling = (at - left) / (centre - left), (right - at) / (right - centre)
    return np.maximum(np.minimum(rising, falling), 0)


def _mel(frequency: Any) -> Any:
    return 1127 * np.log(1 + frequency / 700)
