"""Frames of speech to fewer, wider ones, by convolutions that never look ahead.

    y_j = gelu(W [x_{2j-1}, x_{2j}, x_{2j+1}] + b)        twice: four frames of 10 ms make one state

A state comes out with the last of its frames. What a convolution keeps of the past is one frame.

Axes: b batch, t frames, c bins or channels, s states.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from leap.errors import InputError
from leap.ops.state import State, state


@state
class LastFrame(State):
    """What a convolution needs of the frames before."""

    frame: Float[Tensor, "b 1 c"]


class Subsampler(nn.Module):
    """Convolutions of width 3 that halve the number of frames, each followed by GELU.

    Args:
        n_bins: channels of a frame.
        hidden_size: channels of a state.
        n_layer: convolutions; 2^n_layer frames make a state.
    """

    def __init__(self, n_bins: int, hidden_size: int, n_layer: int) -> None:
        super().__init__()
        self.n_bins = n_bins
        self.block = 2**n_layer
        sizes = [n_bins] + [hidden_size] * n_layer
        self.convolutions = nn.ModuleList(
            nn.Conv1d(before, after, kernel_size=3, stride=2) for before, after in pairwise(sizes)
        )

    def start(self, x: Float[Tensor, "b t c"]) -> list[LastFrame]:
        """What there is before the first frame: silence."""
        sizes = [convolution.in_channels for convolution in self._convolutions]
        return [LastFrame(x.new_zeros(len(x), 1, size)) for size in sizes]

    def forward(
        self, x: Float[Tensor, "b t c"], states: Sequence[LastFrame] | None = None
    ) -> tuple[Float[Tensor, "b s d"], list[LastFrame]]:
        """States of these frames, and what to go on with.

        Args:
            x: frames, in whole blocks of as many as make a state; see `blocks`.
            states: what an earlier call returned; None at the start.
        """
        self._check(x)
        if x.shape[1] % self.block:
            raise InputError(
                f"{x.shape[1]} frames are no whole number of states of {self.block} frames each"
            )
        after = []
        for convolution, last in zip(self._convolutions, states or self.start(x), strict=True):
            x = torch.cat([last.frame, x], dim=1)
            after.append(LastFrame(x[:, -1:]))
            x = F.gelu(convolution(x.mT)).mT if x.shape[1] > 1 else self._none(x, convolution)
        return x, after

    def blocks(
        self, x: Float[Tensor, "b t c"], mask: Bool[Tensor, "b t"] | None
    ) -> Float[Tensor, "b _ c"]:
        """Frames filled up to whole blocks with zeros, as are pads."""
        self._check(x)
        if mask is not None:
            x = x.masked_fill(~mask.unsqueeze(-1), 0)
        return F.pad(x, (0, 0, 0, -x.shape[1] % self.block))

    def state_mask(self, mask: Bool[Tensor, "b t"]) -> Bool[Tensor, "b s"]:
        """True at states of which a frame is real."""
        whole = F.pad(mask, (0, -mask.shape[1] % self.block))
        return whole.unflatten(1, (-1, self.block)).any(dim=-1)

    @property
    def _convolutions(self) -> list[nn.Conv1d]:
        return [each for each in self.convolutions if isinstance(each, nn.Conv1d)]

    def _check(self, x: Tensor) -> None:
        if x.ndim != 3 or x.shape[-1] != self.n_bins:
            raise InputError(
                f"input_features are {list(x.shape)}; expected [batch, frames, {self.n_bins}]"
            )

    @staticmethod
    def _none(x: Tensor, convolution: nn.Conv1d) -> Tensor:
        return x.new_zeros(len(x), 0, convolution.out_channels)
