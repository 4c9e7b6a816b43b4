"""Beam search for what is left to say when the source has ended.

While the source goes on, what is written stays, so greedy decoding is all there is. At its end, the
rest of the translation may be searched for, as is usual offline: the hypothesis is chosen whose
subwords, the end being one, are the likeliest on average.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from leap.runtime.streaming.vocabulary import EOS

Step = Callable[
    [Int[np.ndarray, " b"], Any, Bool[np.ndarray, " b"]], tuple[Float[np.ndarray, "b v"], Any]
]
"""Of the last subwords, the states before them and whether a row may end: scores of what follows,
and the states after them."""


@dataclass(frozen=True)
class Open:
    """A sentence that is to be completed."""

    last: int
    """The subword written last."""
    room: int
    """Subwords that may be written at most."""
    is_said: bool
    """Whether it says something already, and so may end."""


@dataclass(frozen=True)
class Hypothesis:
    """Subwords that may follow."""

    pieces: tuple[int, ...] = ()
    score: float = 0.0
    """Logarithm of their probability."""
    is_said: bool = False

    def then(self, piece: int, score: float, spells: bool) -> "Hypothesis":
        """With one more subword."""
        return Hypothesis((*self.pieces, piece), self.score + score, self.is_said or spells)

    @property
    def mean(self) -> float:
        """Of a subword, the end being one."""
        return self.score / (len(self.pieces) + 1)


@dataclass
class _Search:
    """The search in one sentence."""

    room: int
    beam: int
    open: list[Hypothesis]
    """The likeliest that have not ended."""
    ended: list[Hypothesis] = field(default_factory=list)

    @property
    def best(self) -> Hypothesis:
        return max(self.ended, key=lambda each: each.mean)

    def take(self, candidates: Sequence[tuple[int, Hypothesis]]) -> list[int]:
        """Go on with the likeliest candidates: which of the open ones each of them continues.

        Args:
            candidates: the likeliest first, each with the open one that it continues.
        """
        chosen: list[tuple[int, Hypothesis]] = []
        for rank, (parent, hypothesis) in enumerate(candidates):
            if hypothesis.pieces[-1] == EOS:
                if rank < self.beam:
                    self.ended.append(Hypothesis(hypothesis.pieces[:-1], hypothesis.score))
            elif len(hypothesis.pieces) > self.room:
                self.ended.append(Hypothesis(hypothesis.pieces[:-1], hypothesis.score))
            elif len(chosen) < self.beam:
                chosen.append((parent, hypothesis))
        self.open = [hypothesis for _, hypothesis in chosen]
        # Scores only fall; that a mean may still rise with the length is not waited for.
        if len(self.ended) >= self.beam and self.open[:1] and self.open[0].mean < self.best.mean:
            self.open = []
        return [parent for parent, _ in chosen[: len(self.open)]]


def search(
    step: Step, states: Any, sentences: Sequence[Open], beam: int, spells: Callable[[int], bool]
) -> list[list[int]]:
    """The subwords that complete each sentence.

    Args:
        step: the model.
        states: a row for each sentence, of which `select` gives some.
        sentences: where each of them is.
        beam: how many hypotheses are kept of each.
        spells: whether a subword says something, so that a sentence may end after it.
    """
    searches = [
        _Search(each.room, beam, [Hypothesis(is_said=each.is_said)] if each.room > 0 else [])
        for each in sentences
    ]
    begun = [i for i, one in enumerate(searches) if one.open]
    states = states.select(begun)
    while rows := [(i, each) for i, one in enumerate(searches) for each in one.open]:
        last = [each.pieces[-1] if each.pieces else sentences[i].last for i, each in rows]
        may_end = np.array([each.is_said for _, each in rows])
        scores, states = step(np.array(last), states, may_end)
        scores = _log_softmax(scores)
        pieces = np.argsort(-scores, axis=-1, kind="stable")[:, : beam + 1]
        values = np.take_along_axis(scores, pieces, axis=-1)
        follow = zip(values.tolist(), pieces.tolist(), strict=True)
        candidates: dict[int, list[tuple[int, Hypothesis]]] = {i: [] for i, _ in rows}
        for place, ((i, each), found) in enumerate(zip(rows, follow, strict=True)):
            candidates[i] += [
                (place, each.then(piece, value, spells(piece)))
                for value, piece in zip(*found, strict=True)
                if value > -math.inf
            ]
        kept: list[int] = []
        for i, found_of_row in candidates.items():
            ranked = sorted(found_of_row, key=lambda each: -each[1].score)
            kept += searches[i].take(ranked)
        states = states.select(kept)
    return [list(one.best.pieces) if one.ended else [] for one in searches]


def _log_softmax(scores: Float[np.ndarray, "b v"]) -> Float[np.ndarray, "b v"]:
    top = scores.max(axis=-1, keepdims=True)
    return scores - top - np.log(np.exp(scores - top).sum(axis=-1, keepdims=True))
