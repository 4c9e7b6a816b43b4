"""Sound to frames: the logarithm of the energy in each mel band, every 10 ms, as Kaldi has it.

A frame is computed from its own 25 ms of sound and from nothing else. So a recording that is still
arriving gives, bit for bit, the frames of the whole one, and all that a stream has to keep are the
samples that no frame has begun with yet.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from jaxtyping import Float
from transformers import BatchFeature, SequenceFeatureExtractor

from leap.errors import ConfigError, InputError
from leap.extras import install_command

Samples = Float[np.ndarray, " samples"]
Frames = Float[np.ndarray, "frames bins"]

FULL_SCALE = 32768
"""Kaldi's largest sample; ours is 1."""
LOUDEST = 32.0
"""Sample that cannot be meant to lie between -1 and 1."""


class LeapformerFeatureExtractor(SequenceFeatureExtractor):
    """Makes `input_features` of sound, for `LeapformerForSpeechSeq2Seq`.

    Args:
        feature_size: mel bands.
        sampling_rate: of the sound, in Hz.
        padding_value: of frames that make recordings of one batch equally long.
        lead: samples of silence put in front of every recording. The default completes the first
            frame with 10 ms of sound, so that every 10 ms give one frame.
        mean, std: of each band over the training data; frames are normalised by them.
    """

    model_input_names = ["input_features", "attention_mask"]  # noqa: RUF012

    def __init__(
        self,
        feature_size: int = 80,
        sampling_rate: int = 16000,
        padding_value: float = 0.0,
        lead: int = 240,
        mean: Sequence[float] | Float[np.ndarray, " bins"] | None = None,
        std: Sequence[float] | Float[np.ndarray, " bins"] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(feature_size, sampling_rate, padding_value, **kwargs)
        self.lead = lead
        self.mean = None if mean is None else [float(value) for value in mean]
        self.std = None if std is None else [float(value) for value in std]
        for name in ("mean", "std"):
            value = getattr(self, name)
            if value is not None and len(value) != feature_size:
                raise ConfigError(
                    f"{name} has {len(value)} values, but there are feature_size={feature_size} "
                    "bands"
                )
        if self.std is not None and min(self.std) <= 0:
            raise ConfigError("std must be more than 0 in every band")

    def __call__(
        self,
        raw_speech: Any,
        sampling_rate: int | None = None,
        *,
        padding: bool | str = True,
        max_length: int | None = None,
        truncation: bool = False,
        pad_to_multiple_of: int | None = None,
        return_attention_mask: bool | None = None,
        return_tensors: str | None = None,
        **kwargs: Any,
    ) -> BatchFeature:
        """Normalised frames, padded to one length.

        Args:
            raw_speech: one recording, an array of samples from -1 to 1 (or of 16-bit integers); or
                several, as a list or a two-dimensional array.
            sampling_rate: of the recordings, to be checked.
            padding, max_length, truncation, pad_to_multiple_of, return_attention_mask,
                return_tensors: as in every feature extractor of Hugging Face.

        Returns:
            `input_features` [b, frames, bands] and `attention_mask` [b, frames].
        """
        if sampling_rate is not None and sampling_rate != self.sampling_rate:
            raise InputError(
                f"the sound has {sampling_rate} samples a second, not {self.sampling_rate}; "
                "resample it first"
            )
        several = len(raw_speech) > 0 and np.ndim(raw_speech[0]) > 0
        recordings = list(raw_speech) if several else [raw_speech]
        frames = [self.normalise(self.frames(sound)) for sound in recordings]
        for number, found in enumerate(frames):
            if not len(found):
                raise InputError(
                    f"recording {number} of {len(frames)} is too short for a single frame; give "
                    "10 ms or more"
                )
        return self.pad(
            BatchFeature({"input_features": frames}),
            padding=padding,
            max_length=max_length,
            truncation=truncation,
            pad_to_multiple_of=pad_to_multiple_of,
            return_attention_mask=return_attention_mask,
            return_tensors=return_tensors,
        )

    def frames(self, sound: Any) -> Frames:
        """Frames of a whole recording, not normalised; see `as_samples` for what it may be."""
        return self._frames(np.concatenate([np.zeros(self.lead, np.float32), as_samples(sound)]))

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
        """How many frames so many samples give."""
        return max(0, (self.lead + n_samples - self._window) // self._step + 1)

    def stream(self) -> "FrameStream":
        """What makes the same frames of sound that is still arriving."""
        return FrameStream(self)

    @property
    def _window(self) -> int:
        return self.sampling_rate * 25 // 1000

    @property
    def _step(self) -> int:
        return self.sampling_rate * 10 // 1000

    def _frames(self, samples: Samples) -> Frames:
        fbank = _kaldi().OnlineFbank(_options(self.sampling_rate, self.feature_size))
        fbank.accept_waveform(self.sampling_rate, (samples * FULL_SCALE).astype(np.float32))
        frames = np.empty((fbank.num_frames_ready, self.feature_size), np.float32)
        for i in range(len(frames)):
            frames[i] = fbank.get_frame(i)
        return frames


class FrameStream:
    """Frames of sound as it arrives, normalised: those of the whole recording, bit for bit.

    Args:
        extractor: that would make the frames of the whole.
    """

    def __init__(self, extractor: LeapformerFeatureExtractor) -> None:
        self.extractor = extractor
        self.rest = np.zeros(extractor.lead, np.float32)
        """Samples that frames to come begin with: all there is to keep, to copy or to save."""

    def push(self, samples: Samples) -> Frames:
        """The frames that more sound completes, of which there may be none."""
        sound = np.concatenate([self.rest, as_samples(samples)])
        frames = self.extractor._frames(sound)
        self.rest = sound[len(frames) * self.extractor._step :]
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


@lru_cache
def _options(sampling_rate: int, n_bins: int) -> Any:
    options = _kaldi().FbankOptions()
    options.frame_opts.samp_freq = sampling_rate
    options.frame_opts.dither = 0  # Kaldi would add noise, another at every call.
    options.mel_opts.num_bins = n_bins
    return options


def _kaldi() -> Any:
    try:
        import kaldi_native_fbank
    except ImportError as error:
        raise ConfigError(
            f"frames of sound need kaldi-native-fbank: {install_command('simul')}"
        ) from error
    return kaldi_native_fbank
