"""What a stream has been given and not yet read: text or sound, cut into chunks of the encoder's.

However the input was cut when it came, the chunks are the same.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import numpy as np

from leap.errors import ConfigError, InputError
from leap.runtime.fbank import Extractor, Frames, FrameStream
from leap.runtime.streaming.pauses import Detector, Pauses, Quiet, make_detector
from leap.runtime.streaming.sentences import ends_sentence
from leap.runtime.streaming.vocabulary import EOS, Subwords

LONGEST_WORD = 1000
"""Characters of a word of the source: longer ones are refused, lest one push takes minutes."""
SILENCE = 7.0
"""Mean log energy of a frame's bands that counts as sound: that of about three steps of 16 bits."""
PAUSE = 30
"""Quiet frames in a row, of 10 ms each, that make a pause."""
SHORTEST = 10
"""Louder frames that make a sentence, if it may end in a pause; fewer are a click."""


@dataclass(frozen=True)
class Chunk:
    """What is to be read at once."""

    content: np.ndarray
    """Subwords `[n]`, or frames `[n, bins]`; of length 0 where there is only the end to tell."""
    n_states: int
    """How many states it becomes."""
    is_last: bool
    """Whether the source ends with it."""
    is_heard: bool = True
    """Whether it holds anything but silence."""


def check_word(word: str) -> None:
    """Refuse what is too long for a word."""
    if len(word) > LONGEST_WORD:
        raise InputError(
            f"a word of {len(word):,} characters or more, {word[:20]}...; give text whose words, "
            f"of at most {LONGEST_WORD:,} characters, are separated by white space"
        )


@dataclass
class TextSource:
    """Text to read.

    Args:
        vocabulary: its subwords.
        chunk_size: subwords to a chunk; 0 for whole sentences.
        reset: end sentences where they end, and at the latest after this many subwords; None to
            end only with the source.
        language: ISO 639 code, for where sentences end.
    """

    vocabulary: Subwords
    chunk_size: int = 1
    reset: int | None = None
    language: str = "en"
    pieces: deque[int] = field(default_factory=deque)
    """Those to be read; an end is the end of a sentence."""
    begun: str = ""
    """The beginning of a word whose rest may still come."""
    n_pieces: int = 0
    """Those of this sentence, read or not."""
    last: str = ""
    """With resets: the last word of this sentence, which may end with it."""

    def push(self, source: str | Sequence[str]) -> None:
        """Take more text, in which white space completes a word; or a list of whole words."""
        if not isinstance(source, str):
            if not all(isinstance(word, str) for word in source):
                raise InputError("this stream takes text, or a list of words")
            source = "".join(f" {word} " for word in source)
        text = self.begun + source
        words = text.split()
        is_cut = bool(words) and not text[-1].isspace()
        for word in words:
            check_word(word)
        self.begun = words.pop() if is_cut else ""
        for word in words:
            self._add(word)

    def finish(self) -> None:
        """Say that nothing follows."""
        if self.begun:
            self._add(self.begun)
            self.begun = ""
        if self.n_pieces:
            self._end()

    def take(self, n_read: int) -> Chunk | None:
        """The next chunk, if all of it has come."""
        looked_at = list(islice(self.pieces, self.chunk_size)) if self.chunk_size else self.pieces
        size = looked_at.index(EOS) + 1 if EOS in looked_at else self.chunk_size
        if not 0 < size <= len(self.pieces):
            return None
        pieces = [self.pieces.popleft() for _ in range(size)]
        return Chunk(np.array(pieces), size, is_last=pieces[-1] == EOS)

    def fork(self) -> "TextSource":
        """The same, to go another way."""
        return replace(self, pieces=self.pieces.copy())

    def kept(self) -> dict[str, np.ndarray]:
        """All there is to save, each with a row for this stream."""
        text = np.frombuffer(self.begun.encode(), np.uint8)
        pieces = np.array(self.pieces, np.int64)
        last = np.frombuffer(self.last.encode(), np.uint8)
        count = np.array([self.n_pieces])
        return {
            "pieces": pieces[None],
            "begun": text[None],
            "last": last[None],
            "source_count": count[None],
        }

    def restore(self, kept: Mapping[str, np.ndarray]) -> None:
        """Go on from what was saved."""
        self.pieces = deque(kept["pieces"][0].tolist())
        self.begun = kept["begun"][0].tobytes().decode()
        self.last = kept["last"][0].tobytes().decode()
        self.n_pieces = int(kept["source_count"][0, 0])

    def _add(self, word: str) -> None:
        if self.last and ends_sentence(self.last, word, self.language):
            self._end()
        pieces = self.vocabulary.encode(word)
        self.pieces.extend(pieces)
        self.n_pieces += len(pieces)
        if self.reset is not None and self.n_pieces:
            self.last = word
            if self.n_pieces >= self.reset or ends_sentence(word, None, self.language):
                self._end()

    def _end(self) -> None:
        self.pieces.append(EOS)
        self.n_pieces = 0
        self.last = ""


class SpeechSource:
    """Sound to read.

    Args:
        extractor: makes frames of it.
        frames_per_state: as many become one state.
        chunk_size: states to a chunk; 0 for the whole source.
        reset: end a sentence where a pause begins, and at the latest after this number of states;
            None to end only with the source. A chunk that ends quietly is then held back until it
            is known whether that is a pause, of which nothing is read.
        pauses: by what a pause is told.
    """

    def __init__(
        self,
        extractor: Extractor,
        frames_per_state: int,
        chunk_size: int = 4,
        reset: int | None = None,
        pauses: Pauses = "loudness",
    ) -> None:
        if reset is not None and not chunk_size:
            raise ConfigError("reset does not go with chunk_size=0, which waits for the end")
        self.extractor = extractor
        self.frames_per_state = frames_per_state
        self.chunk_size = chunk_size
        self.reset = reset
        self.pauses = pauses
        self.frames: Frames
        self.quiet: Quiet
        """With resets: whether frames are quiet, from the first; of the last it may be unknown."""
        self.detector: Detector
        self.sound: FrameStream
        self.is_ended: bool
        self.n_loud: int
        """With resets: frames of this sentence that are not quiet."""
        self._begin()

    def push(self, source: Any) -> None:
        """Take more samples, from -1 to 1, at the extractor's rate."""
        if isinstance(source, str) or (len(source) and isinstance(source[0], str)):
            raise InputError("this stream takes samples of sound, not text")
        samples = np.asarray(source)
        new = self.sound.push(samples)
        if len(new):
            self.frames = np.concatenate([self.frames, new])
        if self.reset is not None:
            self.quiet = np.concatenate([self.quiet, self.detector.push(samples, new)])

    def finish(self) -> None:
        """Say that nothing follows."""
        self.is_ended = True
        if self.reset is not None:
            last = self.detector.finish(len(self.frames) - len(self.quiet))
            self.quiet = np.concatenate([self.quiet, last])

    def take(self, n_read: int) -> Chunk | None:
        """The next chunk, if all of it has come; the end, if there is nothing else.

        With resets, less of it if a pause begins there.

        Silence before the first sound is passed over: it would count as read, and the first sound
        would let all be written that it stands for.
        """
        size = self.chunk_size * self.frames_per_state
        if size and not n_read:
            self._pass_over_silence(size)
        if not size or self._n_known() < size:
            if not self.is_ended:
                return None
            size = len(self.frames)
            if not size and not n_read:
                self._begin()
                return None
        is_last = False
        if self.reset is not None:
            pause = self._pause(size)
            if pause is not None and pause.may_go_on:
                return None
            is_last = pause is not None
            size = size if pause is None else pause.start
            self.n_loud += int((~self.quiet[:size]).sum())
        is_heard = self._is_heard(size) and (self.reset is None or self.n_loud >= SHORTEST)
        frames = self.frames[:size]
        self._drop(size)
        n_states = -(-size // self.frames_per_state)
        is_last |= self.reset is not None and n_read + n_states >= self.reset
        if is_last:
            self.n_loud = 0
        if self.is_ended and not len(self.frames):
            is_last = True
            self._begin()
        return Chunk(frames, n_states, is_last, is_heard)

    def fork(self) -> "SpeechSource":
        """The same, to go another way."""
        other = copy(self)  # Arrays are never changed in place.
        other.sound, other.detector = self.sound.fork(), self.detector.fork()
        return other

    def kept(self) -> dict[str, np.ndarray]:
        """All there is to save, each with a row for this stream."""
        return {
            "frames": self.frames[None],
            "rest": self.sound.rest[None],
            "source_count": np.array([[self.n_loud]]),
            "quiet": self.quiet.astype(np.uint8)[None],
            **self.detector.kept(),
        }

    def restore(self, kept: Mapping[str, np.ndarray]) -> None:
        """Go on from what was saved."""
        self.frames = kept["frames"][0]
        self.sound.rest = kept["rest"][0]
        self.n_loud = int(kept["source_count"][0, 0])
        self.quiet = kept["quiet"][0].astype(bool)
        self.detector.restore(kept)

    def _pass_over_silence(self, size: int) -> None:
        """Drop chunks of silence; with resets, all up to the first sound.

        What is learnt from begins with its first sound, and a sentence after a pause does not.
        """
        while self._n_known() >= size and not self._is_heard(size):
            self._drop(size)
        if self.reset is not None:
            quiet = self.quiet[: min(size, self._n_known())]
            self._drop(len(quiet) if quiet.all() else int(quiet.argmin()))

    def _pause(self, size: int) -> "_Pause | None":
        """The first pause that begins in a chunk of this size, or may do so, after some sound."""
        start: int | None = None
        is_begun = self.n_loud > 0
        for i, is_quiet in enumerate(self.quiet[: min(size + PAUSE, self._n_known())]):
            if i >= size and start is None:
                return None
            if not is_quiet:
                start, is_begun = None, True
            elif is_begun and start is None:
                start = i
            if start is not None and i + 1 - start >= PAUSE:
                return _Pause(start)
        # What the source ends with is as good as a pause; of what may still come, one cannot tell.
        return None if start is None else _Pause(start, may_go_on=not self.is_ended)

    def _begin(self) -> None:
        self.frames = np.zeros((0, self.extractor.feature_size), np.float32)
        self.sound = self.extractor.stream()
        self.quiet = np.zeros(0, bool)
        self.detector = make_detector(self.pauses, self.extractor)
        self.is_ended = False
        self.n_loud = 0

    def _n_known(self) -> int:
        """How many frames there are of which all is known."""
        n = len(self.frames)
        return n if self.reset is None else min(n, len(self.quiet))

    def _drop(self, n: int) -> None:
        """Go on after the first n frames."""
        self.frames, self.quiet = self.frames[n:], self.quiet[n:]

    def _is_heard(self, n: int) -> bool:
        """Whether there is anything but silence in the first n frames; with resets, but pauses."""
        if not n or (self.reset is not None and self.quiet[:n].all()):
            return False
        return bool(self.extractor.energy(self.frames[:n]).max() > SILENCE)


@dataclass(frozen=True)
class _Pause:
    """Quiet frames in a row."""

    start: int
    may_go_on: bool = False
    """Whether there are too few yet, but more may follow."""


Source = TextSource | SpeechSource
