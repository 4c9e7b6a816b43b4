"""What a model learns to see: a read schedule and a chunk size, drawn anew for each batch.

A model that has met many of them serves many latencies (multi-path wait-k).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from leap.errors import ConfigError
from leap.runtime.streaming import policies
from leap.runtime.streaming.policies import Wait


@dataclass(frozen=True, kw_only=True)
class Paths:
    """What to draw from, for each batch; one that is given twice is drawn twice as often."""

    waits: tuple[Wait, ...] = (1, 3, 5, 7, 9, "offline")
    """Waits to learn: target subword t (from 0) sees ratio (t + wait) source states, or all."""
    ratio: int | None = None
    """Source states per target subword (pre-decision ratio); by default 1 for text, 4 for
    speech."""
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


def wait_schedule(n_tokens: int, wait: Wait, ratio: int = 1, chunk_size: int = 1) -> Tensor | None:
    """How many source states each of `n_tokens` target tokens sees; None for all."""
    found = policies.wait_schedule(n_tokens, wait, ratio, chunk_size)
    return None if found is None else torch.from_numpy(found)
