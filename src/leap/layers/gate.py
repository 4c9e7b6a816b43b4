"""Forget gates: how much of the past a causal attention keeps, which each token decides.

    log g = logsigmoid(W x + b)

Linear attention multiplies its state by g (gated linear attention, Yang et al. 2023); softmax
attention adds the sum of log g over the tokens between to each score (the Forgetting Transformer,
Lin et al. 2025, arXiv 2503.02130).

Axes: b batch, h heads, t tokens, d hidden size, c channels of a head.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from leap.errors import ConfigError
from leap.layers.attention import Form
from leap.layers.equalise import Learned

Gate = Literal["head", "channel"]

SHORTEST_MEMORY = 4
"""For how many tokens a fresh layer's most forgetful head remembers."""
LONGEST_MEMORY = 1024
"""For how many its least forgetful one does."""
ONLY_MEMORY = 256
"""For how many one does that is alone."""
BOTTLENECK = 16
"""Width through which gates of channels come, as W would else be another projection."""
WEIGHT_STD = 0.02
"""Deviation of W at the beginning, when tokens are to be gated nearly alike."""


class ForgetGate(Learned):
    """How much of the past to keep at each token, as a logarithm.

    A head begins with b = log(n - 1), so that it keeps 1 - 1 / n of its past at each token and
    remembers for about n. Heads differ in n, from 4 to 1024 in equal ratios.

    Args:
        hidden_size: width of x.
        n_head: heads to gate.
        n_channel: channels of each head, for a gate to each; None for one per head.
    """

    part = "gates"

    def __init__(self, hidden_size: int, n_head: int, n_channel: int | None = None) -> None:
        super().__init__()
        self.n_head = n_head
        self.of_channels = n_channel is not None
        self.net = (
            nn.Sequential(nn.Linear(hidden_size, n_head))
            if n_channel is None
            else nn.Sequential(
                nn.Linear(hidden_size, BOTTLENECK, bias=False),
                nn.Linear(BOTTLENECK, n_head * n_channel),
            )
        )
        self.reset_parameters()

    @property
    def last(self) -> nn.Linear:
        """The layer whose weights begin small, and whose bias says how long heads remember."""
        last = self.net[-1]
        assert isinstance(last, nn.Linear)
        return last

    def reset_parameters(self) -> None:
        """Begin with small weights, and with the memories of `fresh_bias`."""
        nn.init.normal_(self.last.weight, std=WEIGHT_STD)
        with torch.no_grad():
            self.last.bias.copy_(self.fresh_bias())

    def fresh_bias(self) -> Float[Tensor, " n"]:
        """The b of each gate at the beginning."""
        h = self.n_head
        share = torch.arange(h) / max(h - 1, 1)
        memory = SHORTEST_MEMORY * (LONGEST_MEMORY / SHORTEST_MEMORY) ** share
        if h == 1:
            memory = torch.full((1,), float(ONLY_MEMORY))
        return (memory - 1).log().repeat_interleave(self.last.out_features // h)

    def forward(
        self, x: Float[Tensor, "b t d"]
    ) -> Float[Tensor, "b h t"] | Float[Tensor, "b h t c"]:
        """The log of the gates, one per head or one per channel."""
        log_gate = F.logsigmoid(self.net(x))
        if self.of_channels:
            log_gate = log_gate.unflatten(-1, (self.n_head, -1))
        return self.settled(log_gate.transpose(1, 2))


def check_gate(gate: str | None, form: Form) -> None:
    """To forget is to forget what came before, which only the causal form knows."""
    if gate is not None and form != "causal":
        raise ConfigError(
            f"gate={gate!r} forgets what came before, which form={form!r} does not know; "
            "use it with form='causal'"
        )
