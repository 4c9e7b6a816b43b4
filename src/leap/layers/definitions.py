"""What attentions compute between their projections: by definition, and as it is fast.

Every one of them is a weighted mean of values under some non-negative scores a_ij,

    o_i = sum_j a_ij v_j  /  sum_j a_ij        over the tokens j that token i sees

so a definition is its scores, in the open, next to the fast call that must agree with them. The
list of attentions, `leap.models.mechanisms.ATTENTIONS`, says which attention has which.

Axes: b batch, h heads, t tokens, d width of a head.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import relu, scaled_dot_product_attention

from leap.ops import (
    additive_attention,
    causal_linear_attention,
    causal_proportional_attention,
    linear_attention,
)
from leap.ops.features import cosine, position_proportion
from leap.ops.linear.call import CHUNK_SIZE


@dataclass(frozen=True)
class Definition:
    """An attention, from projected inputs to attended values, feature maps included."""

    name: str
    arguments: tuple[str, ...]
    """What `attend` takes: queries, keys, proportions of both `p` and `s`, `focus`, `gate`; the
    values `v` last."""
    scores: Callable[..., Tensor]
    """The definition: a_ij of the other arguments, broadcasting to `[b, h, t, t]`."""
    attend: Callable[..., Tensor]
    """The fast version; with a window, if it can have one, as a keyword."""
    causal: bool = True
    can_have_window: bool = False
    window: int | None = None
    """How many tokens, the last being itself, a token sees; None for no limit."""
    rank: int | None = None
    """Numbers per token of the re-weighting, of linear attention; None of all others."""

    def operations(self, tokens: int, width: int, *, backward: bool) -> int | None:
        """Floating-point operations per head of linear attention, None of all others.

        With chunks of C tokens, d wide, and a state of r parts, d x d each, a token is added to the
        state and reads it, and meets half of its chunk twice, for scores and for values. Backward,
        the state is computed again; queries, keys, values and the state have a gradient each; and
        the scores are computed again, with gradients of scores, queries, keys and values. Where
        every token sees every other there are no chunks, and no state to compute again.
        """
        if self.rank is None:
            return None
        state, chunk = max(self.rank, 1) * width**2, width * (CHUNK_SIZE + 1) // 2
        products = (2 + 5, 2 + 5) if backward else (2, 2)
        if not self.causal:
            products = (2 + 4, 0) if backward else (2, 0)
        return 2 * tokens * (products[0] * state + products[1] * chunk)

    @property
    def baseline(self) -> str:
        """Name of the softmax attention to compare with: the one that sees as far ahead."""
        return "softmax" if self.causal else "softmax-bidirectional"

    def define(self, *arguments: Tensor) -> Tensor:
        """The definition in O(t^2), for the arguments of `attend`."""
        *scored, v = arguments
        t = v.shape[2]
        ago = torch.arange(t)[:, None] - torch.arange(t)
        seen = ago < (self.window or t)
        if self.causal:
            seen &= ago >= 0
        a = self.scores(*scored) * seen
        return a @ v / a.sum(-1, keepdim=True).clamp_min(1e-6)


def softmax_scores(q: Tensor, k: Tensor) -> Tensor:
    """exp(q_i . k_j / sqrt(d))."""
    return (q @ k.mT / math.sqrt(q.shape[-1])).exp()


def linear_scores(q: Tensor, k: Tensor) -> Tensor:
    """relu(q_i) . relu(k_j)."""
    return relu(q) @ relu(k).mT


def gated_scores(q: Tensor, k: Tensor, gate: Tensor) -> Tensor:
    """relu(q_i) . relu(k_j) exp(gate_{j+1} + ... + gate_i)."""
    total = gate.cumsum(-1)
    # Above the diagonal the difference is positive, and not wanted.
    return linear_scores(q, k) * (total[..., :, None] - total[..., None, :]).clamp(max=0).exp()


def leapformer_scores(q: Tensor, k: Tensor, p: Tensor, s: Tensor) -> Tensor:
    """relu(q_i) . relu(k_j) cos(pi/2 (p_i - s_j))."""
    return linear_scores(q, k) * torch.cos(math.pi / 2 * (p[..., :, None] - s[..., None, :]))


def cosformer_scores(q: Tensor, k: Tensor) -> Tensor:
    """relu(q_i) . relu(k_j) cos(pi/2 (i - j) / t)."""
    place = torch.arange(q.shape[2], dtype=q.dtype) / q.shape[2]
    return leapformer_scores(q, k, place, place)


def leap_scores(focus: Tensor) -> Tensor:
    """exp(focus_j)."""
    return focus.exp()[..., None, :]


def _cosformer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    t = q.shape[2]
    place = position_proportion(torch.arange(t, device=q.device), t, q.dtype).expand(q.shape[:3])
    return causal_proportional_attention(q, k, v, place, place, feature="relu")[0]


def _linear(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return causal_linear_attention(q, k, v, feature="relu", **options)[0]


def _leap(focus: Tensor, v: Tensor, window: int | None = None) -> Tensor:
    return additive_attention(focus, v, window=window)[0]


QKV, QKPSV = ("q", "k", "v"), ("q", "k", "p", "s", "v")
SOFTMAX = (
    Definition(
        "softmax", QKV, softmax_scores, partial(scaled_dot_product_attention, is_causal=True)
    ),
    Definition(
        "softmax-bidirectional", QKV, softmax_scores, scaled_dot_product_attention, causal=False
    ),
)
LEAPFORMER = (
    Definition(
        "leapformer",
        QKPSV,
        leapformer_scores,
        lambda q, k, p, s, v: causal_proportional_attention(q, k, v, p, s, feature="relu")[0],
        rank=2,
    ),
    Definition(
        "leapformer-bidirectional",
        QKPSV,
        leapformer_scores,
        lambda q, k, p, s, v: linear_attention(
            q, k, v, reweighting=(cosine(p), cosine(s)), feature="relu"
        ),
        causal=False,
        rank=2,
    ),
)
COSFORMER = (Definition("cosformer", QKV, cosformer_scores, _cosformer, rank=2),)
LINEAR = (
    Definition("linear", QKV, linear_scores, _linear, rank=0),
    Definition(
        "linear-gated",
        ("q", "k", "gate", "v"),
        gated_scores,
        lambda q, k, gate, v: _linear(q, k, v, log_gate=gate),
        rank=0,
    ),
)
LEAP = (Definition("leap", ("focus", "v"), leap_scores, _leap, can_have_window=True),)
