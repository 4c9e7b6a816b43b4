"""Steps: how far each token travels, which is what makes a proportion matter.

    d_t = softplus(w_h . x_t + b_h) >= 0           begins at 1
    P_t = P_{t-1} + d_t                            the place of token t, per head

LeaPformer reads a token's proportion off the token alone, which cannot say where it stands. Here a
token says how far it goes on, and stands where all steps so far have led to. Scores are weighed by
the distance between places, through clocks that turn omega_h per unit of length (see
`leap.ops.travel`), or by LeaPformer's cosine of places divided by the last one, which with steps of
one length is cosFormer.

`Rotation` is the same idea for each pair of a head's channels: Selective RoPE (Movahedi et al.
2025, arXiv 2511.17388), which turns queries and keys by angles that tokens choose.

Axes: b batch, h heads, t tokens, d hidden size, m clocks of a head, p pairs of its channels.
"""

import math

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from leap.errors import ConfigError, InputError
from leap.layers.equalise import Learned
from leap.ops.features import rotary_speeds
from leap.ops.state import Joint, Recurrent, mask_tokens, state
from leap.ops.travel import ClockState

SHORTEST_QUARTER = 1.0
"""Steps in which the fastest clock begins to turn by a quarter."""
LONGEST_QUARTER = 64.0
"""And the slowest one."""
UNIT_STEP = math.log(math.e - 1)
"""b, by which softplus(b) = 1."""


class Steps(Learned):
    """The steps of tokens, and how far they turn the clocks of each head.

    Args:
        hidden_size: width of x.
        n_head: heads.
        hidden: hidden units of the net that reads a step off x; None for a single layer.
        per_head: a step for each head, in place of one that all share.
        learned: without it every step is 1, and only the clocks learn.
        clocks: frequencies of each head; None for steps that turn the clocks of others.
    """

    part = "proportions"

    def __init__(
        self,
        hidden_size: int,
        n_head: int,
        *,
        hidden: int | None = None,
        per_head: bool = True,
        learned: bool = True,
        clocks: int | None = 1,
    ) -> None:
        super().__init__()
        for name, given in (("clocks", clocks), ("proportion_hidden", hidden)):
            if given is not None and given < 1:
                raise ConfigError(f"{name}={given} must be 1 or more")
        self.n_head, self.clocks = n_head, clocks
        n_out = n_head if per_head else 1
        layers: list[nn.Module] = []
        if hidden is not None:
            layers = [nn.Linear(hidden_size, hidden), nn.ReLU()]
        layers.append(nn.Linear(hidden if hidden is not None else hidden_size, n_out))
        self.net = nn.Sequential(*layers) if learned else None
        self.log_frequency = None if clocks is None else nn.Parameter(torch.empty(n_head, clocks))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Begin with steps of length 1 and clocks of many speeds."""
        if self.net is not None:
            self.last.bias.fill_(UNIT_STEP)
        if self.log_frequency is not None:
            self.log_frequency.copy_(self.fresh_log_frequency())

    @property
    def last(self) -> nn.Linear:
        """The layer whose bias makes fresh steps of length 1."""
        assert self.net is not None
        last = self.net[-1]
        assert isinstance(last, nn.Linear)
        return last

    def fresh_log_frequency(self) -> Float[Tensor, "h m"]:
        """Log of what clocks turn per step at the beginning: a quarter in 1 to 64, by head."""
        clocks = self.clocks or 1
        n = self.n_head * clocks
        share = torch.arange(n, dtype=torch.float64) / max(n - 1, 1)
        quarter = SHORTEST_QUARTER * (LONGEST_QUARTER / SHORTEST_QUARTER) ** share
        # Clocks of one head are far apart, as heads are.
        return (math.pi / 2 / quarter).log().view(clocks, self.n_head).T

    def lengths(self, x: Float[Tensor, "b t d"]) -> Float[Tensor, "b h t"]:
        """How far each token goes on."""
        if self.net is None:
            return x.new_ones(x.shape[0], self.n_head, x.shape[1])
        d = F.softplus(self.net(x)).transpose(1, 2)
        return self.settled(d).expand(-1, self.n_head, -1)

    def forward(self, x: Float[Tensor, "b t d"]) -> Float[Tensor, "b h t m"]:
        """How far each token turns each clock, in radians."""
        return self.turns(self.lengths(x))

    def turns(self, lengths: Float[Tensor, "b h t"]) -> Float[Tensor, "b h t m"]:
        """How far steps of such lengths turn the clocks."""
        assert self.log_frequency is not None  # or these steps turn the clocks of others
        return lengths.unsqueeze(-1) * self.log_frequency.exp().unsqueeze(1)

    def shares(
        self, x: Float[Tensor, "b t d"], key_mask: Bool[Tensor, "b t"] | None = None
    ) -> Float[Tensor, "b h t"]:
        """Places of a whole sequence as shares of its last one, in (0, 1]."""
        places = mask_tokens(self.lengths(x).double(), key_mask).cumsum(2)
        last = places[:, :, -1:].clamp_min(torch.finfo(torch.float32).tiny)
        return (places / last).to(x.dtype)


class Rotation(Learned):
    """How far each token turns each pair of a head's channels.

        turn_tm = theta_m (1 + w_hm . x_t)            theta_m: what rotary positions turn

    so that a fresh layer turns about as rotary positions do. Steps here may lead back.

    Args:
        hidden_size: width of x.
        n_head: heads.
        head_width: channels of each.
    """

    part = "rotations"

    def __init__(self, hidden_size: int, n_head: int, head_width: int) -> None:
        super().__init__()
        self.n_head, self.head_width = n_head, head_width
        self.net = nn.Linear(hidden_size, n_head * head_width // 2, bias=False)
        nn.init.normal_(self.net.weight, std=0.02)

    def forward(self, x: Float[Tensor, "b t d"]) -> Float[Tensor, "b h t p"]:
        """How far each token turns each pair, in radians."""
        faster = self.settled(self.net(x).unflatten(-1, (self.n_head, -1)).transpose(1, 2))
        speed = rotary_speeds(self.head_width).to(x.device, torch.float32)
        return (1 + faster) * speed


@state
class TurnedState(Joint):
    """The past of a causal attention whose queries and keys a `Rotation` turns."""

    clock: ClockState
    inner: Recurrent

    def merge(self, later: "TurnedState") -> "TurnedState":
        """Not possible: keys of B, read alone, were turned as if nothing came before."""
        raise InputError(
            "states of a layer with selective rotary positions cannot be merged, as how far keys "
            "of B are turned depends on A; read B from the state after A"
        )
