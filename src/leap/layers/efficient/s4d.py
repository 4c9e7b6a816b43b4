"""S4D (Gu et al. 2022, arXiv 2206.11893), the state-space reference.

A diagonal linear system for each feature.

    x'(t) = A x(t) + u(t)        y(t) = 2 Re(C x(t)) + D u(t)        A diagonal, complex

Held over steps of length dt, the system is a convolution of u with

    K_l = 2 Re(sum_n C_n (exp(dt A_n) - 1) / A_n exp(l dt A_n))

done by Fourier transform in O(t log t). A second kernel, with a C of its own, runs backwards from
the next token on:

    y_i = sum_{j <= i} K_{i-j} u_j + sum_{j > i} K'_{j-i-1} u_j + D u_i

and the layer gives W1 gelu(y) sigmoid(W2 gelu(y)). A begins as S4D-Lin, A_n = -1/2 + i pi n.

Axes: b batch, t tokens, d hidden size, n states, c the two directions.
"""

import math

import torch
import torch.nn.functional as F
from jaxtyping import Complex, Float
from torch import Tensor, nn

from leap.errors import ConfigError
from leap.layers.attention import Hidden
from leap.layers.efficient.whole import Real, WholeSequenceAttention
from leap.ops.state import accumulator, as_given

SHORTEST_STEP, LONGEST_STEP = 0.001, 0.1


class S4DAttention(WholeSequenceAttention):
    """Not an attention, but called like one: S4D in both directions.

    Args:
        hidden_size: number of features, each with a system of its own.
        n_head: not used; a system is a head of width 1.
        n_state: size of a system, counted in real numbers; even.
        bias: of the output projection.
        dropout: share of gelu(y) to drop.
    """

    def __init__(
        self,
        hidden_size: int,
        n_head: int = 1,
        *,
        n_state: int = 64,
        bias: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__(hidden_size, n_head)
        if n_state < 2 or n_state % 2:
            raise ConfigError(f"n_state={n_state} is no number of pairs; give 2, 4, 6, ...")
        pairs = n_state // 2
        self.log_step = nn.Parameter(torch.empty(hidden_size))
        self.log_decay = nn.Parameter(torch.empty(hidden_size, pairs))
        self.frequency = nn.Parameter(torch.empty(hidden_size, pairs))
        self.c = nn.Parameter(torch.empty(2, hidden_size, pairs, 2))
        self.skip = nn.Parameter(torch.empty(hidden_size))
        self.o_proj = nn.Linear(hidden_size, 2 * hidden_size, bias=bias)
        self.dropout = dropout
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Begin as S4D-Lin, with steps that remember for tens to a thousand tokens."""
        nn.init.uniform_(self.log_step, math.log(SHORTEST_STEP), math.log(LONGEST_STEP))
        nn.init.constant_(self.log_decay, math.log(0.5))
        with torch.no_grad():
            self.frequency.copy_(math.pi * torch.arange(self.frequency.shape[1]))
        nn.init.normal_(self.c, std=0.5**0.5)
        nn.init.normal_(self.skip)

    def attend(self, x: Hidden, real: Real | None) -> Hidden:
        """Convolve in both directions. Pads are 0, and the state behind a row's end is too."""
        exact = accumulator(x)
        with as_given(x):
            u = x.to(exact).mT
            y = self.convolve(u) + u * self.skip.to(exact).unsqueeze(-1)
        y = F.dropout(F.gelu(y.mT), self.dropout, self.training).to(x.dtype)
        return F.glu(self.o_proj(y), dim=-1)

    def convolve(self, u: Float[Tensor, "b d t"]) -> Float[Tensor, "b d t"]:
        """Both sums over the other tokens."""
        t = u.shape[-1]
        onward, backward = self.kernels(t, u.dtype)
        # Around a circle of 2 t places, what lies before the first is what lies behind the last.
        circle = torch.cat([onward, backward.flip(-1)], dim=-1)
        spectrum = torch.fft.rfft(u, n=2 * t) * torch.fft.rfft(circle)
        return torch.fft.irfft(spectrum, n=2 * t)[..., :t]

    def kernels(self, t: int, dtype: torch.dtype) -> Float[Tensor, "c d t"]:
        """K and K', for t tokens."""
        rate, c = self.discrete(dtype)
        # Powers 0 to t - 1 are products of a power below some stride and one of the strides.
        stride = math.isqrt(t - 1) + 1
        order = torch.arange(stride, device=c.device)
        below, strides = ((rate.unsqueeze(-1) * step).exp() for step in (order, stride * order))
        return 2 * ((c.unsqueeze(-1) * strides).mT @ below).real.flatten(-2)[..., :t]

    def discrete(
        self, dtype: torch.dtype
    ) -> tuple[Complex[Tensor, "d n"], Complex[Tensor, "c d n"]]:
        """dt A and C (exp(dt A) - 1) / A: what a state is multiplied by, and what is read of it."""
        step = self.log_step.to(dtype).exp().unsqueeze(-1)
        a = torch.complex(-self.log_decay.to(dtype).exp(), self.frequency.to(dtype))
        return step * a, torch.view_as_complex(self.c.to(dtype)) * (step * a).expm1() / a
