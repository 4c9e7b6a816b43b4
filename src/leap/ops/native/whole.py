"""Linear attention to a whole sequence by the native library: see src/native/whole.h.

Axes: b batch, h heads, t queries, n keys, f features, e values, r rank.
"""

from typing import Any

import torch
from torch import Tensor

from leap.ops.derivatives import differentiable_again, gradients
from leap.ops.linear import whole
from leap.ops.linear.parts import Tokens, mapped
from leap.ops.native.causal import MAPS, call_of, refusal, work_of
from leap.ops.native.library import address, like, run_attention, side_by_side, view, way_to
from leap.ops.state import accumulator

__all__ = ["MAPS", "attend", "attend_op", "refusal"]


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    x: Tensor | None,
    y: Tensor | None,
    key_mask: Tensor | None,
    feature: str | None,
    normalise: bool,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Attended values `[b, h, t, e]`, and the state, kv and k_sum; then denominators.

    As `whole.attend` has them; x and y are float32, the mask is `[b, n]`.
    """
    o, kv, k_sum, den = outputs = _outputs(q, v, x)
    q, k, v = map(side_by_side, (q, k, v))
    x, y = (None if each is None else side_by_side(each) for each in (x, y))
    call = call_of(q, k, v, x, y, None, key_mask, o, den, None, feature, normalise, eps)
    call.kv_after, call.k_sum_after = address(kv), address(k_sum)
    run_attention("whole", call, backward=False, like=q, work=work_of(q, v, x))
    return outputs


def _attend_backward(
    do: Tensor,
    dkv: Tensor | None,
    dk_sum: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    x: Tensor | None,
    y: Tensor | None,
    key_mask: Tensor | None,
    o: Tensor,
    kv: Tensor,
    k_sum: Tensor,
    den: Tensor,
    feature: str | None,
    normalise: bool,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, x and y, the last two empty without re-weighting."""
    grads = _gradients(q, k, v, x, y)
    q, k, v, do = map(side_by_side, (q, k, v, do))
    x, y = (None if each is None else side_by_side(each) for each in (x, y))
    call = call_of(q, k, v, x, y, None, key_mask, o, den, None, feature, normalise, eps)
    call.d_o, call.kv, call.k_sum = view(do), address(kv), address(k_sum)
    after = [None if each is None else each.contiguous() for each in (dkv, dk_sum)]
    call.dkv_after, call.dk_sum_after = map(address, after)
    call.dq, call.dk, call.dv, call.dx, call.dy = map(view, grads)
    run_attention("whole", call, backward=True, like=q, work=2 * work_of(q, v, x))
    return grads


def _outputs(q: Tensor, v: Tensor, x: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    (b, h, t, f), e, r = q.shape, v.shape[-1], 1 if x is None else x.shape[-1]
    o = v.new_empty(b, t, h, e).transpose(1, 2)  # So that joining the heads copies nothing.
    kv = v.new_empty(b, h, r * f, e, dtype=torch.float64)
    return o, kv, kv.new_empty(b, h, r * f), v.new_empty(b, h, t, dtype=torch.float32)


def _gradients(
    q: Tensor, k: Tensor, v: Tensor, x: Tensor | None, y: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return like(q, q), like(k, q), like(v, q), like(x, q), like(y, q)


attend_op = torch.library.custom_op("leap::native_linear_attention", _attend, mutates_args=())
backward_op = torch.library.custom_op(
    "leap::native_linear_attention_backward", _attend_backward, mutates_args=()
)


@attend_op.register_fake
def _(q, k, v, x, y, key_mask, feature, normalise, eps):  # type: ignore[no-untyped-def]
    return _outputs(q, v, x)


@backward_op.register_fake
def _(do, dkv, dk_sum, q, k, v, x, y, *others):  # type: ignore[no-untyped-def]
    return _gradients(q, k, v, x, y)


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    *tensors, ctx.feature, ctx.normalise, ctx.eps = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(output[-1])
    ctx.set_materialize_grads(False)


def _differentiate(ctx, do, dkv, dk_sum, _dden):  # type: ignore[no-untyped-def]
    saved = ctx.saved_tensors  # Once: checkpointing computes them anew at each look.
    options = ctx.feature, ctx.normalise, ctx.eps
    if differentiable_again():
        return gradients(plain, (*saved[:6], *options), (do, dkv, dk_sum))
    do = torch.zeros_like(saved[6]) if do is None else do
    grads = _way_back(do)(do, dkv, dk_sum, *saved, *options)
    given = (None if x is None else grad for grad, x in zip(grads, saved[:5], strict=True))
    return *given, None, None, None, None


def plain(q, k, v, x, y, key_mask, feature, normalise, eps):  # type: ignore[no-untyped-def]
    """The attended values and the state, by operations of torch alone."""
    tokens = Tokens(q, k, v, x, y)
    tokens = tokens if feature is None else mapped(tokens, feature)
    mask = None if key_mask is None else key_mask[:, None, :, None]
    return whole.plain(*tokens, mask, accumulator(q, k, v), normalise, eps)


attend_op.register_autograd(_differentiate, setup_context=_save)
_way = way_to(attend_op, _attend, _save, _differentiate)
_way_back = way_to(backward_op, _attend_backward)


def attend(*given: Any) -> Any:
    """What `_attend` does, by the shortest way."""
    return _way(given[0])(*given)
