"""Additive attention as its formula, in O(t^2). Every faster version is tested against this.

    o_i = sum_j exp(focus_j) v_j  /  sum_j exp(focus_j)        over the j that i sees

Axes: b batch, h heads, t tokens, p values.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def additive_attention_reference(
    focus: Float[Tensor, "b h t"],
    v: Float[Tensor, "b h t p"],
    window: int | None = None,
    key_mask: Bool[Tensor, "b t"] | None = None,
) -> Float[Tensor, "b h t p"]:
    """Token i sees the last `window` real tokens up to its own, or all; pads see nothing."""
    b, _, t = focus.shape
    real = focus.new_ones(b, t, dtype=torch.bool) if key_mask is None else key_mask
    count = real.cumsum(-1)
    sees = (real.unsqueeze(2) & real.unsqueeze(1)).tril()
    if window is not None:
        sees = sees & (count.unsqueeze(2) - count.unsqueeze(1) < window)
    sees = sees.unsqueeze(1)
    # A row that sees nothing is given equal scores instead, for softmax has no other way to be 0.
    scores = focus.unsqueeze(2).masked_fill(~sees, -torch.inf)
    weights = scores.masked_fill(~sees.any(-1, keepdim=True), 0).softmax(-1)
    return weights.masked_fill(~sees, 0) @ v.masked_fill(~real[:, None, :, None], 0)
