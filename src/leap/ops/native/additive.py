"""Additive attention by the native library: see src/native/additive.h.

Axes: b batch, h heads, t tokens, k elements of the past, p values.
"""

from typing import Any

import torch
from torch import Tensor

from leap.ops.additive import blocked
from leap.ops.derivatives import differentiable_again, gradients, transformed
from leap.ops.native.library import (
    Additive,
    address,
    like,
    refuses,
    run_additive,
    side_by_side,
    view,
    way_to,
)
from leap.ops.state import accumulator


def refusal(focus: Tensor, v: Tensor) -> str | None:
    """Why the library does not take a call, or None if it does."""
    if transformed():
        return "it has no transforms of torch.func and no forward mode"
    if accumulator(focus, v) == torch.float64:
        return "it computes in float32, and float64 was given"
    return refuses((focus, v))


def _attend(
    focus: Tensor,
    v: Tensor,
    mask: Tensor | None,
    past_focus: Tensor | None,
    past_v: Tensor | None,
    past_mass: Tensor | None,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """As `blocked.attend`: the focus, and what is given of the past, are float32.

    M and 1 / Z stand at their tokens; pads repeat the M before them.
    """
    o, unrounded, peaks, inverses, n_last, z_last = outputs = _outputs(v)
    v, past_v = side_by_side(v), None if past_v is None else side_by_side(past_v)
    call = _call(focus, v, mask, past_focus, past_v, past_mass, o, peaks, inverses, window)
    call.unrounded = address(unrounded) if unrounded.numel() else None
    call.n_last, call.z_last = address(n_last), address(z_last)
    run_additive(call, backward=False, like=peaks, work=v.numel())
    return outputs


def _attend_backward(
    do: Tensor,
    dn_last: Tensor | None,
    dz_last: Tensor | None,
    focus: Tensor,
    v: Tensor,
    mask: Tensor | None,
    past_focus: Tensor | None,
    past_v: Tensor | None,
    past_mass: Tensor | None,
    o: Tensor,
    peaks: Tensor,
    inverses: Tensor,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of focus, v and the past; those of the past are empty without one."""
    dfocus, dv, *dpast = grads = _gradients(focus, v, past_focus, past_v, past_mass)
    v, do, past_v = (
        side_by_side(v),
        side_by_side(do),
        None if past_v is None else side_by_side(past_v),
    )
    call = _call(focus, v, mask, past_focus, past_v, past_mass, o, peaks, inverses, window)
    call.d_o, call.dfocus, call.dv = view(do), view(dfocus), view(dv)
    last = [None if each is None else each.contiguous() for each in (dn_last, dz_last)]
    call.dn_last, call.dz_last = map(address, last)
    if past_focus is not None:
        call.dpast_focus, call.dpast_v, call.dpast_mass = map(address, dpast)
    run_additive(call, backward=True, like=peaks, work=2 * v.numel())
    return grads


def _call(
    focus: Tensor,
    v: Tensor,
    mask: Tensor | None,
    past_focus: Tensor | None,
    past_v: Tensor | None,
    past_mass: Tensor | None,
    o: Tensor,
    peaks: Tensor,
    inverses: Tensor,
    window: int | None,
) -> Additive:
    """What both passes say of a call."""
    n_past = 0 if past_focus is None else past_focus.shape[2]
    call = Additive(*focus.shape, n_past, v.shape[-1], window or 0)
    call.focus, call.v, call.o = view(focus), view(v), view(o)
    call.mask = view(None if mask is None else mask.unsqueeze(1))
    call.past_focus, call.past_v, call.past_mass = map(view, (past_focus, past_v, past_mass))
    call.peaks, call.inverses = address(peaks), address(inverses)
    return call


def _outputs(v: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    b, h, t, p = v.shape
    peaks = v.new_empty(b, h, t, dtype=torch.float32)
    unrounded = peaks.new_empty((b, h, t, p) if v.dtype != torch.float32 else 0)
    last = peaks.new_empty(b, h, p), peaks.new_empty(b, h)
    return like(v, v), unrounded, peaks, torch.empty_like(peaks), *last


def _gradients(
    focus: Tensor,
    v: Tensor,
    past_focus: Tensor | None,
    past_v: Tensor | None,
    past_mass: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    logit, values, mass = (
        v.new_empty(0) if each is None else each.new_empty(each.shape)
        for each in (past_focus, past_v, past_mass)
    )
    return torch.empty_like(focus), like(v, v), logit, values, mass


attend_op = torch.library.custom_op("leap::native_additive_attention", _attend, mutates_args=())
backward_op = torch.library.custom_op(
    "leap::native_additive_attention_backward", _attend_backward, mutates_args=()
)


@attend_op.register_fake
def _(focus, v, mask, past_focus, past_v, past_mass, window):  # type: ignore[no-untyped-def]
    return _outputs(v)


@backward_op.register_fake
def _(do, dn, dz, focus, v, mask, past_focus, past_v, past_mass, o, m, z, window):  # type: ignore[no-untyped-def]
    return _gradients(focus, v, past_focus, past_v, past_mass)


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    *tensors, ctx.window = inputs
    ctx.set_materialize_grads(False)
    o, unrounded, peaks, inverses, *_ = output
    ctx.save_for_backward(*tensors, unrounded if unrounded.numel() else o, peaks, inverses)
    ctx.mark_non_differentiable(unrounded, peaks, inverses)


def _differentiate(ctx, do, _dunrounded, _dpeaks, _dinverses, dn_last, dz_last):  # type: ignore[no-untyped-def]
    saved = ctx.saved_tensors  # Once: checkpointing computes them anew at each look.
    if differentiable_again():
        return gradients(_sums, (*saved[:-3], ctx.window), (do, dn_last, dz_last))
    do = torch.zeros_like(saved[1]) if do is None else do
    dfocus, dv, *dpast = _way_back(do)(do, dn_last, dz_last, *saved, ctx.window)
    return dfocus, dv, None, *(x if x.numel() else None for x in dpast), None


def _sums(*inputs):  # type: ignore[no-untyped-def]
    o, _, n_last, z_last = blocked.plain(*inputs)
    return o, n_last, z_last


attend_op.register_autograd(_differentiate, setup_context=_save)
_way = way_to(attend_op, _attend, _save, _differentiate)
_way_back = way_to(backward_op, _attend_backward)


def attend(*given: Any) -> Any:
    """What `_attend` does, by the shortest way."""
    return _way(given[0])(*given)
