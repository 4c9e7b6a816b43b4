"""Skyformer (Chen et al. 2021, arXiv 2111.00035): kernelized attention through landmarks, in O(t).

    O = C(Q, S) (C(S, S) + ridge I)^-1 C(S, K) V        C(x, y) = exp(-|x - y|^2 / (2 sqrt(w)))

The landmarks S are a sample of the queries and keys together: a Gaussian kernel over both is
positive definite, so that Nystrom's method applies though attention is not symmetric. The inverse
is exact, by Cholesky, where the original takes six steps of an iteration.

Axes: b batch, h heads, t tokens, w width of a head, m landmarks.
"""

from typing import Unpack

import torch
from torch import Tensor

from leap.errors import ConfigError
from leap.layers.attention import Heads
from leap.layers.efficient.gaussian import gaussian
from leap.layers.efficient.sampling import draw, pick
from leap.layers.efficient.whole import MatchingAttention, Projections, Real, at_least, row_lengths
from leap.ops.state import accumulator, as_given, mask_tokens


class SkyformerAttention(MatchingAttention):
    """Skyformer's attention.

    Args:
        hidden_size, n_head, projections: see `MatchingAttention`.
        n_landmark: m, half of them queries and half keys, drawn once.
        ridge: added to the diagonal before inverting; above 0.
    """

    drawn: Tensor

    def __init__(
        self,
        hidden_size: int,
        n_head: int,
        *,
        n_landmark: int = 128,
        ridge: float = 0.1,
        **projections: Unpack[Projections],
    ) -> None:
        super().__init__(hidden_size, n_head, **projections)
        if ridge <= 0:
            raise ConfigError(f"ridge={ridge} leaves nothing to invert by; give more than 0")
        self.ridge = ridge
        self.register_buffer("drawn", draw(at_least("n_landmark", n_landmark, 2)))

    def match(self, q: Heads, k: Heads, v: Heads, real: Real | None) -> Heads:
        """The three matrices, multiplied from the right."""
        exact = accumulator(v)
        q, k, v = (x.to(exact) for x in (q, k, mask_tokens(v, real)))
        n = row_lengths(q, real)
        half = len(self.drawn) // 2
        picked = [pick(drawn, n) for drawn in (self.drawn[:half], self.drawn[half:])]
        marks = torch.cat(
            [
                x.take_along_dim(place[:, None, :, None], dim=2)
                for x, (place, _) in zip((q, k), picked, strict=True)
            ],
            dim=2,
        )
        counts = torch.cat([counts for _, counts in picked], dim=1)[:, None, None]
        with as_given(v):
            # Landmarks that a short row does not have stay among themselves: their part is I.
            eye = torch.eye(len(self.drawn), dtype=exact, device=v.device)
            apart = (counts & counts.mT) & (eye == 0)
            middle = gaussian(marks, marks).where(apart, eye) + self.ridge * eye
            taken = gaussian(marks, k) @ v
            inner = torch.cholesky_solve(taken, torch.linalg.cholesky(middle))
            return gaussian(q, marks).masked_fill(~counts, 0) @ inner
