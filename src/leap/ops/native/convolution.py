"""The short causal convolution by the native library: see src/native/convolution.h.

Axes: b batch, t tokens, d channels, n taps.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from leap.ops.derivatives import differentiable_again, gradients, transformed
from leap.ops.native.library import (
    Convolution,
    address,
    refuses,
    run_convolution,
    side_by_side,
    way_to,
)


def refusal(x: Tensor, weight: Tensor, past: Tensor) -> str | None:
    """Why the library does not take a call, or None if it does."""
    if transformed():
        return "it has no transforms of torch.func and no forward mode"
    if any(each.dtype != torch.float32 for each in (x, weight, past)):
        return "it takes float32"
    return refuses((x, weight, past))


def plain(x: Tensor, weight: Tensor, past: Tensor, silu: bool) -> Tensor:
    """The same by operations of torch."""
    # As rows of a picture whose channels lie side by side, where tokens already are: on CPUs the
    # fastest of torch's ways to do this, forward and backward.
    x = torch.cat([past.to(x.dtype), x], dim=1).transpose(1, 2).unsqueeze(2)
    y = F.conv2d(x, weight[:, None, None].to(x.dtype), groups=len(weight))
    y = y.squeeze(2).transpose(1, 2)
    return F.silu(y) if silu else y


def _convolve(x: Tensor, weight: Tensor, past: Tensor, silu: bool) -> Tensor:
    """Tokens `[b, t, d]` after those of the past `[b, n - 1, d]`, by weights `[d, n]`."""
    y = x.new_empty(x.shape)
    x, weight, past = side_by_side(x), weight.contiguous(), past.contiguous()
    call = _call(x, weight, past, silu)
    call.y = address(y)
    run_convolution(call, backward=False, like=y, work=y.numel() * weight.shape[1])
    return y


def _convolve_backward(
    dy: Tensor, x: Tensor, weight: Tensor, past: Tensor, silu: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, weight and past."""
    dx, _, dpast = _gradients(x, weight, past)
    x, weight, past, dy = side_by_side(x), weight.contiguous(), past.contiguous(), dy.contiguous()
    dweight = x.new_empty(len(x), weight.shape[1], weight.shape[0], dtype=torch.float64)
    call = _call(x, weight, past, silu)
    call.dy, call.dx, call.dpast, call.dweight = map(address, (dy, dx, dpast, dweight))
    run_convolution(call, backward=True, like=dx, work=3 * dx.numel() * weight.shape[1])
    return dx, dweight.sum(0).mT.to(weight.dtype, memory_format=torch.contiguous_format), dpast


def _call(x: Tensor, weight: Tensor, past: Tensor, silu: bool) -> Convolution:
    """What both passes say of a call."""
    call = Convolution(*x.shape, weight.shape[1], silu)
    call.x, call.weight, call.past = address(x), address(weight), address(past)
    call.x_stride[0], call.x_stride[1] = x.stride()[:2]
    return call


def _gradients(x: Tensor, weight: Tensor, past: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape), past.new_empty(past.shape)


convolve_op = torch.library.custom_op("leap::native_convolution", _convolve, mutates_args=())
backward_op = torch.library.custom_op(
    "leap::native_convolution_backward", _convolve_backward, mutates_args=()
)


@convolve_op.register_fake
def _(x, weight, past, silu):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape)


@backward_op.register_fake
def _(dy, x, weight, past, silu):  # type: ignore[no-untyped-def]
    return _gradients(x, weight, past)


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    *tensors, ctx.silu = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(ctx, dy):  # type: ignore[no-untyped-def]
    saved = ctx.saved_tensors  # Once: checkpointing computes them anew at each look.
    if differentiable_again():
        return gradients(lambda *given: (plain(*given),), (*saved, ctx.silu), (dy,))
    return *_way_back(dy)(dy, *saved, ctx.silu), None


convolve_op.register_autograd(_differentiate, setup_context=_save)
_way = way_to(convolve_op, _convolve, _save, _differentiate)
_way_back = way_to(backward_op, _convolve_backward)


def convolve(*given: Any) -> Any:
    """What `_convolve` does, by the shortest way."""
    return _way(given[0])(*given)
