"""Which frames of speech are quiet, while it arrives: by their loudness, or by silero-vad.

Loudness needs nothing else, and takes any noise above it for speech. Silero's network
(https://github.com/snakers4/silero-vad), where it is installed, tells voices from noise.
"""

from collections.abc import Mapping
from functools import lru_cache
from importlib.util import find_spec
from typing import Any, Literal

import numpy as np
from jaxtyping import Bool

from leap.errors import ConfigError
from leap.extras import install_command
from leap.runtime.fbank import Extractor, Frames, Samples, as_samples

Pauses = Literal["loudness", "silero"]
Quiet = Bool[np.ndarray, " n"]
QUIET = 0.0
"""Loudest band of a normalised frame, in deviations from the usual, below which it is quiet."""
VOICE = 0.5
"""Probability of a voice, by silero-vad, from which on a window is not quiet."""
RATE, WINDOW, CONTEXT = 16000, 512, 64
"""Samples per second and per window that silero-vad takes, and those before it that it sees."""
HOP, MIDDLE = 160, 200
"""Samples from one frame to the next, and from a frame's first to its middle."""


class Loudness:
    """Frames are quiet in which no band is louder than usual."""

    def push(self, samples: Samples, frames: Frames) -> Quiet:
        """Take more sound: whether frames are quiet, from the first that was not told of yet.

        Args:
            samples: the sound.
            frames: those that it completes, normalised.
        """
        return are_quiet(frames)

    def finish(self, n: int) -> Quiet:
        """Whether the last n frames are quiet, as no sound follows; here all was told before."""
        return np.zeros(0, bool)

    def fork(self) -> "Loudness":
        """Itself, as it keeps nothing."""
        return self

    def kept(self) -> dict[str, np.ndarray]:
        """Nothing."""
        return {}

    def restore(self, kept: Mapping[str, np.ndarray]) -> None:
        """Nothing to go on from."""


class Silero:
    """Frames are quiet whose window of 32 ms has no voice, nor have the two beside it.

    So speech has a margin of 32 ms, and a frame is told of up to 64 ms after it has come.

    Args:
        lead: samples that the extractor puts in front of the sound.
    """

    def __init__(self, lead: int) -> None:
        self.network = _network()
        self.memory = np.zeros((2, 1, 128), np.float32)
        """The network's state."""
        self.sound = np.zeros(CONTEXT, np.float32)
        """The context of the next window, and what has come of it."""
        self.voices = np.zeros(2, np.float32)
        """Probabilities of the last two windows."""
        self.next = MIDDLE - lead + WINDOW
        """Samples from the start of the last window to the middle of the next frame."""

    def push(self, samples: Samples, frames: Frames) -> Quiet:
        """Take more sound, as `Loudness.push`; told of are the windows but the last."""
        self.sound = np.concatenate([self.sound, as_samples(samples)])
        told: list[bool] = []
        while len(self.sound) >= CONTEXT + WINDOW:
            told += self._window()
        return np.array(told, bool)

    def finish(self, n: int) -> Quiet:
        """Whether the last n frames are quiet, or more, as if silence followed."""
        told: list[bool] = []
        while len(told) < n:
            missing = CONTEXT + WINDOW - len(self.sound)
            self.sound = np.concatenate([self.sound, np.zeros(missing, np.float32)])
            told += self._window()
        return np.array(told, bool)

    def fork(self) -> "Silero":
        """Another one that goes on from here; nothing is changed in place."""
        other = Silero(0)
        other.__dict__.update(self.__dict__)
        return other

    def kept(self) -> dict[str, np.ndarray]:
        """All there is to save, each with a row for this stream."""
        voices = np.append(self.voices, np.float32(self.next))
        parts = {"memory": self.memory[:, 0], "voices": voices, "sound": self.sound}
        return {name: part[None] for name, part in parts.items()}

    def restore(self, kept: Mapping[str, np.ndarray]) -> None:
        """Go on from what was saved."""
        self.memory = kept["memory"][0][:, None]
        self.sound = kept["sound"][0]
        *voices, following = kept["voices"][0].tolist()
        self.voices, self.next = np.array(voices, np.float32), int(following)

    def _window(self) -> list[bool]:
        """Hear one more window, and tell of the frames in the one before."""
        inputs = {"input": self.sound[None, : CONTEXT + WINDOW], "state": self.memory}
        voice, self.memory = self.network.run(None, {**inputs, "sr": np.array(RATE)})
        self.sound = self.sound[WINDOW:]
        is_quiet = bool(max(*self.voices, voice.item()) < VOICE)
        self.voices = np.array([self.voices[1], voice.item()], np.float32)
        n_frames = max(0, -((self.next - WINDOW) // HOP))
        self.next += n_frames * HOP - WINDOW
        return [is_quiet] * n_frames


Detector = Loudness | Silero


def make_detector(name: Pauses, extractor: Extractor) -> Detector:
    """The detector of a new stream."""
    if name == "loudness":
        return Loudness()
    if extractor.sampling_rate != RATE:
        raise ConfigError(
            f"silero-vad hears {RATE} samples per second, and this model "
            f"{extractor.sampling_rate}; use pauses=loudness"
        )
    return Silero(extractor.lead)


def best_installed() -> Pauses:
    """The name of silero, where it is installed."""
    return "silero" if find_spec("silero_vad") and find_spec("onnxruntime") else "loudness"


def are_quiet(frames: Frames) -> Quiet:
    """Whether frames are quiet, by their loudness."""
    return frames.max(axis=1, initial=-np.inf) < QUIET


@lru_cache
def _network() -> Any:
    """Silero's network for onnxruntime: a function of sound and state, which streams can share."""
    try:
        import onnxruntime  # noqa: F401
        from silero_vad import load_silero_vad
    except ImportError as error:
        raise ConfigError(
            f"pauses=silero needs silero-vad: {install_command('vad')}, or use pauses=loudness"
        ) from error
    return load_silero_vad(onnx=True).session
