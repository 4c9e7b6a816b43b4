"""Where pieces of packed sequences lie, in tables that kernels read.

They are made on the device and have as many entries as there may be pieces, so that no kernel waits
for the host. Entries left over are of no tokens.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from leap.ops.triton.device import cut


@dataclass(frozen=True)
class Places:
    """A table of the pieces that packed sequences are cut into."""

    table: Tensor
    """Read by `place_of` in kernels/linear.py, `[m, 4]`, or `span_of` in additive.py, `[m, 3]`."""
    bounds: Tensor
    """The first piece of each sequence, and where those of the last end, `[n + 1]`."""


def places(cu_seqlens: Tensor, t: int, size: int, chunk: int) -> Places:
    """Pieces of a size, which divides a chunk.

    For each its first token, that of its chunk, where that ends, and its slot.
    """
    starts = cu_seqlens.long()
    bounds, index, sequence, real = _cut(starts, t, size)
    chunk_bounds = _bounds(starts, chunk)
    first = (starts[sequence] + (index - bounds[sequence]) * size).where(real, t)
    begin = starts[sequence] + (first - starts[sequence]) // chunk * chunk
    end = torch.minimum(begin + chunk, starts[sequence + 1])
    slot = chunk_bounds[sequence] + sequence + (begin - starts[sequence]) // chunk
    left_over = chunk_bounds[-1] + len(starts) - 1 + index - bounds[-1]
    table = torch.stack(
        [first, begin.where(real, t), end.where(real, t), slot.where(real, left_over)], dim=1
    )
    return Places(table.int(), bounds.int())


def spans(cu_seqlens: Tensor, t: int, size: int) -> Places:
    """Pieces of a size: for each the first token of its sequence, its length, its first piece."""
    starts = cu_seqlens.long()
    bounds, index, sequence, real = _cut(starts, t, size)
    length = starts.diff()[sequence].where(real, 0)
    table = torch.stack([starts[sequence], length, bounds[sequence].where(real, index)], dim=1)
    return Places(table.int(), bounds.int())


def _cut(starts: Tensor, t: int, size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Bounds; and of each entry its index, its sequence, and whether there is such a piece."""
    n = len(starts) - 1
    bounds = _bounds(starts, size)
    index = torch.arange(cut(t, size) + n, device=starts.device)
    sequence = torch.searchsorted(bounds[1:], index, right=True)
    return bounds, index, sequence.clamp_max(n - 1), sequence < n


def _bounds(starts: Tensor, size: int) -> Tensor:
    return F.pad(((starts.diff() + size - 1) // size).cumsum(0), (1, 0))
