"""Dropout that costs little on a CPU.

There PyTorch draws a number for each element, one after the other: with narrow layers a fifth of a
training step. 16 bits are enough to tell whether an element stays, and a generator made for speed
gives them by the thousand. Its seed comes from PyTorch's own, so `torch.manual_seed` and
checkpointed layers repeat what was dropped. What stays is kept for the backward pass in one byte
per element. docs/decisions/dropout.md has the reasons.
"""

from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int8
from torch import Tensor, nn

from leap.ops.derivatives import transformed

LEVELS = 2**16
PER_DRAW = 4
"""Elements decided by one draw of 64 bits."""


class Dropout(nn.Dropout):
    """`torch.nn.Dropout`, faster on CPUs; p is met to a part in 65,536, its scale exactly."""

    def forward(self, x: Float[Tensor, "*axes"]) -> Float[Tensor, "*axes"]:
        """Set a share p of the elements to zero in training, and scale up the others."""
        if not self.training:
            return x
        n_dropped = round(self.p * LEVELS)
        is_plain = x.device.type == "cpu" and not (torch.compiler.is_compiling() or transformed())
        if not (is_plain and 0 < n_dropped < LEVELS):
            return super().forward(x)
        seed = int(torch.randint(2**62, ()))
        draws = np.random.SFC64(seed).random_raw(-(-x.numel() // PER_DRAW))
        kept = x.new_empty(x.shape, dtype=torch.int8)
        bits = draws.view(np.uint16)[: x.numel()]
        np.greater_equal(bits, n_dropped, out=kept.numpy().reshape(-1).view(np.bool_))
        return _masked(x, kept, LEVELS / (LEVELS - n_dropped))


def _masked(
    x: Float[Tensor, "*axes"], kept: Int8[Tensor, "*axes"], scale: float
) -> Float[Tensor, "*axes"]:
    y: Tensor = _Masked.apply(x, kept, scale)  # type: ignore[no-untyped-call]
    return y


class _Masked(torch.autograd.Function):
    """x kept scale in one pass, and its gradient likewise."""

    @staticmethod
    def forward(x: Tensor, kept: Tensor, scale: float) -> Tensor:
        return torch.addcmul(x.new_zeros(()), x, kept, value=scale)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, float], output: Tensor) -> None:
        _, kept, ctx.scale = inputs
        ctx.save_for_backward(kept)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        (kept,) = ctx.saved_tensors
        return _masked(dy, kept, ctx.scale), None, None
