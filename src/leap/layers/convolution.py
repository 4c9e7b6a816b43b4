"""A short convolution over the projections of a causal attention, and the state of both.

    q, k, v = SiLU(conv(q)), SiLU(conv(k)), SiLU(conv(v))

each channel by itself and over the last few tokens, as in Mamba and in gated DeltaNet (Yang et al.
2024, arXiv 2412.06464). Scores that a feature map makes by sums alone cannot single out the token
before; a convolution can.

Axes: b batch, t tokens, d channels, n taps.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from leap.errors import ConfigError, InputError
from leap.ops.convolution import TapState, causal_convolution
from leap.ops.state import Joint, Recurrent, state


class ShortConvolution(nn.Module):
    """A causal convolution of a few taps, and SiLU.

    Args:
        n_channel: channels, each of which has taps of its own.
        taps: how many tokens meet, the token itself counted.
    """

    def __init__(self, n_channel: int, taps: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_channel, taps))
        self.reset_parameters()

    @property
    def bound(self) -> float:
        """How far from 0 weights begin, as those of nn.Conv1d do."""
        return float(self.weight.shape[1] ** -0.5)

    def reset_parameters(self) -> None:
        """Begin as nn.Conv1d does."""
        nn.init.uniform_(self.weight, -self.bound, self.bound)

    def forward(
        self,
        x: Float[Tensor, "b t d"],
        state: TapState | None = None,
        *,
        key_mask: Bool[Tensor, "b t"] | None = None,
        cu_seqlens: Int[Tensor, " s"] | None = None,
    ) -> tuple[Float[Tensor, "b t d"], TapState]:
        """Convolve, see `causal_convolution`."""
        return causal_convolution(
            x, self.weight, state, key_mask=key_mask, cu_seqlens=cu_seqlens, silu=True
        )


@state
class ConvolvedState(Joint):
    """The past of a causal attention with a convolution before it."""

    taps: TapState
    inner: Recurrent

    def merge(self, later: "ConvolvedState") -> "ConvolvedState":
        """Not possible: the first tokens of B, read alone, have not met the last of A."""
        raise InputError(
            "states of a layer with a convolution cannot be merged, as what becomes of the first "
            "tokens of B depends on A; read B from the state after A"
        )


def short_convolution(taps: int | None, n_channel: int, form: str) -> ShortConvolution | None:
    """The convolution of a layer with `n_channel` projected channels, if it is to have one."""
    if taps is None:
        return None
    if form != "causal":
        raise ConfigError(
            f"convolution={taps} looks back along a sequence, which form={form!r} sees from both "
            "sides or not at all; use it with form='causal'"
        )
    if taps < 2:
        raise ConfigError(
            f"convolution={taps} would meet no other token; give 2 taps or more, or None"
        )
    return ShortConvolution(n_channel, taps)
