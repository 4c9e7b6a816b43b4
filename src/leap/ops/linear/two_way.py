"""Linear attention to a whole sequence that fades with distance in both directions, in O(t).

    a_ij = (q_i . k_j) (x_i . y_j) exp(-|C_i - C_j|)        C_i = -(l_1 + ... + l_i)

One causal pass sees what comes before and the token itself, another over the reversed sequence what
comes after and the token itself; together they see each token itself twice, which is taken off
once. Between i and j > i lie the gates l_{i+1} ... l_j, so the reversed pass has them one token
earlier.

Axes: b batch, h heads, t tokens, f features, e values.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from leap.ops.linear.parts import Tokens, normalised, precision, unit_scale

Attend = Callable[[Tokens, Tensor], Tensor]
"""A causal pass: weighted sums, given tokens and gates `[b, h, t]`."""


def attend(
    tokens: Tokens, log_gate: Tensor, causally: Attend, *, normalise: bool, eps: float
) -> Tensor:
    """Attended values `[b, h, t, e]`.

    Args:
        tokens: 0 at pads.
        log_gate: of each head, `[b, h, t]`, 0 at pads.
        causally: attends to what comes before, without normalising.
        normalise: divide by the sum of scores; without it, the weighted sum itself.
        eps: floor of that sum.
    """
    total, e = precision(tokens), tokens.v.shape[-1]
    q = tokens.q.to(total)
    scale = unit_scale(q.detach())
    # Attending to a column of ones yields the normaliser.
    v = torch.nn.functional.pad(tokens.v.to(total), (0, 1), value=1.0)
    tokens = tokens._replace(q=q * scale, v=v)
    later = torch.nn.functional.pad(log_gate, (0, 1))[:, :, 1:]
    back = causally(_reversed(tokens), later.flip(2)).flip(2)
    own = (tokens.q * tokens.k.to(total)).sum(-1, keepdim=True)
    if tokens.x is not None and tokens.y is not None:
        own = own * (tokens.x * tokens.y).sum(-1, keepdim=True).to(total)
    num, den = (causally(tokens, log_gate) + back - own * v).split([e, 1], dim=-1)
    return normalised(num, den, eps * scale) if normalise else num / scale


def _reversed(tokens: Tokens) -> Tokens:
    return Tokens(*(None if x is None else x.flip(2) for x in tokens))  # type: ignore[arg-type]
