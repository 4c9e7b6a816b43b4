"""Linear attention as its formula, in O(t^2). Every faster version is tested against these.

    o_i = sum_j a_ij v_j / max(sum_j a_ij, eps)        a_ij = q_i . k_j  over the j that i sees

A re-weighting x_i . y_j is the same over `widen(q, x)` and `widen(k, y)`.

Axes: b batch, h heads, t tokens (n of the source), f features, e values.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


def linear_attention_reference(
    q: Float[Tensor, "b h t f"],
    k: Float[Tensor, "b h n f"],
    v: Float[Tensor, "b h n e"],
    *,
    sees: Bool[Tensor, "#b #h #t n"] | None = None,
    normalise: bool = True,
    eps: float = 1e-6,
) -> Float[Tensor, "b h t e"]:
    """Attend to the keys that each query sees; to all of them by default."""
    return _mean(q @ k.mT, v, sees, normalise, eps)


def causal_linear_attention_reference(
    q: Float[Tensor, "b h t f"],
    k: Float[Tensor, "b h t f"],
    v: Float[Tensor, "b h t e"],
    *,
    log_gate: Float[Tensor, "b h t #f"] | None = None,
    key_mask: Bool[Tensor, "b t"] | None = None,
    normalise: bool = True,
    eps: float = 1e-6,
) -> Float[Tensor, "b h t e"]:
    """Query i sees keys j <= i, faded by gates: a_ij = sum_f q_if k_jf g_{j+1} ... g_i."""
    t = q.shape[2]
    sees = torch.ones(t, t, dtype=torch.bool, device=q.device).tril()[None, None]
    if key_mask is not None:
        sees = sees & key_mask[:, None, None, :]
    if log_gate is None:
        return _mean(q @ k.mT, v, sees, normalise, eps)
    if key_mask is not None:
        log_gate = log_gate.masked_fill(~key_mask[:, None, :, None], 0)
    total = log_gate.cumsum(2)
    fade = (total.unsqueeze(3) - total.unsqueeze(2)).clamp_max(0).exp()
    return _mean((q.unsqueeze(3) * k.unsqueeze(2) * fade).sum(-1), v, sees, normalise, eps)


def staircase_linear_attention_reference(
    q: Float[Tensor, "b h t f"],
    k: Float[Tensor, "b h n f"],
    v: Float[Tensor, "b h n e"],
    visible: Int[Tensor, " t"] | Int[Tensor, "b t"],
    *,
    normalise: bool = True,
    eps: float = 1e-6,
) -> Float[Tensor, "b h t e"]:
    """Query i sees the first `visible[i]` keys."""
    order = torch.arange(k.shape[2], device=k.device)
    sees = order < visible.reshape(-1, 1, visible.shape[-1], 1)
    return _mean(q @ k.mT, v, sees, normalise, eps)


def _mean(scores: Tensor, v: Tensor, sees: Tensor | None, normalise: bool, eps: float) -> Tensor:
    if sees is not None:
        scores = scores.masked_fill(~sees, 0)
    weighted = scores @ v
    return weighted / scores.sum(-1, keepdim=True).clamp_min(eps) if normalise else weighted
