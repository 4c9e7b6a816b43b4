"""Causal linear attention by the kernels of flash-linear-attention, where it is installed.

    [num, den]_i = sum_{j <= i} a_ij [v_j, 1]        o_i = num_i / max(den_i, eps)

Its kernels compute the sum, under our feature maps, re-weighting, gates and masks. The division is
ours: its own keeps denominators in the precision of the inputs and squares them in the backward
pass, which float16 does not hold (version 0.6). So a column of ones rides along with the values, in
float32. On a GPU its products are of TF32, which has fewer digits than our tolerances allow of
float32: this backend answers only those who name it.

flash-linear-attention: Songlin Yang, Yu Zhang, 2024, https://github.com/fla-org.

Axes: b batch, h heads, t tokens, f features, e values, r rank; n packed sequences.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from leap.ops.derivatives import transformed
from leap.ops.fla.package import missing
from leap.ops.linear.parts import (
    Tokens,
    normalised,
    precision,
    unit_scale,
    wide_keys,
    wide_queries,
    without_pads,
)

MAPS: dict[str, int] = {}
"""No feature map is fused."""


class Kernels(NamedTuple):
    """Its functions, of tensors `[b, t, h, width]`."""

    per_head: Callable[..., Any]
    """`chunk_simple_gla`: gates of heads, or none."""
    per_feature: Callable[..., Any]
    """`chunk_gla`: gates of features."""


def kernels() -> Kernels:
    """What is installed."""
    from fla.ops.gla import chunk_gla
    from fla.ops.simple_gla import chunk_simple_gla

    return Kernels(chunk_simple_gla, chunk_gla)


def refusal(tokens: Tokens) -> str | None:
    """Why it does not take a call, or None if it does."""
    reason = missing()
    if reason is not None:
        return reason
    if transformed():
        return "it has no transforms of torch.func and no forward mode"
    if precision(tokens) == torch.float64:
        return "it computes in float32, and float64 was given"
    if tokens.k.device.type != "cuda":
        return f"it is for CUDA and ROCm, and tensors are on {tokens.k.device.type}"
    return None


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    x: Tensor | None,
    y: Tensor | None,
    log_gate: Tensor | None,
    key_mask: Tensor | None,
    rate: Sequence[float] | None,
    kv: Tensor | None,
    k_sum: Tensor | None,
    feature: str | None,
    normalise: bool,
    eps: float,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, None, Tensor, Tensor]:
    """As `triton.causal.attend`: attended values, nothing, and the state after."""
    assert feature is None  # None is in MAPS.
    tokens = without_pads(Tokens(q, k, v, x, y), key_mask)
    fq, fk = wide_queries(tokens), wide_keys(tokens)
    scale = unit_scale(fq)
    ones = fk.new_ones(*fk.shape[:3], 1)  # Keys of pads are 0.
    v1 = torch.cat([tokens.v.to(fk.dtype), ones], dim=-1)
    before = None
    if kv is not None and k_sum is not None:
        before = torch.cat([kv, k_sum.unsqueeze(-1)], dim=-1).to(fk.dtype)
    if rate is not None:
        log_gate = fk.new_tensor(rate).view(1, -1, 1).expand(fk.shape[:3])
    if log_gate is not None and log_gate.ndim == 4:
        log_gate = log_gate.repeat(1, 1, 1, fk.shape[-1] // log_gate.shape[-1])
    kernel = kernels()[log_gate is not None and log_gate.ndim == 4]
    given = (fq * scale, fk, v1, log_gate)
    o, after = kernel(
        *(None if each is None else each.transpose(1, 2).contiguous() for each in given),
        scale=1.0,
        initial_state=before,
        output_final_state=True,
        **({} if cu_seqlens is None else {"cu_seqlens": cu_seqlens.long()}),
    )
    num, den = o.transpose(1, 2).split([v.shape[-1], 1], dim=-1)
    o = normalised(num, den, eps * scale) if normalise else num / scale
    after = after.double()
    return o.to(v.dtype), None, after[..., :-1], after[..., -1]
