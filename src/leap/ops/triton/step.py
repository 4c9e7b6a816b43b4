"""Linear attention of one more token by Triton: see kernels/step.py.

Axes: b batch, h heads, f features, e values, r rank.
"""

import torch
from torch import Tensor

from leap.ops.native.library import like, side_by_side
from leap.ops.triton.device import cut, launch, power_of_two


@torch.library.custom_op("leap::triton_linear_attention_step", mutates_args=())
def attend(
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

    Gates are `[b, h, 1]`, or `[b, h, 1, f]` per feature; the mask is `[b, 1]`.
    """
    from leap.ops.triton.kernels.step import step

    o, kv_after, k_sum_after = outputs = _outputs(v, kv, k_sum)
    q, k, v = map(side_by_side, (q, k, v))
    given = x, y, log_gate, key_mask
    others = [None if each is None else each.contiguous() for each in given]
    kv, k_sum = kv.contiguous(), k_sum.contiguous()
    b, h, _, f = q.shape
    e = v.shape[-1]
    values = min(64, max(16, power_of_two(e)))
    launch(
        step,
        (b * h, cut(e, values)),
        *(q, k, v, *others, kv, k_sum, o, kv_after, k_sum_after, h),
        *(n for each in (q, k, v, o) for n in each.stride()[:2]),
        F=f,
        E=e,
        RANK=0 if x is None else x.shape[-1],
        PER_FEATURE=log_gate is not None and log_gate.ndim == 4,
        NORMALISE=normalise,
        EPS=eps,
        BF=min(32, max(16, power_of_two(f))),
        BE=values,
    )
    return outputs


def _outputs(v: Tensor, kv: Tensor, k_sum: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return like(v, v), kv.new_empty(kv.shape), k_sum.new_empty(k_sum.shape)


@attend.register_fake
def _(q, k, v, x, y, log_gate, key_mask, kv, k_sum, normalise, eps):  # type: ignore[no-untyped-def]
    return _outputs(v, kv, k_sum)
