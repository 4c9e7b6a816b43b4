"""Sentences with their translations, and with their sound where they are spoken."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


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


@dataclass(frozen=True)
class Sentence:
    """A sentence and its translation."""

    source: str
    """What is translated; of a recording, what is said in it, if that is known."""
    target: str
    id: str = ""
    audio: Audio | None = None
    """The source as sound, if this is speech."""
    n_frames: int | None = None
    """How long that is, in frames of 10 ms."""
    speaker: str = ""


@dataclass(frozen=True)
class Corpus:
    """Sentences in parts: `train`, `valid`, and tests of any name."""

    name: str
    source_language: str
    target_language: str
    parts: Mapping[str, Sequence[Sentence]]
