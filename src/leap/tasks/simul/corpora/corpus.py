"""Sentences with their translations, and with their sound where they are spoken."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

from leap.errors import FileError, LeapError
from leap.tasks.simul.audio.files import Audio

HELD_OUT = 0.05
"""Share of the sentences in each part that is held out, where the source has none itself."""
PARTS = {
    "train": "train",
    "training": "train",
    "val": "valid",
    "valid": "valid",
    "validation": "valid",
    "dev": "valid",
}
"""What files call the two parts that every corpus has. Others keep their names, and are tests."""


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

    @property
    def holds_features(self) -> bool:
        """Whether the source is there as features rather than as a recording."""
        return self.audio is not None and self.audio.holds_features


@dataclass(frozen=True)
class Corpus:
    """Sentences in parts: `train`, `valid`, and tests of any name."""

    name: str
    source_language: str
    target_language: str
    parts: Mapping[str, Sequence[Sentence]]
    left_out: Sequence[str] = ()
    """What could not be read, a line each; all the rest was."""

    @property
    def is_spoken(self) -> bool:
        """Whether there is sound."""
        return any(sentence.audio for part in self.parts.values() for sentence in part)


class Reader:
    """Takes the sentences that can be read, and remembers why others cannot.

    `datasets` reads such tables as well, but a bad line fails the whole file there, or is skipped
    without a word.
    """

    def __init__(self) -> None:
        self.parts: dict[str, list[Sentence]] = {}
        self.left_out: list[str] = []

    @contextmanager
    def sentence(self, name: str) -> Iterator[None]:
        """Let one sentence go wrong, without harm to the others.

        Args:
            name: of the sentence, for the note why it is left out.
        """
        try:
            yield
        except LeapError as error:
            self.left_out.append(f"{name}: {error}")

    def add(self, part: str, sentence: Sentence) -> None:
        """Put a sentence into a part, with one space between words, as everyone counts them."""
        sentence = replace(
            sentence, source=_one_line(sentence.source), target=_one_line(sentence.target)
        )
        if not sentence.target or not (sentence.source or sentence.audio):
            raise FileError("it has no text")
        self.parts.setdefault(part, []).append(sentence)

    def corpus(self, name: str, source_language: str, target_language: str) -> Corpus:
        """All that could be read, what to train on first.

        Raises:
            FileError: if that is nothing.
        """
        if not self.parts:
            why = f" ({self.left_out[0]})" if self.left_out else ""
            raise FileError(f"no sentence of {name} can be read{why}")
        order = sorted(self.parts, key=["train", "valid", *sorted(self.parts)].index)
        parts = {part: self.parts[part] for part in order}
        return Corpus(name, source_language, target_language, parts, self.left_out)


def with_held_out(corpus: Corpus, share: float = HELD_OUT) -> Corpus:
    """The corpus with the parts `valid` and `test`, cut off `train` where it has none.

    A sentence's part depends on its source alone, so one that occurs twice is not learnt in one
    place and tested in another.

    Args:
        corpus: of which `train` is cut.
        share: of the sentences, in each part.
    """
    parts = dict(corpus.parts)
    if not parts.get("train"):
        return corpus
    missing = [] if "valid" in parts else ["valid"]
    missing += [] if parts.keys() - {"train", "valid"} else ["test"]
    for number, part in enumerate(missing):
        train = parts["train"]
        kept = [sentence for sentence in train if _share(sentence, number) >= share]
        held_out = [sentence for sentence in train if _share(sentence, number) < share]
        if not held_out or not kept:
            raise FileError(
                f"{corpus.name} has {len(train)} sentences, too few to hold some out; give more, "
                f"or a part named {part}"
            )
        parts |= {"train": kept, part: held_out}
    return replace(corpus, parts=parts)


def link_recording(path: Path, folder: Path) -> str:
    """Link to a recording from a folder.

    Returns:
        The link's name: that of the file, made longer where another file has it already.
    """
    whole = path.resolve()
    link = folder / path.name
    if (link.is_symlink() or link.exists()) and link.resolve() != whole:
        place = sha256(str(whole).encode()).hexdigest()[:16]
        link = folder / f"{path.stem}-{place}{path.suffix}"
    if link.resolve() != whole:
        link.symlink_to(whole)
    return link.name


def _share(sentence: Sentence, number: int) -> float:
    """A number from 0 to 1 that looks random, and is always the same."""
    text = sentence.source or sentence.id
    return int.from_bytes(sha256(f"{number} {text}".encode()).digest()[:6], "big") / 2**48


def _one_line(text: str) -> str:
    return " ".join(text.split())


def texts(sentences: Iterable[Sentence]) -> list[str]:
    """Both sides of sentences, to make a vocabulary of."""
    return [text for sentence in sentences for text in (sentence.source, sentence.target) if text]
