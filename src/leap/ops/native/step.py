"""Linear attention of one more token by the native library: see src/native/step.h.

Axes: b batch, h heads, f features, e values, r rank.
"""

from typing import Any

import torch
from torch import Tensor

from leap.ops.native.library import Step, address, like, run_step, side_by_side, view, way_to


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    x: Tensor | None,
    y: Tensor | None,
    log_gate: Tensor | None,
    key_mask: Tensor | None,
    kv: Tensor,
    k_sum: Tensor,
    normalise: bool,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attended values `[b, h, 1, e]` and the sums of the state after. It has no derivative.

    Gates are `[b, h, 1]` and float32, as x and y are; the mask is `[b, 1]`.
    """
    o, kv_after, k_sum_after = outputs = _outputs(v, kv, k_sum)
    q, k, v = map(side_by_side, (q, k, v))
    x, y = (None if each is None else side_by_side(each) for each in (x, y))
    kv, k_sum = kv.contiguous(), k_sum.contiguous()
    b, h, _, f = q.shape
    call = Step(b, h, f, v.shape[-1], 0 if x is None else x.shape[-1], eps, normalise)
    call.q, call.k, call.v, call.x, call.y, call.gate = map(view, (q, k, v, x, y, log_gate))
    call.mask = view(None if key_mask is None else key_mask.unsqueeze(1))
    call.kv, call.k_sum = address(kv), address(k_sum)
    call.kv_after, call.k_sum_after = address(kv_after), address(k_sum_after)
    call.o = view(o)
    run_step(call, work=kv.numel())
    return outputs


def _outputs(v: Tensor, kv: Tensor, k_sum: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return like(v, v), kv.new_empty(kv.shape), k_sum.new_empty(k_sum.shape)


attend_op = torch.library.custom_op("leap::native_linear_attention_step", _attend, mutates_args=())


@attend_op.register_fake
def _(q, k, v, x, y, log_gate, key_mask, kv, k_sum, normalise, eps):  # type: ignore[no-untyped-def]
    return _outputs(v, kv, k_sum)


_way = way_to(attend_op, _attend)


def attend(*given: Any) -> Any:
    """What `_attend` does, by the shortest way."""
    return _way(given[0])(*given)
