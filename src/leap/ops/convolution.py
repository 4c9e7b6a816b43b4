"""A short causal convolution over tokens, each channel by itself.

    y_i = bias + sum_j weight_j x_{i - n + 1 + j}        j = 0 ... n - 1, x_i = 0 before the start

With n taps a token meets the n - 1 before it: what a state-space model or a gated DeltaNet
(Yang et al. 2024, arXiv 2412.06464) puts between its projections and its recurrence, so that
keys know which token they follow.

Axes: b batch, t tokens, d channels, n taps.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from leap.errors import InputError
from leap.ops import backends
from leap.ops.backends import traces
from leap.ops.checks import check_axes, check_floating, check_key_mask, shape
from leap.ops.native import convolution as native
from leap.ops.packing import run_packed
from leap.ops.state import Recurrent, count_tokens, mask_tokens, state


def causal_convolution_reference(
    x: Float[Tensor, "b t d"],
    weight: Float[Tensor, "d n"],
    bias: Float[Tensor, " d"] | None = None,
) -> Float[Tensor, "b t d"]:
    """The formula as written, a tap at a time. The fast version is tested against this one."""
    taps, t = weight.shape[1], x.shape[1]
    x = F.pad(x, (0, 0, taps - 1, 0))
    y = torch.stack([weight[:, j] * x[:, j : j + t] for j in range(taps)]).sum(dim=0)
    return y if bias is None else y + bias


def causal_convolution(
    x: Float[Tensor, "b t d"],
    weight: Float[Tensor, "d n"],
    state: "TapState | None" = None,
    *,
    key_mask: Bool[Tensor, "b t"] | None = None,
    cu_seqlens: Int[Tensor, " s"] | None = None,
    bias: Float[Tensor, " d"] | None = None,
    silu: bool = False,
) -> tuple[Float[Tensor, "b t d"], "TapState"]:
    """Let each token meet the few before it.

    Args:
        x: tokens.
        weight: of each channel's taps, the token's own last.
        state: what an earlier call returned; None at the start of a sequence.
        key_mask: true at real tokens. Pads may stand anywhere: a token meets the real ones before
            it, and what comes out at pads is finite, and of no meaning.
        cu_seqlens: where packed sequences begin, and the last one ends. The batch is then 1, and
            the state has a row for each sequence.
        bias: to add to each channel.
        silu: put what comes out through SiLU, y sigmoid(y).

    Returns:
        The convolved tokens, and the state after the last one.
    """
    before = _begin(x, weight, state, key_mask, 1 if cu_seqlens is None else len(cu_seqlens) - 1)
    if cu_seqlens is not None:

        def op(x: Tensor, state: TapState | None, key_mask: Tensor) -> tuple[Tensor, TapState]:
            y, after = causal_convolution(
                x.squeeze(1), weight, state, key_mask=key_mask, bias=bias, silu=silu
            )
            return y.unsqueeze(1), after

        y, packed = run_packed(op, cu_seqlens, {"x": x.unsqueeze(1)}, state, key_mask)
        return y.squeeze(1), packed
    after = before.advance(x=x, key_mask=key_mask)
    if before.trail is not None:
        real = x.new_ones(x.shape[:2], dtype=torch.bool) if key_mask is None else key_mask
        after = after.after(before, x=x.unsqueeze(1), key_mask=real.unsqueeze(1))
    if x.shape[1] == 0:
        return x, after
    if key_mask is None:
        return _convolve(x, weight, before, bias, silu), after
    # With real tokens in front, pads behind them are no more than the end of the sequence.
    order = (~key_mask).int().argsort(dim=1, stable=True).unsqueeze(-1)
    x = mask_tokens(x.unsqueeze(1), key_mask).squeeze(1).take_along_dim(order, dim=1)
    y = _convolve(x, weight, before, bias, silu)
    return y.take_along_dim(order.argsort(dim=1), dim=1), after


@state
class TapState(Recurrent):
    """The last real tokens of each row, as many as a convolution meets beside a token's own."""

    x: Float[Tensor, "b n d"]
    """Zeros stand for tokens before the first."""

    @classmethod
    def empty(cls, x: Float[Tensor, "b t d"], taps: int) -> "TapState":
        """The state before the first token, for tokens like these."""
        zeros = x.new_zeros(x.shape[0], taps - 1, x.shape[2])
        return cls(zeros, length=x.new_zeros(x.shape[0], dtype=torch.long))

    def advance(
        self,
        *,
        x: Float[Tensor, "b t d"] | Float[Tensor, "b 1 t d"],
        key_mask: Bool[Tensor, "b t"] | Bool[Tensor, "b 1 t"] | None = None,
    ) -> "TapState":
        """The state after reading tokens."""
        x = x.unsqueeze(1) if x.ndim == 3 else x
        length = self.length + count_tokens(x, key_mask)
        t, n = x.shape[2], self.x.shape[1]
        if key_mask is None and traces():
            return replace(self, x=torch.cat([self.x, x.squeeze(1)], dim=1)[:, t:], length=length)
        if key_mask is None:
            # Joined, and not a view, which would keep all that was read in memory.
            kept = torch.cat([self.x[:, t:], x[:, 0, max(t - n, 0) :]], dim=1)
            return replace(self, x=kept, length=length)
        real = F.pad(key_mask.flatten(1), (n, 0), value=True)
        order = real.int().argsort(dim=1, stable=True)[:, t:].unsqueeze(-1)
        kept = torch.cat([self.x, x.squeeze(1)], dim=1).take_along_dim(order, dim=1)
        return replace(self, x=kept, length=length)

    def merge(self, later: "TapState") -> "TapState":
        """Not possible: the first tokens of B, read alone, have not met the last of A."""
        raise InputError(
            "states of a convolution cannot be merged, as what becomes of the first tokens of B "
            "depends on A; read B from the state after A"
        )


def _convolve(x: Tensor, weight: Tensor, past: TapState, bias: Tensor | None, silu: bool) -> Tensor:
    given = x, weight, past.x
    of_torch = bias is not None or backends.named() not in (None, "native")
    if not of_torch and native.refusal(*given) is None:
        return native.convolve(*given, silu)
    y = native.plain(*given, silu=silu and bias is None)
    if bias is None:
        return y
    return F.silu(y + bias) if silu else y + bias


def _begin(
    x: Tensor, weight: Tensor, state: TapState | None, key_mask: Tensor | None, n_packed: int
) -> TapState:
    """The state to go on from: the one given, if it fits these inputs, or an empty one."""
    check_floating(x=x, weight=weight)
    check_axes("b t d", x=x)
    check_axes("d n", weight=weight)
    check_key_mask(key_mask, x.unsqueeze(1), "x")
    if weight.shape[0] != x.shape[2] or weight.shape[1] < 1:
        raise InputError(
            f"weight is {shape(weight)}; for x {shape(x)} it must be [{x.shape[2]}, taps]"
        )
    if state is None:
        return TapState.empty(x, weight.shape[1])
    sizes = [x.shape[0] * n_packed, weight.shape[1] - 1, x.shape[2]]
    if list(state.x.shape) != sizes:
        raise InputError(
            f"the state holds {shape(state.x)}; with x {shape(x)} and weight {shape(weight)} "
            f"it must be {sizes}"
        )
    return state
