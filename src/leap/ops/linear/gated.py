"""Causal linear attention with a forget gate for each feature, a chunk at a time, in O(t).

    S_i = exp(l_i) S_{i-1} + k_i v_i^T        l_i <= 0: logs of the gates, one per feature
    a_ij = sum_f q_if k_jf exp(L_if - L_jf)   L_i = l_1 + ... + l_i, within the chunk

Written out, exp(L_i) and exp(-L_j) would over- and underflow. Here every exponent is a sum of
gates between two tokens, so at most 0: inside a chunk the triangle of scores is cut in halves,
and each square below the diagonal meets at the border m between its rows and its columns,
exp(L_i - L_m) exp(L_m - L_j).

Axes: b batch, h heads, c tokens of a chunk, f features, e values.
"""

import torch
from torch import Tensor

from leap.ops.linear.parts import (
    Tokens,
    normalised,
    precision,
    unit_scale,
    wide_keys,
    wide_queries,
)
from leap.ops.state import as_given

LOWEST = -100.0  # A gate of 0 has the log -inf, and -inf - -inf is no number. e^-100 is 4e-44.


def attend(
    tokens: Tokens,
    log_gate: Tensor,
    kv: Tensor,
    k_sum: Tensor,
    *,
    normalise: bool,
    chunk_size: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attended values `[b, h, t, e]`, and the state after the last token, kv and k_sum.

    Args:
        tokens: 0 at pads.
        log_gate: of each feature with its re-weighting, or one for all, 0 at pads.
        kv, k_sum: the state before the first token.
        normalise: divide by the sum of scores; without it, the weighted sum itself.
        chunk_size: tokens attended to at once.
        eps: floor of that sum.
    """
    q, k, v = wide_queries(tokens), wide_keys(tokens), tokens.v.to(precision(tokens))
    scale = unit_scale(q)
    num, den, kv, k_sum = _sums(q * scale, k, v, log_gate, kv, k_sum, chunk_size)
    o = normalised(num, den, eps * scale) if normalise else num / scale
    return o.to(tokens.v.dtype), kv, k_sum


def _sums(
    q: Tensor, k: Tensor, v: Tensor, log_gate: Tensor, kv: Tensor, k_sum: Tensor, chunk_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Numerators `[b, h, t, e]`, denominators `[b, h, t, 1]` and the sums after the last token."""
    nums, dens = [], []
    k_sum = k_sum.unsqueeze(-2)
    with as_given(q):
        for q_c, k_c, v_c, gate in zip(
            *(x.split(chunk_size, dim=2) for x in (q, k, v, log_gate)), strict=True
        ):
            decay = gate.cumsum(2)
            scores = decayed_scores(q_c, k_c, decay)
            since = q_c * decay.exp()
            nums.append(scores @ v_c + since @ kv.to(q.dtype))
            dens.append(
                (scores.sum(-1) + torch.linalg.vecdot(since, k_sum.to(q.dtype))).unsqueeze(-1)
            )

            to_end = decay[:, :, -1:]
            kept = k_c * (to_end - decay).exp()
            kv = to_end.mT.exp() * kv + kept.mT @ v_c
            k_sum = to_end.exp() * k_sum + kept.sum(2, keepdim=True)
    return torch.cat(nums, dim=2), torch.cat(dens, dim=2), kv, k_sum.squeeze(-2)


def decayed_scores(q: Tensor, k: Tensor, decay: Tensor) -> Tensor:
    """The lower triangle of `sum_f q_if k_jf exp(decay_if - decay_jf)`, `[b, h, c, c]`."""
    c = q.shape[2]
    n_more = (1 << (c - 1).bit_length()) - c
    q, k = (torch.nn.functional.pad(x, (0, 0, 0, n_more)) for x in (q, k))
    # Tokens that fill up forget nothing: from 0 the exponents would grow again, and overflow.
    decay = torch.cat([decay, decay[:, :, -1:].expand(-1, -1, n_more, -1)], dim=2)
    return _triangle(q, k, decay)[..., :c, :c]


def _triangle(q: Tensor, k: Tensor, decay: Tensor) -> Tensor:
    if q.shape[-2] == 1:
        return (q * k).sum(-1, keepdim=True)
    q2, k2, decay2 = (x.unflatten(-2, (2, -1)) for x in (q, k, decay))
    (first, second) = _triangle(q2, k2, decay2).unbind(-3)
    (_, late), (early, _) = q2.unbind(-3), k2.unbind(-3)
    before, after = decay2.unbind(-3)
    border = before[..., -1:, :]
    below = (late * (after - border).clamp_max(0).exp()) @ (early * (border - before).exp()).mT
    above = torch.zeros_like(below)
    return torch.cat(
        [torch.cat([first, above], dim=-1), torch.cat([below, second], dim=-1)], dim=-2
    )
