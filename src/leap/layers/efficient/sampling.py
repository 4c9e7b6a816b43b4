"""Tokens picked at random, the same ones however a row is padded.

A layer draws its numbers once and keeps them in a buffer of integers, which no change of precision
rounds. Of the tokens of a row, cut into as many stretches, each number picks one of its stretch.

Axes: b batch, m samples.
"""

import torch
from jaxtyping import Bool, Int
from torch import Tensor

RESOLUTION = 2**20


def draw(m: int) -> Int[Tensor, " m"]:
    """Where in its stretch each sample lies, from torch's generator."""
    return torch.randint(RESOLUTION, (m,))


def pick(
    drawn: Int[Tensor, " m"], n: Int[Tensor, " b"]
) -> tuple[Int[Tensor, "b m"], Bool[Tensor, "b m"]]:
    """Samples among the first n tokens of each row.

    Returns:
        Their places, rising, and which of them count: in a row of m tokens or fewer each token is
        a sample, and further ones do not count.
    """
    m = len(drawn)
    order = torch.arange(m, device=drawn.device)
    n = n.unsqueeze(1)
    spread = (order * RESOLUTION + drawn) * n // (m * RESOLUTION)
    return torch.where(n > m, spread, order).clamp_max((n - 1).clamp_min(0)), order < n
