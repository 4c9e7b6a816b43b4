"""The gated delta rule as its formula, token by token. The faster version is tested against this.

    S_t = a_t (I - b_t k_t k_t^T) S_{t-1} + b_t k_t v_t^T        o_t = q_t S_t

Axes: b batch, h heads, t tokens, f features, e values.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def causal_delta_attention_reference(
    q: Float[Tensor, "b h t f"],
    k: Float[Tensor, "b h t f"],
    v: Float[Tensor, "b h t e"],
    beta: Float[Tensor, "b h t"],
    *,
    log_gate: Float[Tensor, "b h t"] | None = None,
    key_mask: Bool[Tensor, "b t"] | None = None,
) -> tuple[Float[Tensor, "b h t e"], Float[Tensor, "b h f e"]]:
    """The formula as written, token by token: outputs, and S after the last."""
    s = torch.zeros_like(k[:, :, :1].mT @ v[:, :, :1])
    eye = torch.eye(k.shape[-1], dtype=k.dtype, device=k.device)
    outputs = []
    for i in range(k.shape[2]):
        q_i, k_i, v_i = (x[:, :, i : i + 1] for x in (q, k, v))
        b_i = beta[:, :, i, None, None]
        a_i = torch.ones_like(b_i) if log_gate is None else log_gate[:, :, i, None, None].exp()
        after = a_i * (eye - b_i * k_i.mT @ k_i) @ s + b_i * k_i.mT @ v_i
        s = after if key_mask is None else after.where(key_mask[:, i, None, None, None], s)
        outputs.append(q_i @ s)
    return torch.cat(outputs, dim=2), s
