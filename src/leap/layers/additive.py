"""LEAP: each token has a focus, and receives the focus-weighted mean of those before it.

    G(l, U)_i = sum_j exp(l_j) U_j / sum_j exp(l_j)        over i - window < j <= i

One kernel, `leap.ops.additive_attention`, under six formulations, which differ in the focus l, in
what is averaged, and in what becomes of the mean (tau = c / w; norm to mean 0 and variance 1):

    additive     l = u . v / sqrt(w)              y = G(l, v)
    leap-0.1     l = tau norm(q) . norm(k)        y = sigmoid(W x) G(l, v)                c = 5
    leap-1.0     l = tau norm(f) . norm(k)        y = sigmoid(tau norm(q) . K) V          c = 10
                 [K, V] = G(l, [norm(k), norm(v)])
    leap-elu     exp(l) = elu(tau f . k) + 1      as leap-1.0 with no norms     tau = 1 / sqrt(w)
    leap-mixed   as leap-elu, and then y = W [all heads' y]
    fastformer   Q = A(q, u_q), K = A(Q k, u_k), y = K v                                  c = 5
                 A(x, u) = G(tau norm(x) . norm(u), norm(x))

The original, of which these are the others, has nothing like the last: its heads never meet, and
what they give is added to the residual stream as it is. On WikiText-2 it learns best of them.

In the bidirectional form the sum is over |i - j| < window.

In none is a token matched against another: its focus is its own, the same for all that see it.
That is why the cost is linear, and why the focus explains the attention.

Where we leave the original (mtanghu/LEAP): norms divide by sqrt(var + 1e-6), not by the standard
deviation plus 0 or 1e-5, which has no gradient at a constant vector; dropout falls on what comes
out, not on logits, where it would lift weak tokens to average; means are exact, see the kernel.

Axes: b batch, h heads, t tokens, d hidden size, w width of a head.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from leap.errors import ConfigError, InputError
from leap.layers.attention import (
    Attention,
    Hidden,
    check_alibi,
    distance_slopes,
    one_of,
    token_positions,
)
from leap.layers.convolution import ConvolvedState, short_convolution
from leap.layers.equalise import Noted
from leap.ops.additive import (
    FocusState,
    WindowState,
    additive_attention,
    surrounding_attention,
)
from leap.ops.convolution import TapState
from leap.ops.state import Joint, Recurrent, State, accumulator, state

NORM_EPS = 1e-6


class Focus(NamedTuple):
    """What a layer looked at: its explanation, in full."""

    logits: Float[Tensor, "b h t"]
    """Focus of each token; the weight of j at i is its softmax over what i sees."""
    values: Float[Tensor, "b h t w"]
    """What is averaged by it."""
    gate: Float[Tensor, "b h t"] | Float[Tensor, "b h t w"] | None = None
    """How much of the mean each token takes, if there is a gate; of Fastformer, its values."""
    query_logits: Float[Tensor, "b h t"] | None = None
    """Fastformer's first focus, by which queries were averaged; `logits` weigh what they met."""


@state
class FastformerState(Joint):
    """The past of causal Fastformer: of its mean of queries, and of its mean of keys."""

    query: FocusState | WindowState
    key: FocusState | WindowState

    def merge(self, later: "FastformerState") -> "FastformerState":
        """Not possible: keys of B, read alone, have not met the mean query of A."""
        raise InputError(
            "states of fastformer cannot be merged, as what B adds depends on A; "
            "read B from the state after A"
        )


class LeapAttention(Noted, Attention):
    """LEAP's attention, global or over a window, in one of its formulations.

    Args:
        hidden_size, n_head: width of all heads together, and their number.
        form: "causal", as in the original, or "bidirectional", which sees whole sequences and
            keeps no state.
        window: how many tokens are seen, the token itself included; None for all. In the
            bidirectional form it lies on either side.
        formulation: "leap-mixed", or one of the original's: "additive", "leap-0.1", "leap-1.0",
            "leap-elu" or "fastformer".
        rescale: c, by default the formulation's; None for no norms, and tau = 1 / sqrt(w).
        alibi: lower the focus of tokens with their distance, in each head at a rate of its own.
        bias: of the projections.
        dropout: share of the attended values to drop.
        convolution: taps of a convolution over projections, in the causal form; usually 4.
    """

    part = "focus"

    def __init__(
        self,
        hidden_size: int,
        n_head: int,
        *,
        form: Literal["causal", "bidirectional"] = "causal",
        window: int | None = None,
        formulation: str = "leap-mixed",
        rescale: float | Literal["default"] | None = "default",
        alibi: bool = False,
        bias: bool = False,
        dropout: float = 0.0,
        convolution: int | None = None,
    ) -> None:
        super().__init__(hidden_size, n_head)
        if window is not None and window < 1:
            raise ConfigError(
                f"window={window} shows nothing; give 1 (a token sees itself) or more, "
                "or None for all"
            )
        self.form = one_of("form", form, ("causal", "bidirectional"))
        self.window = window
        self.alibi = alibi
        check_alibi(alibi, form)
        self.formulation = FORMULATIONS[one_of("formulation", formulation, list(FORMULATIONS))]
        self.rescale = self.formulation.rescale if rescale == "default" else rescale
        if self.rescale is not None:
            if self.formulation.rescale is None:
                raise ConfigError(f"formulation={formulation!r} has no norms to rescale; drop it")
            if self.rescale <= 0 or self.head_width == 1:
                raise ConfigError(
                    f"rescale={self.rescale} for heads of width {self.head_width} cannot work; "
                    "it takes a positive number, and a width of 2 or more to normalise"
                )
        w = self.head_width
        self.tau = 1 / math.sqrt(w) if self.rescale is None else self.rescale / w
        names = self.formulation.projections
        self.convolution = short_convolution(convolution, len(names) * hidden_size, form)
        for name in names:
            self.add_module(f"{name}_proj", nn.Linear(hidden_size, hidden_size, bias=bias))
        for name in self.formulation.vectors:
            self.register_parameter(name, nn.Parameter(torch.empty(n_head, self.head_width)))
        mixes = self.formulation.mixes
        self.o_proj = nn.Linear(hidden_size, hidden_size, bias=bias) if mixes else None
        self.dropout = dropout
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Begin with small score vectors; projections begin as they always do."""
        for name in self.formulation.vectors:
            nn.init.normal_(self.get_parameter(name), std=0.02)

    def forward(
        self,
        x: Float[Tensor, "b t d"],
        state: State | None = None,
        *,
        key_mask: Bool[Tensor, "b t"] | None = None,
        positions: Int[Tensor, "b t"] | None = None,
        cu_seqlens: Int[Tensor, " n"] | None = None,
    ) -> tuple[Float[Tensor, "b t d"], Recurrent | None]:
        """Attend, as `Attention.forward` says. Positions matter with alibi alone."""
        y, after, _ = self._attend(x, state, key_mask, cu_seqlens, positions)
        y = F.dropout(self.join(y).to(x.dtype), self.dropout, self.training)
        return y if self.o_proj is None else self.o_proj(y), after

    def step(
        self, x: Float[Tensor, "b d"], state: State | None, **inputs: Any
    ) -> tuple[Float[Tensor, "b d"], State | None]:
        """Attend from one token for each row, in the causal form."""
        if self.form == "bidirectional":
            raise InputError(
                "LeapAttention(form='bidirectional') sees whole sequences and takes no steps; "
                "use form='causal'"
            )
        return super().step(x, state, **inputs)

    def focus(self, x: Hidden, state: State | None = None, **inputs: Tensor | None) -> Focus:
        """What `forward` looks at, given the same."""
        return self._attend(x, state, **inputs)[2]

    def take(
        self,
        x: Float[Tensor, "b t d"],
        values: Float[Tensor, "b h t p"],
        state: State | None = None,
        *,
        key_mask: Bool[Tensor, "b t"] | None = None,
        positions: Int[Tensor, "b t"] | None = None,
    ) -> tuple[Float[Tensor, "b h t p"], Recurrent | None]:
        """What tokens take of any values, as `Attention.take` says.

        Weights are the softmax of the focus over what a token sees, before the gate. In the
        formulation "fastformer" they weigh keys that have met the mean query.
        """
        if state is not None and (self.formulation.nests or self.form == "bidirectional"):
            raise InputError(
                "Fastformer and form='bidirectional' take of whole sequences; give no state"
            )
        self.check_tokens(x, key_mask)
        taps = None
        if self.convolution is not None:
            both = self.check_state(state, ConvolvedState, x)
            state, taps = (None, None) if both is None else (both.inner, both.taps)
        past = self.check_state(state, FocusState if self.window is None else WindowState, x)
        heads, taps = self._heads(x, taps, key_mask, None)
        whole = self._mean(x, None, key_mask, None, positions)
        logits = self.formulation.attend(self, x, heads, None, whole)[2].logits
        o, after = self._mean(x, past, key_mask, None, positions)(logits, values, past)
        if self.formulation.nests:
            return o, None
        return o, after if taps is None or after is None else ConvolvedState.of(taps, after)

    def contributions(
        self,
        x: Float[Tensor, "b t d"],
        at: int,
        *,
        key_mask: Bool[Tensor, "b t"] | None = None,
        positions: Int[Tensor, "b t"] | None = None,
    ) -> Float[Tensor, "b t d"]:
        """What each token contributes to what comes out, as `Attention.contributions` says."""
        focus = self.focus(x, key_mask=key_mask, positions=positions)
        row = self.one_row(x, at, key_mask=key_mask, positions=positions)
        each = row.unsqueeze(-1) * focus.values
        if focus.gate is not None:
            gate = focus.gate if focus.gate.ndim == 4 else focus.gate.unsqueeze(-1)
            each = gate[:, :, [at]] * each
        y = self.join(each.to(x.dtype))
        return y if self.o_proj is None else F.linear(y, self.o_proj.weight)

    def added(
        self,
        x: Float[Tensor, "b t d"],
        *,
        key_mask: Bool[Tensor, "b t"] | None = None,
        positions: Int[Tensor, "b t"] | None = None,
    ) -> Float[Tensor, "b h t d"]:
        """What the values of each token add, as `Attention.added` says."""
        v = self.focus(x, key_mask=key_mask, positions=positions).values
        return self.through_projection(v, self.o_proj)

    def _attend(
        self,
        x: Tensor,
        state: State | None,
        key_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> "Attended":
        self.check_tokens(x, key_mask)
        if state is not None and self.form == "bidirectional":
            raise InputError(
                "LeapAttention(form='bidirectional') sees whole sequences and goes on from no "
                "state; use form='causal' to read on"
            )
        past, taps = state, None
        if self.convolution is not None:
            both = self.check_state(state, ConvolvedState, x, cu_seqlens)
            past, taps = (None, None) if both is None else (both.inner, both.taps)
        past = self.check_state(past, self.formulation.state_kind(self.window), x, cu_seqlens)
        heads, taps = self._heads(x, taps, key_mask, cu_seqlens)
        mean = self._mean(x, past, key_mask, cu_seqlens, positions)
        y, after, focus = self.formulation.attend(self, x, heads, past, mean)
        self.note(focus.logits)
        if taps is not None and after is not None:
            after = ConvolvedState.of(taps, after)
        return y, after, focus

    def _heads(
        self,
        x: Tensor,
        past: TapState | None,
        key_mask: Tensor | None,
        cu_seqlens: Tensor | None,
    ) -> tuple["Heads", TapState | None]:
        """The projections of x, convolved if this layer does that; and the convolution's state."""
        names, after = self.formulation.projections, None
        parts = [self.get_submodule(f"{name}_proj")(x) for name in names]
        if self.convolution is not None:
            y, after = self.convolution(
                torch.cat(parts, dim=-1), past, key_mask=key_mask, cu_seqlens=cu_seqlens
            )
            parts = y.chunk(len(names), dim=-1)
        return dict(zip(names, map(self.split, parts), strict=True)), after

    def _mean(
        self,
        x: Tensor,
        past: Recurrent | None,
        key_mask: Tensor | None,
        cu_seqlens: Tensor | None,
        positions: Tensor | None,
    ) -> "Mean":
        """The kernel over these tokens, of a focus, what to average, and a state."""
        given: dict[str, Any] = {
            "window": self.window,
            "key_mask": key_mask,
            "cu_seqlens": cu_seqlens,
        }
        if self.form == "bidirectional":
            return lambda focus, v, state=None: (surrounding_attention(focus, v, **given), None)
        mean: Mean = partial(additive_attention, **given)
        if not self.alibi:
            return mean
        if positions is None:
            positions = token_positions(x, past, key_mask, cu_seqlens)
        # To lower what is behind is to raise what comes: the same differences, one focus a token.
        slopes = x.new_tensor(distance_slopes(self.n_head), dtype=torch.float32)
        lift = slopes[:, None] * positions[:, None]
        return lambda focus, v, state=None: mean(focus + lift, v, state)

    def vector(self, name: str) -> Float[Tensor, "1 h 1 w"]:
        """A learned score vector for each head."""
        vector: Tensor = getattr(self, name)  # Under `functional_call` any tensor.
        return vector[None, :, None]

    def norm(self, x: Float[Tensor, "*axes w"]) -> Float[Tensor, "*axes w"]:
        """Mean 0 and variance 1 over the width of a head; x itself in a layer without norms.

        The variance is the unbiased one, so norm(x) . norm(x) = w - 1.
        """
        x = x.to(accumulator(x))
        if self.rescale is None:
            return x
        x = x - x.mean(dim=-1, keepdim=True)
        variance = x.square().sum(dim=-1, keepdim=True) / (self.head_width - 1)
        return x * (variance + NORM_EPS).rsqrt()

    def match(
        self, x: Float[Tensor, "*axes w"], y: Float[Tensor, "*#axes w"]
    ) -> Float[Tensor, "*axes"]:
        """tau x . y."""
        return self.tau * (x * y).sum(dim=-1)


Attended = tuple[Tensor, Recurrent | None, Focus]
Heads = Mapping[str, Tensor]
"""The projections of x, `[b, h, t, w]`, by their first letters."""
Mean = Callable[..., tuple[Tensor, Any]]


def additive(layer: LeapAttention, x: Tensor, heads: Heads, past: Any, mean: Mean) -> Attended:
    """The README's equations 1 to 15, on projected tokens so that each head has its own view."""
    v = heads["v"]
    logits = layer.match(v, layer.vector("u"))
    y, after = mean(logits, v, past)
    return y, after, Focus(logits, v)


def leap_0_1(layer: LeapAttention, x: Tensor, heads: Heads, past: Any, mean: Mean) -> Attended:
    """Version 0.1.1: a token's own query and key make its focus, and a gate every feature."""
    q, k, v = (heads[name] for name in "qkv")
    logits = layer.match(layer.norm(q), layer.norm(k))
    y, after = mean(logits, v, past)
    gate = heads["g"].sigmoid()
    return gate * y, after, Focus(logits, v, gate)


def leap_1_0(
    layer: LeapAttention,
    x: Tensor,
    heads: Heads,
    past: Any,
    mean: Mean,
    log_weight: Callable[[Tensor], Tensor] = lambda logits: logits,
) -> Attended:
    """Version 1.0.1: the mean key, held against the query, says how much of the mean value."""
    q, f, k, v = (layer.norm(heads[name]) for name in "qfkv")
    logits = log_weight(layer.match(f, k))
    means, after = mean(logits, torch.cat([k, v], dim=-1).to(x.dtype), past)
    mean_k, mean_v = means.chunk(2, dim=-1)
    gate = layer.match(q, mean_k).sigmoid()
    return gate.unsqueeze(-1) * mean_v, after, Focus(logits, v, gate)


def log_elu_plus_one(x: Float[Tensor, "*axes"]) -> Float[Tensor, "*axes"]:
    """log(elu(x) + 1): x below 0, log(1 + x) above."""
    return x.clamp(max=0) + F.relu(x).log1p()


def fastformer(layer: LeapAttention, x: Tensor, heads: Heads, past: Any, mean: Mean) -> Attended:
    """Causal Fastformer: keys meet the mean query so far, values the mean of what comes of it."""
    query, key = (None, None) if past is None else (past.query, past.key)
    q, k, v = (heads[name] for name in "qkv")
    mean_q, query, query_logits = mean_by_vector(layer, q, "q_focus", query, mean)
    met = F.dropout(mean_q, layer.dropout, layer.training) * k
    mean_k, key, logits = mean_by_vector(layer, met, "k_focus", key, mean)
    after = None if query is None else FastformerState.of(query, key)
    return mean_k * v, after, Focus(logits, layer.norm(met), v, query_logits)


def mean_by_vector(
    layer: LeapAttention, x: Tensor, vector: str, past: Any, mean: Mean
) -> tuple[Tensor, Any, Tensor]:
    """A(x, u): the mean of norm(x), its focus the match with a learned vector; state and focus."""
    x = layer.norm(x)
    logits = layer.match(x, layer.norm(layer.vector(vector)))
    y, after = mean(logits, x, past)
    return y, after, logits


@dataclass(frozen=True)
class Formulation:
    """One way to make a layer of the kernel."""

    attend: Callable[[LeapAttention, Tensor, Heads, Any, Mean], Attended]
    projections: str
    """First letters of the projections of x that it needs."""
    vectors: tuple[str, ...] = ()
    """Learned score vectors that it needs."""
    rescale: float | None = None
    """c, if it has norms."""
    nests: bool = False
    """Whether it averages twice, and so keeps two states."""
    mixes: bool = False
    """Whether heads are mixed at the end."""

    def state_kind(self, window: int | None) -> type[Recurrent]:
        """What a layer of this formulation keeps of the past."""
        if self.nests:
            return FastformerState
        return FocusState if window is None else WindowState


leap_elu = partial(leap_1_0, log_weight=log_elu_plus_one)

FORMULATIONS: dict[str, Formulation] = {
    "additive": Formulation(additive, "v", vectors=("u",)),
    "leap-0.1": Formulation(leap_0_1, "qkvg", rescale=5.0),
    "leap-1.0": Formulation(leap_1_0, "qfkv", rescale=10.0),
    "leap-elu": Formulation(leap_elu, "qfkv"),
    "leap-mixed": Formulation(leap_elu, "qfkv", mixes=True),
    "fastformer": Formulation(
        fastformer, "qkv", vectors=("q_focus", "k_focus"), rescale=5.0, nests=True
    ),
}
