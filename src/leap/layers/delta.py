"""Gated DeltaNet's attention: the gated delta rule over keys of unit length, normed and gated.

    S_t = a_t (I - b_t k_t k_t^T) S_{t-1} + b_t k_t v_t^T        o_t = q_t S_t

    q, k = silu(W x) / |silu(W x)|             q / sqrt(w) besides
    b = sigmoid(W_b x)                         one per head
    log a = -e^A softplus(W_a x + dt)          one per head, A and dt learned, as in Mamba-2
    y = W_o (rmsnorm(o) silu(W_g x))           the norm of each head

From Gated Delta Networks: Improving Mamba2 with Delta Rule (Yang, Kautz, Hatamizadeh, 2024, arXiv
2412.06464).

Axes: b batch, h heads, t tokens, s source tokens, d hidden size, v width of a head's values.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from leap.layers.attention import (
    Call,
    DotProductAttention,
    Hidden,
    Values,
    rms_normed,
    wrapped,
)
from leap.layers.equalise import Learned
from leap.ops.delta import DeltaState, causal_delta_attention
from leap.ops.state import Recurrent, State, accumulator

RATES = (1.0, 16.0)  # e^A at the beginning.
STEPS = (0.001, 0.1)  # softplus(dt) at the beginning.


class GatedDeltaAttention(DotProductAttention):
    """Causal attention by the gated delta rule.

    Args:
        hidden_size, n_head: width of all heads together, and their number.
        value_width: width of a head's values, by default that of its queries.
        bias: of the projections of queries, keys, values and outputs.
        dropout: share of the attended values to drop.
        eps: what the norm adds to mean squares.
        convolution: taps of a convolution over projections; usually 4.
    """

    state_kind = DeltaState

    def __init__(
        self,
        hidden_size: int,
        n_head: int,
        *,
        value_width: int | None = None,
        bias: bool = True,
        dropout: float = 0.0,
        eps: float = 1e-5,
        convolution: int | None = None,
    ) -> None:
        super().__init__(
            hidden_size,
            n_head,
            form="causal",
            rotary=False,
            value_width=value_width,
            bias=bias,
            dropout=dropout,
            convolution=convolution,
        )
        self.beta_proj = nn.Linear(hidden_size, n_head, bias=False)
        self.gate = DecayGate(hidden_size, n_head)
        self.output_gate_proj = nn.Linear(hidden_size, n_head * self.value_width, bias=False)
        self.norm = nn.RMSNorm(self.value_width, eps=eps)

    def forward(
        self, x: Hidden, state: State | None = None, **given: Any
    ) -> tuple[Hidden, Recurrent]:
        """Attend, given what `DotProductAttention.enter` takes."""
        call = self.enter(x, state, **given)
        o, after = self.attend_causally(call)
        return self.leave(o, x), wrapped(call, after)

    def attend_causally(self, call: Call) -> tuple[Values, DeltaState]:
        """Read x, each token attending to itself and the past."""
        x, q, k, v = call.x, call.q, call.k, call.v
        assert k is not None and v is not None
        total = accumulator(x)
        if self.convolution is None:  # Which ends in SiLU itself.
            q, k = F.silu(q), F.silu(k)
        q, k = (F.normalize(each.to(total), dim=-1, eps=1e-6) for each in (q, k))
        beta = self.beta_proj(x).to(total).sigmoid().transpose(1, 2)
        return causal_delta_attention(
            q / math.sqrt(self.head_width),
            k,
            v.to(total),
            beta,
            call.past,
            log_gate=self.gate(x),
            key_mask=call.key_mask,
            cu_seqlens=call.cu_seqlens,
        )

    def finish(self, o: Values, x: Hidden, whole: Values | None = None) -> Values:
        """Attended values, normed and gated."""
        o = rms_normed(o, whole, self.norm.eps or 0.0) * self.norm.weight
        o = o.to(x.dtype) * F.silu(self.split(self.output_gate_proj(x)))
        return F.dropout(o, self.dropout, self.training)

    def weigh(self, call: Call) -> tuple[Values, Recurrent | None]:
        """What queries take of any values; what overwrites a value takes it off again."""
        return self.attend_causally(call)


class DecayGate(Learned):
    """How much of the past each head keeps at each token, as a logarithm.

        log a = -e^A softplus(W x + dt)

    Heads begin with rates e^A from 1 to 16 and steps softplus(dt) from 0.001 to 0.1, so that some
    remember for a token or two and some for a thousand.
    """

    part = "gates"

    def __init__(self, hidden_size: int, n_head: int) -> None:
        super().__init__()
        self.proj = nn.Linear(hidden_size, n_head, bias=False)
        # Weight decay passes over what is called a bias: it would draw all heads to one rate.
        self.rate_bias = nn.Parameter(torch.empty(n_head))
        self.step_bias = nn.Parameter(torch.empty(n_head))
        for parameter, values in self.initial_values().items():
            self.get_parameter(parameter).data.copy_(values)

    def initial_values(self) -> dict[str, Tensor]:
        """New values of A and dt, drawn at random."""
        n_head = len(self.rate_bias)
        rate = torch.empty(n_head).uniform_(*RATES)
        low, high = (math.log(step) for step in STEPS)
        step = torch.empty(n_head).uniform_(low, high).exp()
        return {"rate_bias": rate.log(), "step_bias": step + torch.log(-torch.expm1(-step))}

    def forward(self, x: Float[Tensor, "b t d"]) -> Float[Tensor, "b h t"]:
        """The log of the gates."""
        total = accumulator(x)
        step = F.softplus(self.proj(x).to(total) + self.step_bias.to(total))
        return self.settled((-self.rate_bias.to(total).exp() * step).transpose(1, 2))
