"""Fastformer, bidirectional: two global vectors, each a focus-weighted mean of all tokens.

    alpha = softmax_i(score_q(q_i) / sqrt(w))        Q = sum_i alpha_i q_i
    p_i = Q k_i                                      element by element
    beta = softmax_i(score_k(p_i) / sqrt(w))         K = sum_i beta_i p_i
    y_i = W_o (W_t (K v_i) + q_i)

The paper has v = q. Its equations score a head by a vector of that head's width, its code by a map
from all features; both are here. A sequence must be whole to be averaged: for one that is still
arriving there is the formulation "fastformer" of `LeapAttention`.

Axes: b batch, h heads, t tokens, d hidden size, w width of a head.
"""

import math
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from leap.layers.additive import Focus
from leap.layers.attention import Hidden, one_of
from leap.layers.efficient.whole import Real, WholeSequenceAttention
from leap.ops.additive import additive_pool
from leap.ops.state import State


class FastformerAttention(WholeSequenceAttention):
    """Fastformer's attention (Wu et al. 2021), for encoders.

    Args:
        hidden_size, n_head: width of all heads together, and their number.
        score: "full", where a head's score reads all features, as the authors' code has it, or
            "per_head", where it reads its own, as the paper has it.
        share_qv: let values be the queries, as in the paper.
        bias: of the projections and full scores.
        dropout: share of the attended values to drop.
    """

    looks_at_order = False
    reads_on = "LeapAttention(formulation='fastformer')"

    def __init__(
        self,
        hidden_size: int,
        n_head: int,
        *,
        score: Literal["full", "per_head"] = "full",
        share_qv: bool = True,
        bias: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__(hidden_size, n_head)
        self.q_proj = nn.Linear(hidden_size, hidden_size, bias=bias)
        self.k_proj = nn.Linear(hidden_size, hidden_size, bias=bias)
        self.v_proj = None if share_qv else nn.Linear(hidden_size, hidden_size, bias=bias)
        one_of("score", score, ("full", "per_head"))
        self.q_score, self.k_score = (
            nn.Linear(hidden_size, n_head, bias=bias)
            if score == "full"
            else HeadScore(n_head, self.head_width)
            for _ in "qk"
        )
        self.t_proj = nn.Linear(hidden_size, hidden_size, bias=bias)
        self.o_proj = nn.Linear(hidden_size, hidden_size, bias=bias)
        self.dropout = dropout

    def attend(self, x: Hidden, real: Real | None) -> Hidden:
        """Mix the tokens of each row."""
        return self._attend(x, real)[0]

    def focus(
        self, x: Float[Tensor, "b t d"], *, key_mask: Bool[Tensor, "b t"] | None = None
    ) -> Focus:
        """What `forward` looks at: the softmax of these logits over a sequence's real tokens."""
        self.check_tokens(x, key_mask)
        return self._attend(x, key_mask)[1]

    def take(
        self,
        x: Float[Tensor, "b t d"],
        values: Float[Tensor, "b h t p"],
        state: State | None = None,
        *,
        key_mask: Bool[Tensor, "b t"] | None = None,
        positions: Int[Tensor, "b t"] | None = None,
    ) -> tuple[Float[Tensor, "b h t p"], None]:
        """The mean by the second focus, as of keys that met the mean query: one for all."""
        logits = self.focus(x, key_mask=key_mask).logits
        mean = additive_pool(logits, values, key_mask=key_mask)
        return mean.unsqueeze(2).expand(-1, -1, x.shape[1], -1), None

    def _attend(self, x: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Focus]:
        q, k = self.q_proj(x), self.k_proj(x)
        v = q if self.v_proj is None else self.v_proj(x)
        global_q, query_logits = self._mean(q, self.q_score, key_mask)
        global_k, logits = self._mean(global_q * k, self.k_score, key_mask)
        y = F.dropout(self.t_proj(global_k * v), self.dropout, self.training)
        return self.o_proj(y + q), Focus(
            logits, self.split(global_q * k), query_logits=query_logits
        )

    def _mean(
        self, x: Tensor, score: nn.Module, key_mask: Tensor | None
    ) -> tuple[Float[Tensor, "b 1 d"], Float[Tensor, "b h t"]]:
        logits = score(x).transpose(1, 2) / math.sqrt(self.head_width)
        pooled = additive_pool(logits, self.split(x), key_mask=key_mask)
        return self.join(pooled.unsqueeze(2)), logits


class HeadScore(nn.Module):
    """A score for each head from its own share of the features, `[b, t, d] -> [b, t, h]`."""

    def __init__(self, n_head: int, head_width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_head, head_width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Begin as Fastformer's score maps do."""
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, x: Float[Tensor, "b t d"]) -> Float[Tensor, "b t h"]:
        """The dot product of each head with its vector."""
        return (x.unflatten(-1, self.weight.shape) * self.weight).sum(dim=-1)
