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
from leap.runtime.fbank import FULL_SCALE, Extractor, Frames, Samples


class LeapformerFeatureExtractor(Extractor, SequenceFeatureExtractor):
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
                f"the sound has {sampling_rate} samples per second, not {self.sampling_rate}; "
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

    def raw_frames(self, samples: Samples) -> Frames:
        """Frames of samples, as Kaldi makes them."""
        fbank = _kaldi().OnlineFbank(_options(self.sampling_rate, self.feature_size))
        fbank.accept_waveform(self.sampling_rate, (samples * FULL_SCALE).astype(np.float32))
        frames = np.empty((fbank.num_frames_ready, self.feature_size), np.float32)
        for i in range(len(frames)):
            frames[i] = fbank.get_frame(i)
        return frames


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
