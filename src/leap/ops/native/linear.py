"""A linear layer over a few rows by the native library: see src/native/linear.h.

torch multiplies one row by a large matrix at a third of the speed at which it could be read, and in
decoding the head over a large vocabulary is such a matrix.

Axes: n rows, i inputs, o outputs.
"""

from jaxtyping import Float
from torch import Tensor

from leap.ops.derivatives import followed
from leap.ops.native.library import Linear, address, refuses, run_linear

MOST_ROWS = 64
"""Rows up to which it is faster than torch, as measured."""


def refusal(
    x: Float[Tensor, "*rows i"], weight: Float[Tensor, "o i"], bias: Float[Tensor, " o"] | None
) -> str | None:
    """Why the library does not take a call, or None if it does."""
    if followed(x):
        return "it has no gradient, and a compiler or a mode of torch cannot look into it"
    given = (x, weight) if bias is None else (x, weight, bias)
    if any(each.dtype != weight.dtype or not each.is_contiguous() for each in given):
        return "inputs and weights must be of one dtype, and lie in memory row after row"
    if not 0 < x.numel() <= MOST_ROWS * x.shape[-1]:
        return f"it is for {MOST_ROWS} rows at most"
    return refuses(given) if weight.dtype.itemsize == 4 else "it takes float32"


def linear(
    x: Float[Tensor, "*rows i"], weight: Float[Tensor, "o i"], bias: Float[Tensor, " o"] | None
) -> Float[Tensor, "*rows o"]:
    """x weight^T + bias, where `refusal` has no reason against it."""
    y = x.new_empty(*x.shape[:-1], weight.shape[0])
    layer = Linear(address(weight), address(bias), *reversed(weight.shape))
    run_linear(layer, x.view(-1, x.shape[-1]), y)
    return y
