"""Proportions: where in (0, 1) each token stands, by which LeaPformer re-weights scores.

    learned   p = sigmoid(W2 relu(W1 x + b1) + b2)      hidden width r
              p = sigmoid(w x + b)                      r = 1
    fixed     p_i = (i + 1) / length                    cosFormer

The learned one sees a token's features and nothing else, so it needs no length, and a token keeps
its proportion however far a sequence grows.

Axes: b batch, h heads, t tokens, w width of a head.
"""

import math
from functools import partial

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from leap.errors import ConfigError, InputError
from leap.layers.equalise import Learned
from leap.ops.features import position_proportion


class LearnedProportion(Learned):
    """A small net from a head's features to a proportion.

    Args:
        head_width: width of the features.
        hidden: hidden units r (the paper's LRA models: 16); 1 for a single layer.
        step_down: the hidden width given as head_width / step_down instead (its language
            models: 4).
        n_head: the number of heads, for a net to each; None for one that all heads share, as in the
            paper.
        bins: for proportions at the centres of this number of equal bins. The gradient passes as if
            they had not been rounded.
    """

    part = "proportions"

    def __init__(
        self,
        head_width: int,
        *,
        hidden: int = 16,
        step_down: int | None = None,
        n_head: int | None = None,
        bins: int | None = None,
    ) -> None:
        super().__init__()
        if step_down is not None:
            if step_down < 1 or head_width % step_down:
                divisors = [n for n in range(1, head_width + 1) if head_width % n == 0]
                raise ConfigError(
                    f"step_down={step_down} does not divide the head width {head_width}; "
                    f"{', '.join(map(str, divisors))} do"
                )
            hidden = head_width // step_down
        if hidden < 1 or (bins is not None and bins < 1):
            raise ConfigError(f"hidden={hidden} and bins={bins} must be 1 or more")
        linear = nn.Linear if n_head is None else partial(HeadLinear, n_head)
        self.net = (
            nn.Sequential(linear(head_width, 1))
            if hidden == 1
            else nn.Sequential(linear(head_width, hidden), nn.ReLU(), linear(hidden, 1))
        )
        self.per_head = n_head is not None
        self.bins = bins

    def forward(
        self, x: Float[Tensor, "b h t w"], positions: Int[Tensor, "b t"] | None = None
    ) -> Float[Tensor, "b h t"]:
        """The proportions of tokens, from features; positions play no part."""
        # A projection leaves the heads of a token side by side; a shared net need not move them.
        y = self.net(x) if self.per_head else self.net(x.transpose(1, 2)).transpose(1, 2)
        p = y.squeeze(-1).sigmoid()
        # Large inputs round to 1, which is not in (0, 1): at p = 1 and s = 0 no score is left.
        p = p.clamp(max=1 - torch.finfo(p.dtype).eps)
        if self.bins is None:
            return self.settled(p)
        centre = ((p * self.bins).floor() + 0.5) / self.bins
        return self.settled(p + (centre - p).detach())


class FixedProportion(nn.Module):
    """cosFormer's proportions, (i + 1) / length.

    Args:
        length: the longest sequence there will be; None for each row's own length, which only
            works where all of a sequence is seen at once.
    """

    def __init__(self, length: int | None = None) -> None:
        super().__init__()
        if length is not None and length < 1:
            raise ConfigError(f"length={length} holds no tokens; give the longest there will be")
        self.length = length

    def forward(
        self, x: Float[Tensor, "b h t w"], positions: Int[Tensor, "b t"] | None = None
    ) -> Float[Tensor, "b h t"]:
        """The proportions of tokens, from positions; features play no part."""
        if positions is None:
            raise InputError("fixed proportions come from positions; give them")
        # The padding stands in for a token where there is none at all.
        length = F.pad(positions, (1, 0)).amax(dim=1) + 1 if self.length is None else self.length
        return position_proportion(positions, length, x.dtype).unsqueeze(1).expand(x.shape[:3])


class HeadLinear(nn.Module):
    """A linear layer of its own for each head, `[b, h, t, n_in] -> [b, h, t, n_out]`."""

    def __init__(self, n_head: int, n_in: int, n_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_head, n_in, n_out))
        self.bias = nn.Parameter(torch.empty(n_head, 1, n_out))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Begin where each of the heads would with an nn.Linear."""
        bound = 1 / math.sqrt(self.weight.shape[1])
        nn.init.uniform_(self.weight, -bound, bound)
        nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, x: Float[Tensor, "b h t n_in"]) -> Float[Tensor, "b h t n_out"]:
        """Each head through its own weights."""
        return x @ self.weight + self.bias
