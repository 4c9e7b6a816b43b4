"""Performer (Choromanski et al. 2021, arXiv 2009.14794).

Softmax attention by positive orthogonal random features.

    o_i = sum_j phi(q_i) . phi(k_j) v_j / sum_j phi(q_i) . phi(k_j)
    phi(x) = exp(omega x' - |x'|^2 / 2) / sqrt(m)        x' = x / w^(1/4)

With omega normal, phi(q) . phi(k) is exp(q . k / sqrt(w)) on average: "FAVOR+". Rows of omega are
made orthogonal, w at a time, which narrows the spread.

Features come as logarithms, and each feature's largest over the keys moves to the queries, where it
cancels with theirs. So no denominator is below 1, where the original adds 1e-4 to all features.

Axes: b batch, h heads, t tokens, w width of a head, m features.
"""

from typing import Unpack

import torch
from jaxtyping import Float
from torch import Tensor

from leap.layers.attention import Heads
from leap.layers.efficient.whole import MatchingAttention, Projections, Real, at_least
from leap.ops.linear import linear_attention
from leap.ops.state import accumulator, as_given


class PerformerAttention(MatchingAttention):
    """Performer's attention.

    Args:
        hidden_size, n_head, projections: see `MatchingAttention`.
        n_feature: m, the same for all heads, drawn once: the more, the closer to softmax.
    """

    looks_at_order = False
    omega: Float[Tensor, "m w"]

    def __init__(
        self,
        hidden_size: int,
        n_head: int,
        *,
        n_feature: int = 128,
        **projections: Unpack[Projections],
    ) -> None:
        super().__init__(hidden_size, n_head, **projections)
        at_least("n_feature", n_feature)
        self.register_buffer("omega", orthogonal_normal(n_feature, self.head_width))

    def match(self, q: Heads, k: Heads, v: Heads, real: Real | None) -> Heads:
        """Linear attention under the random features."""
        with as_given(v):
            q, k = self.log_features(q), self.log_features(k)
            seen = k if real is None else k.masked_fill(~real[:, None, :, None], -torch.inf)
            # A row of pads alone has none to see.
            largest = seen.detach().amax(dim=2, keepdim=True).nan_to_num(neginf=0.0)
            q = q + largest
            q = q - q.detach().amax(dim=-1, keepdim=True)
            return linear_attention(q.exp(), (seen - largest).exp(), v, key_mask=real)

    def log_features(self, x: Float[Tensor, "b h t w"]) -> Float[Tensor, "b h t m"]:
        """log phi, less log sqrt(m), which cancels."""
        x = x.to(accumulator(x)) * self.head_width**-0.25
        return x @ self.omega.to(x.dtype).mT - x.square().sum(-1, keepdim=True) / 2


def orthogonal_normal(m: int, w: int) -> Float[Tensor, "m w"]:
    """Vectors each of which is normal, and orthogonal to the others of its w."""
    squares = torch.randn(-(-m // w), w, w)
    directions = torch.linalg.qr(squares).Q.mT.flatten(0, 1)[:m]
    # A direction of the decomposition is as likely as its opposite only up to a sign.
    signs = 2.0 * torch.randint(2, (m, 1)) - 1
    return directions * signs * torch.randn(m, w).norm(dim=1, keepdim=True)
