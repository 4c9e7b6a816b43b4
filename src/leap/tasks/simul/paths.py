"""What a model learns to see: a read schedule and a chunk size, drawn anew for each batch.

A model that has met many of them serves many latencies (multi-path wait-k).
"""

from dataclasses import dataclass
from typing import Literal, TypeVar

import torch
from torch import Tensor

from leap.errors import ConfigError

Wait = int | Literal["offline"]
"""How many source states a model is ahead of the target, in steps of the ratio; or all."""


Count = TypeVar("Count", int, Tensor)


@dataclass(frozen=True, kw_only=True)
class Paths:
    """What to draw from, for each batch; one that is given twice is drawn twice as often."""

    waits: tuple[Wait, ...] = (1, 3, 5, 7, 9, "offline")
    """Waits to learn: target piece t (from 0) sees ratio (t + wait) source states, or all."""
    ratio: int | None = None
    """Source states to a target piece (pre-decision ratio); by default 1 for text, 4 for speech."""
    chunk_sizes: tuple[int, ...] | None = None
    """States that the encoder reads at once; 0 for all of them, with which everything waits for the
    end. By default 1 for text, and 4, 8 or 0 for speech."""

    def __post_init__(self) -> None:
        if not self.waits or self.chunk_sizes == ():
            raise ConfigError("give one or more of both waits and chunk_sizes")
        for wait in self.waits:
            if wait != "offline" and wait < 1:
                raise ConfigError(f"waits={self.waits} holds {wait}; give 1 or more, or offline")
        if self.ratio is not None and self.ratio < 1:
            raise ConfigError(f"ratio={self.ratio} must be 1 or more")
        if any(size < 0 for size in self.chunk_sizes or ()):
            raise ConfigError(f"chunk_sizes={self.chunk_sizes} must be 1 or more, or 0 for all")

    def resolved(self, *, is_speech: bool) -> "Resolved":
        """With what is usual in place of what was not given."""
        # A model of text that also learns to read all at once does worse, even offline.
        sizes = (4, 8, 0) if is_speech else (1,)
        ratio = 4 if is_speech else 1
        return Resolved(self.waits, self.ratio or ratio, tuple(self.chunk_sizes or sizes))


@dataclass(frozen=True)
class Resolved:
    """`Paths` of which nothing is left open."""

    waits: tuple[Wait, ...]
    ratio: int
    chunk_sizes: tuple[int, ...]


def states_needed(token: Count, wait: int, ratio: int = 1) -> Count:
    """Source states to read before a target token, counted from 0: g(t) = ratio (t + wait)."""
    return ratio * (token + wait)


def wait_schedule(n_tokens: int, wait: Wait, ratio: int = 1, chunk_size: int = 1) -> Tensor | None:
    """How many source states each of so many target tokens sees; None for all.

    That is `states_needed`, and as states come by the chunk, up to the end of the one that is in.
    """
    if wait == "offline" or not chunk_size:
        return None
    wanted = states_needed(torch.arange(n_tokens), wait, ratio)
    return -(-wanted // chunk_size) * chunk_size
