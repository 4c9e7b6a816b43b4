"""Which token comes next, for each row by its own settings and random numbers."""

import math
import secrets
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from leap.errors import InputError

COLDEST = 1e-6
"""Temperatures below are as good as 0, and too small for float32."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How a text chooses its tokens."""

    temperature: float = 1.0
    """0 is greedy decoding."""
    top_p: float = 1.0
    """Choose among the likeliest tokens that together have this probability."""
    seed: int | None = None
    """Random seed; None for one by chance."""

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise InputError(f"temperature={self.temperature} must be 0 or more")
        if not 0 < self.top_p <= 1:
            raise InputError(f"top_p={self.top_p} must be more than 0, and at most 1")
        if self.seed is not None and not -(2**63) <= self.seed < 2**64:
            raise InputError(f"seed={self.seed} must fit into 64 bits")


class Sampler:
    """The choices of one text: they depend on its settings, seed and logits, on nothing else."""

    def __init__(self, sampling: Sampling) -> None:
        self.sampling = sampling
        seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
        self.random = np.random.default_rng(seed % 2**64)

    def choose(self, logits: NDArray[np.float32]) -> int:
        """The next token, of logits `[vocabulary]`."""
        likeliest = int(logits.argmax())
        highest = logits[likeliest]
        if not np.isfinite(highest):
            raise InputError("the model gives logits that are no finite numbers; nothing follows")
        if self.sampling.temperature == 0:
            return likeliest
        temperature = np.float32(max(self.sampling.temperature, COLDEST))
        with np.errstate(over="ignore"):  # To -inf, whose mass is 0 as it should be.
            mass = np.exp((logits - highest) / temperature)
        tokens = None
        if self.sampling.top_p < 1:
            tokens = np.argsort(-mass, kind="stable")
            mass = mass[tokens]
        total = np.cumsum(mass, dtype=np.float64)
        if tokens is not None:
            # As few as reach the share: the one that crosses it is still among them.
            total = total[: int(np.searchsorted(total, self.sampling.top_p * total[-1])) + 1]
        drawn = self.random.random() * total[-1]
        place = min(int(np.searchsorted(total, drawn, side="right")), len(total) - 1)
        return place if tokens is None else int(tokens[place])


def log_probabilities(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """Of every token, at temperature 1."""
    shifted = logits.astype(np.float64) - logits.max()
    return shifted - np.log(np.exp(shifted).sum())
