"""Joint-sinh attention, of LeaPformer's comparison: the score of a pair is bent, not its features.

    o_i = sum_j a_ij v_j / sum_j a_ij        a_ij = sinh(max(q_i . k_j / sqrt(w), 0))

As no product of features gives these scores, it is quadratic. A query that matches no key gets 0.

Axes: b batch, h heads, t tokens, w width of a head.
"""

from typing import Unpack

import torch

from leap.layers.attention import Heads
from leap.layers.efficient.whole import MatchingAttention, Projections, Real
from leap.ops.state import accumulator, as_given


class JointSinhAttention(MatchingAttention):
    """Attention by the hyperbolic sine of scores.

    Args:
        hidden_size, n_head, projections: see `MatchingAttention`.
        eps: floor of the denominator.
    """

    looks_at_order = False

    def __init__(
        self,
        hidden_size: int,
        n_head: int,
        *,
        eps: float = 1e-6,
        **projections: Unpack[Projections],
    ) -> None:
        super().__init__(hidden_size, n_head, **projections)
        self.eps = eps

    def match(self, q: Heads, k: Heads, v: Heads, real: Real | None) -> Heads:
        """The mean of all values, weighted by the sinh of what scores there are above 0."""
        exact = accumulator(v)
        with as_given(v):
            scores = (q.to(exact) / self.head_width**0.5 @ k.to(exact).mT).relu()
            if real is not None:
                scores = scores.masked_fill(~real[:, None, None], 0)
            # 2 sinh(s) = e^s (1 - e^-2s), and a factor e^-top, common to a query's scores, cancels.
            top = scores.detach().amax(dim=-1, keepdim=True)
            weights = (scores - top).exp() * -torch.expm1(-2 * scores)
            floor = 2 * self.eps * (-top).exp()
            return weights @ v.to(exact) / weights.sum(-1, keepdim=True).maximum(floor)
