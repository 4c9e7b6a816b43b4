"""Linear attention by all of its scores, in O(t n): for sentences, faster than any state.

    a_ij = (q_i . k_j) (x_i . y_j) w_ij                over the j that i sees
    o_i  = sum_j a_ij v_j / max(sum_j a_ij, eps)

x and y are LeaPformer's re-weighting, as in `chunked`, and w is what is left of scores that fade.
Autograd takes it back.

Axes: b batch, h heads, t queries, n keys, f features, e values.
"""

import torch
from torch import Tensor

from leap.ops.linear.chunked import normalised, turn, unit_scale
from leap.ops.state import accumulator, as_given


def is_cheaper(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether all scores take fewer multiplications than a state and its queries do."""
    (t, f), (n, e) = q.shape[2:], (k.shape[2], v.shape[-1])
    return t * n * (f + e) <= 2 * (t + n) * f * e


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    p: Tensor | None = None,
    s: Tensor | None = None,
    *,
    sees: Tensor | None = None,
    left: Tensor | None = None,
    normalise: bool = True,
    eps: float = 1e-6,
) -> Tensor:
    """Attended values `[b, h, t, e]`.

    Args:
        q, k, v: features of queries and keys, and values; 0 at pads.
        p, s: proportions of the queries and of the keys, if there are any.
        sees: true where a query sees a key, `[t, n]` or `[b, 1, t, n]`; None where each sees all.
        left: what is left of each score, `[h, t, n]`; None where all is.
        normalise: divide by the sum of scores; without it, the weighted sum itself.
        eps: floor of that sum.
    """
    total = accumulator(q, k, v)
    scale = unit_scale(q.detach().to(total))
    with as_given(q):
        scores = (q * scale) @ k.to(total).mT
        if p is not None and s is not None:
            x, y = turn(p.to(total)), turn(s.to(total))
            assert x is not None and y is not None
            scores = scores * (x @ y.mT)
        if left is not None:
            scores = scores * left
        if sees is not None:
            scores = scores.masked_fill(~sees, 0)
        num = scores @ v.to(total)
    if not normalise:
        return (num / scale).to(v.dtype)
    return normalised(num, scores.sum(-1, keepdim=True), eps * scale).to(v.dtype)


def causal(n: int, device: torch.device) -> Tensor:
    """Where query i sees key j: from j = 0 to i."""
    return torch.ones(n, n, dtype=torch.bool, device=device).tril()
