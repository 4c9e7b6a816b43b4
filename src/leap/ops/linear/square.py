"""Linear attention by all of its scores, in O(t n): for sentences, faster than any state.

    a_ij = (q_i . k_j) (x_i . y_j) w_ij                over the j that i sees
    o_i  = sum_j a_ij v_j / max(sum_j a_ij, eps)

x and y are the re-weighting, as in `parts`, and w is what is left of scores that fade.
Autograd takes it back.

Axes: b batch, h heads, t queries, n keys, f features, e values.
"""

import torch
from torch import Tensor

from leap.ops.linear.parts import (
    Tokens,
    normalised,
    precision,
    unit_scale,
)
from leap.ops.state import as_given, product


def is_cheaper(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether all scores take fewer multiplications than a state and its queries do."""
    (t, f), (n, e) = q.shape[2:], (k.shape[2], v.shape[-1])
    return t * n * (f + e) <= 2 * (t + n) * f * e


def attend(
    tokens: Tokens,
    *,
    sees: Tensor | None = None,
    left: Tensor | None = None,
    normalise: bool = True,
    eps: float = 1e-6,
) -> Tensor:
    """Attended values `[b, h, t, e]`.

    Args:
        tokens: 0 at pads.
        sees: true where a query sees a key, `[t, n]` or `[b, 1, t, n]`; None where each sees all.
        left: what is left of each score, `[h, t, n]` or `[b, h, t, n]`; None where all is.
        normalise: divide by the sum of scores; without it, the weighted sum itself.
        eps: floor of that sum.
    """
    q, k, v, total = tokens.q, tokens.k, tokens.v, precision(tokens)
    scale = unit_scale(q.detach().to(total))
    with as_given(q):
        scores = (q * scale) @ k.to(total).mT
        if tokens.x is not None and tokens.y is not None:
            scores = scores * (tokens.x.to(total) @ tokens.y.to(total).mT)
        if left is not None:
            scores = scores * left
        if sees is not None:
            scores = scores.masked_fill(~sees, 0)
        num = product(scores, v.to(total)).to(total)
    if not normalise:
        return (num / scale).to(v.dtype)
    return normalised(num, scores.sum(-1, keepdim=True), eps * scale).to(v.dtype)


def left_between(decay: Tensor) -> Tensor:
    """What gates leave of each score, exp(c_i - c_j), from their sums c `[..., t]`."""
    # Towards tokens to come, which are not seen, it would grow without bounds.
    return (decay.unsqueeze(-1) - decay.unsqueeze(-2)).clamp_max(0).exp()


def causal(n: int, device: torch.device) -> Tensor:
    """Where query i sees key j: from j = 0 to i."""
    return torch.ones(n, n, dtype=torch.bool, device=device).tril()
