"""Causal linear attention by the native library: see src/native/causal.h.

Axes: b batch, h heads, t tokens, f features, e values, r rank.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from leap.ops.derivatives import differentiable_again, gradients, transformed
from leap.ops.features import LARGEST
from leap.ops.linear import chunked
from leap.ops.linear.parts import Tokens, mapped, without_pads
from leap.ops.native.library import (
    Attention,
    address,
    like,
    refuses,
    run_attention,
    side_by_side,
    view,
    way_to,
)
from leap.ops.state import accumulator

MAPS = {"relu": (1, 1), "elu_plus_one": (2, 2), "exp": (4, 3)}
"""Feature maps of queries and of keys that are fused, by their numbers in leap.h."""
STRETCH = 16 * 64  # Tokens from one kept state to the next, as in causal.h.


def refusal(tokens: Tokens, log_gate: Tensor | None) -> str | None:
    """Why the library does not take a call, or None if it does."""
    if log_gate is not None and log_gate.shape[-1] > 1:
        return "it has gates per head, and not per feature"
    if transformed():
        return "it has no transforms of torch.func and no forward mode"
    if accumulator(tokens.q, tokens.k, tokens.v) == torch.float64:
        return "it computes in float32, and float64 was given"
    return refuses((tokens.q, tokens.k, tokens.v))


def _attend(
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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Attended values `[b, h, t, e]`, denominators, the state after, and marks for the backward.

    As `chunked.attend` has them; x, y and gates `[b, h, t]` are float32, the mask is `[b, t]`.
    """
    o, den, kv_after, k_sum_after, marks = outputs = _outputs(q, k, v, x)
    q, k, v = map(side_by_side, (q, k, v))
    x, y = (None if each is None else side_by_side(each) for each in (x, y))
    call = call_of(q, k, v, x, y, log_gate, key_mask, o, den, marks, feature, normalise, eps)
    rates = None if rate is None else torch.tensor(rate, dtype=torch.double)
    before = [None if each is None else each.contiguous() for each in (kv, k_sum)]
    call.rate = address(rates)
    call.kv, call.k_sum = map(address, before)
    call.kv_after, call.k_sum_after = address(kv_after), address(k_sum_after)
    run_attention("causal", call, backward=False, like=q, work=work_of(q, v, x))
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
    log_gate: Tensor | None,
    key_mask: Tensor | None,
    o: Tensor,
    den: Tensor,
    marks: Tensor,
    rate: Sequence[float] | None,
    has_state: bool,
    feature: str | None,
    normalise: bool,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, x, y, log_gate and of the state before, empty where there is none."""
    *inputs, dkv_before, dk_sum_before = grads = _gradients(q, k, v, x, y, log_gate, has_state)
    q, k, v, do = map(side_by_side, (q, k, v, do))
    x, y = (None if each is None else side_by_side(each) for each in (x, y))
    call = call_of(q, k, v, x, y, log_gate, key_mask, o, den, marks, feature, normalise, eps)
    call.d_o = view(do)
    rates = None if rate is None else torch.tensor(rate, dtype=torch.double)
    after = [None if each is None else each.contiguous() for each in (dkv, dk_sum)]
    call.rate = address(rates)
    call.dkv_after, call.dk_sum_after = map(address, after)
    if has_state:
        call.dkv, call.dk_sum = address(dkv_before), address(dk_sum_before)
    call.dq, call.dk, call.dv, call.dx, call.dy, call.dgate = map(view, inputs)
    run_attention("causal", call, backward=True, like=q, work=2 * work_of(q, v, x))
    return grads


def call_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    x: Tensor | None,
    y: Tensor | None,
    log_gate: Tensor | None,
    key_mask: Tensor | None,
    o: Tensor,
    den: Tensor,
    marks: Tensor | None,
    feature: str | None,
    normalise: bool,
    eps: float,
) -> Attention:
    """What both passes say of a call."""
    call = Attention(*q.shape, v.shape[-1], 0 if x is None else x.shape[-1], v.shape[2])
    call.eps, call.normalise = eps, normalise
    call.map_scale, call.map_limit = 1, math.log(LARGEST)
    call.map_q, call.map_k = (0, 0) if feature is None else MAPS[feature]
    call.q, call.k, call.v, call.x, call.y, call.gate = map(view, (q, k, v, x, y, log_gate))
    call.mask = view(None if key_mask is None else key_mask.unsqueeze(1))
    call.o, call.den, call.marks = view(o), address(den), address(marks)
    return call


def work_of(q: Tensor, v: Tensor, x: Tensor | None) -> int:
    """Multiplications of a forward pass, roughly."""
    b, h, t, f = q.shape
    return b * h * t * f * v.shape[-1] * (2 if x is None else 2 * x.shape[-1])


def _outputs(
    q: Tensor, k: Tensor, v: Tensor, x: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    (b, h, t, f), e, r = k.shape, v.shape[-1], 1 if x is None else x.shape[-1]
    kv = v.new_empty(b, h, r * f, e, dtype=torch.float64)
    wide = (f + 15) // 16 * 16 * r  # Padded, as chunk.h has it.
    marks = v.new_empty(
        (t + STRETCH - 1) // STRETCH,
        b,
        h,
        wide * ((e + 15) // 16 * 16 + 1),
        dtype=torch.float32,
    )
    den = v.new_empty(b, h, t, dtype=torch.float32)
    return like(v, v), den, kv, kv.new_empty(b, h, r * f), marks


def _gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    x: Tensor | None,
    y: Tensor | None,
    log_gate: Tensor | None,
    has_state: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    (b, h, _, f), e, r = k.shape, v.shape[-1], 1 if x is None else x.shape[-1]
    size = (b, h, r * f) if has_state else (0, 0, 0)
    gates = q.new_empty(0) if log_gate is None else torch.empty_like(log_gate)
    k_sum = q.new_empty(size, dtype=torch.float64)
    inputs = like(q, q), like(k, q), like(v, q), like(x, q), like(y, q), gates
    return *inputs, k_sum.new_empty(*size, e), k_sum


attend_op = torch.library.custom_op(
    "leap::native_causal_linear_attention", _attend, mutates_args=()
)
backward_op = torch.library.custom_op(
    "leap::native_causal_linear_attention_backward", _attend_backward, mutates_args=()
)


@attend_op.register_fake
def _(q, k, v, x, y, log_gate, key_mask, rate, kv, k_sum, feature, normalise, eps):  # type: ignore[no-untyped-def]
    return _outputs(q, k, v, x)


@backward_op.register_fake
def _(do, dkv, dk_sum, q, k, v, x, y, log_gate, mask, o, den, marks, rate, has_state, *others):  # type: ignore[no-untyped-def]
    return _gradients(q, k, v, x, y, log_gate, has_state)


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    *tensors, ctx.rate, kv, k_sum, ctx.feature, ctx.normalise, ctx.eps = inputs
    o, den, _, _, marks = output
    ctx.has_state = kv is not None
    ctx.save_for_backward(kv, k_sum, *tensors, o, den, marks)
    ctx.mark_non_differentiable(den, marks)
    ctx.set_materialize_grads(False)


def _differentiate(ctx, do, _dden, dkv, dk_sum, _dmarks):  # type: ignore[no-untyped-def]
    kv, k_sum, *saved = ctx.saved_tensors  # Once: checkpointing computes them anew at each look.
    if differentiable_again():
        given = *saved[:-3], ctx.rate, kv, k_sum, ctx.feature, ctx.normalise, ctx.eps
        return gradients(plain, given, (do, dkv, dk_sum))
    do = torch.zeros_like(saved[2]) if do is None else do
    options = ctx.rate, ctx.has_state, ctx.feature, ctx.normalise, ctx.eps
    grads = _way_back(do)(do, dkv, dk_sum, *saved, *options)
    *inputs, dkv, dk_sum = (grad if grad.numel() else None for grad in grads)
    return *inputs, None, None, dkv, dk_sum, None, None, None


def plain(q, k, v, x, y, log_gate, key_mask, rate, kv, k_sum, feature, normalise, eps):  # type: ignore[no-untyped-def]
    """The attended values and the state after, by operations of torch alone."""
    tokens = Tokens(q, k, v, x, y)
    tokens = without_pads(tokens if feature is None else mapped(tokens, feature), key_mask)
    return chunked.plain(*tokens, log_gate, rate, kv, k_sum, 64, normalise, eps)


attend_op.register_autograd(_differentiate, setup_context=_save)
_way = way_to(attend_op, _attend, _save, _differentiate)
_way_back = way_to(backward_op, _attend_backward)


def attend(*given: Any) -> Any:
    """What `_attend` does, by the shortest way."""
    return _way(given[0])(*given)
