"""LeaPformer: linear attention whose scores are re-weighted by learned proportions.

    o_i = sum_j a_ij v_j  /  sum_j a_ij
    a_ij = phi(q_i) . phi(k_j) cos(pi/2 (p_i - s_j))

phi is ReLU in the paper, p and s in (0, 1) are read off phi(q_i) and phi(k_j) by two small nets
(see `leap.layers.proportion`). The same layer is

    cosFormer          proportion="fixed": p_i = (i + 1) / length
    linear attention   proportion="none": no re-weighting

and has the two next steps that the authors name: `normaliser="norm"`, where a norm takes the place
of the denominator, and `gate`, by which a causal layer learns to forget.

Dropout falls on attended values: scores, on which softmax attention drops, are never formed.

Axes: b batch, h heads, t tokens, s source tokens, w width of a head, v width of its values.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from leap.errors import ConfigError, InputError
from leap.layers.attention import (
    DotProductAttention,
    Form,
    check_alibi,
    distance_slopes,
    one_hot_values,
    one_of,
)
from leap.layers.proportion import FixedProportion, LearnedProportion
from leap.ops.features import FeatureMap, cosine, feature_map, proportional, rotary
from leap.ops.linear import (
    LinearState,
    causal_linear_attention,
    causal_proportional_attention,
    read_and_attend,
)
from leap.ops.linear.parts import unit_scale
from leap.ops.staircase import staircase_linear_attention
from leap.ops.state import accumulator

Proportion = Literal["learned", "fixed", "none"]
Normaliser = Literal["denominator", "norm"]
Gate = Literal["head", "channel"]


class LeapformerAttention(DotProductAttention):
    """LeaPformer's attention, and with other proportions cosFormer's and plain linear attention.

    Args:
        hidden_size, n_head: width of all heads together, and their number.
        form: "causal", "bidirectional" or "cross", see `DotProductAttention`.
        feature: phi, by its name in `leap.ops.features.FEATURES`, or as `feature_map` makes it.
            Where phi is signed, magnitudes |phi(q)| . |phi(k)| make the denominator, so that
            attended values stay within the values; LRA's `cubic` divides by scores that cancel.
        proportion: "learned", "fixed" (cosFormer) or "none" (linear attention).
        proportion_hidden, proportion_step_down, proportion_bins: see `LearnedProportion`.
        proportion_per_head: a net for each head, in place of one that all heads share.
        proportion_input: whether the nets see "features", as in the paper, or "projections",
            which phi has not touched.
        length: the longest sequence, for fixed proportions; None only in the bidirectional form,
            for the length of each row.
        rotary: turn features by their position. The denominator is that of unturned ones, which
            stays positive (RoFormer, equation 19).
        alibi: in the causal form, fade scores with distance, each head at a rate of its own: what
            ALiBi's biases are to a softmax.
        normaliser: "denominator", or "norm": a root-mean-square norm of each head.
        gate: "head" or "channel", for the causal form: multiply the past by a learned factor, of
            each head or of each feature, before a token is added (gated linear attention).
        scale_query: divide queries by sqrt(w) before phi, as the authors' translation models do.
        value_width: v, by default w.
        bias: of the projections.
        dropout: share of the attended values to drop.
        eps: floor of the denominator. The authors' language models have 0.1, which draws the
            first tokens towards 0.
    """

    state_kind = LinearState

    def __init__(
        self,
        hidden_size: int,
        n_head: int,
        *,
        form: Form = "causal",
        feature: str | FeatureMap = "relu",
        proportion: Proportion = "learned",
        proportion_hidden: int = 16,
        proportion_step_down: int | None = None,
        proportion_per_head: bool = False,
        proportion_bins: int | None = None,
        proportion_input: Literal["features", "projections"] = "features",
        length: int | None = None,
        rotary: bool = False,
        alibi: bool = False,
        normaliser: Normaliser = "denominator",
        gate: Gate | None = None,
        scale_query: bool = False,
        value_width: int | None = None,
        bias: bool = True,
        dropout: float = 0.0,
        eps: float = 1e-6,
    ) -> None:
        super().__init__(
            hidden_size,
            n_head,
            form=form,
            rotary=rotary,
            value_width=value_width,
            bias=bias,
            dropout=dropout,
        )
        self.feature = feature_map(feature) if isinstance(feature, str) else feature
        self.proportion = one_of("proportion", proportion, get_args(Proportion))
        self.proportion_input = one_of(
            "proportion_input", proportion_input, ("features", "projections")
        )
        self.normaliser = one_of("normaliser", normaliser, get_args(Normaliser))
        self.scale_query = scale_query
        self.eps = eps

        self.q_proportion: LearnedProportion | FixedProportion | None = None
        self.k_proportion: LearnedProportion | FixedProportion | None = None
        if proportion == "learned":
            self.q_proportion, self.k_proportion = (
                LearnedProportion(
                    self.head_width,
                    hidden=proportion_hidden,
                    step_down=proportion_step_down,
                    n_head=n_head if proportion_per_head else None,
                    bins=proportion_bins,
                )
                for _ in "qk"
            )
        elif proportion == "fixed":
            if length is None and form != "bidirectional":
                raise ConfigError(
                    f"proportion='fixed' in form={form!r} cannot wait for the end of a sequence to "
                    "learn its length; give length, the longest there will be"
                )
            self.q_proportion = self.k_proportion = FixedProportion(length)
            self.looks_at_positions = True
        self.knows_only_whole_sequences = proportion == "fixed" and length is None

        self.norm = nn.RMSNorm(self.value_width, eps=eps) if normaliser == "norm" else None
        # Scores that may be negative cannot be summed into a denominator. Then it is attended to as
        # further heads are: magnitudes of the features, and values of 1.
        self.has_own_denominator = self.norm is None and (rotary or self.feature.signed)
        self.normalise = self.norm is None and not self.has_own_denominator
        check_alibi(alibi, form)
        # The denominator's heads, if it has its own, fade as those they belong to.
        times = 2 if self.has_own_denominator else 1
        self.fade = tuple(-slope for slope in distance_slopes(n_head)) * times if alibi else None
        self.gate: ForgetGate | None = None
        if gate is not None:
            one_of("gate", gate, get_args(Gate))
            if form != "causal":
                raise ConfigError(
                    f"gate={gate!r} forgets what came before, which form={form!r} does not know; "
                    "use it with form='causal'"
                )
            self.gate = ForgetGate(
                hidden_size, n_head, self.head_width if gate == "channel" else None
            )

    def attend_causally(
        self,
        x: Float[Tensor, "b t d"],
        past: LinearState | None,
        *,
        key_mask: Bool[Tensor, "b t"] | None,
        positions: Int[Tensor, "b t"] | None,
        cu_seqlens: Int[Tensor, " n"] | None,
    ) -> tuple[Float[Tensor, "b h t v"], LinearState]:
        """Read x, each token attending to itself and the past."""
        v = self.split(self.v_proj(x))
        o, after = self._take_causally(
            x, v, past, key_mask=key_mask, positions=positions, cu_seqlens=cu_seqlens
        )
        return self._finished(o, x), after

    def attend_to(
        self,
        x: Float[Tensor, "b t d"],
        source: Float[Tensor, "b s d"] | None,
        past: LinearState | None,
        *,
        visible: Int[Tensor, " t"] | Int[Tensor, "b t"] | None,
        key_mask: Bool[Tensor, "b s"] | None,
        positions: Int[Tensor, "b t"] | None,
        source_positions: Int[Tensor, "b s"] | None,
    ) -> tuple[Float[Tensor, "b h t v"], LinearState]:
        """Read the source, then let each token of x attend to everything read."""
        if self.knows_only_whole_sequences and (visible is not None or past is not None):
            raise InputError(
                "proportions fixed by each row's length need all of it at once; "
                "give the layer length, the longest there will be"
            )
        q, p = self._queries(x, positions)
        if source is None:
            assert past is not None  # or there was nothing to attend to
            return self._finished(self._attend(_widened(q, p), past), x), past
        k, s = self._keys(source, source_positions)
        v = self._values(self.split(self.v_proj(source)))
        if past is None and visible is None:
            weights = None if p is None or s is None else (cosine(p), cosine(s))
            o, after = read_and_attend(
                q,
                k,
                v,
                reweighting=weights,
                key_mask=key_mask,
                normalise=self.normalise,
                eps=self.eps,
            )
            return self._finished(self._divided(o), x), after
        q, k = _widened(q, p), _widened(k, s)
        after = _read(past, k, v, key_mask)
        if visible is None:
            return self._finished(self._attend(q, after), x), after
        o = staircase_linear_attention(
            q, k, v, visible, key_mask=key_mask, normalise=self.normalise, eps=self.eps
        )
        return self._finished(self._divided(o), x), after

    def weigh(
        self,
        x: Float[Tensor, "b t d"],
        source: Float[Tensor, "b s d"],
        *,
        key_mask: Bool[Tensor, "b s"] | None,
        positions: Int[Tensor, "b t"] | None,
        source_positions: Int[Tensor, "b s"] | None,
    ) -> Float[Tensor, "b h t s"]:
        """The weights of the source's tokens; in the causal form the source is x.

        With normaliser="norm", which takes any scale away, their magnitudes sum to 1.
        """
        v = one_hot_values(source, self.n_head)
        if self.form == "causal":
            o, _ = self._take_causally(x, v, None, key_mask=key_mask, positions=positions)
        else:
            q = _widened(*self._queries(x, positions))
            k = _widened(*self._keys(source, source_positions))
            o = self._attend(q, _read(None, k, self._values(v), key_mask))
        if self.norm is not None:
            o = o / o.abs().sum(dim=-1, keepdim=True).clamp_min(torch.finfo(o.dtype).tiny)
        return o

    def shares(
        self,
        x: Float[Tensor, "b t d"],
        state: LinearState,
        earlier: Sequence[LinearState],
        *,
        positions: Int[Tensor, "b t"] | None = None,
    ) -> Float[Tensor, "b h t n"]:
        """How much of its weights each token of x has on what was read before: q.k_n / q.k."""
        q = _widened(*self._queries(x, positions if self.looks_at_positions else None))
        q = q[:, -self.n_head :].to(state.k.dtype)
        k, *before = (each.k[:, -self.n_head :] for each in (state, *earlier))
        total = (q @ k.unsqueeze(-1)).clamp_min(torch.finfo(k.dtype).tiny)
        return q @ torch.stack(before, dim=-1) / total

    def proportions(
        self,
        x: Float[Tensor, "b t d"],
        *,
        source: Float[Tensor, "b s d"] | None = None,
        key_mask: Bool[Tensor, "b _"] | None = None,
        positions: Int[Tensor, "b t"] | None = None,
    ) -> tuple[Float[Tensor, "b h t"], Float[Tensor, "b h s"]]:
        """Where the queries stand, p, and where the keys do, s: those of x or of the source."""
        read = source if self.form == "cross" else x
        if self.q_proportion is None or read is None:
            raise ConfigError(
                "no proportions to show: "
                + ("this layer has proportion='none'" if read is not None else "give the source")
            )
        self.check_tokens(x)
        self.check_tokens(read, key_mask)
        at, read_at = self._positions(x, source, None, key_mask, positions, None)
        (_, p), (_, s) = self._queries(x, at), self._keys(read, read_at)
        assert p is not None and s is not None
        return p[:, : self.n_head], s[:, : self.n_head]

    def _queries(self, x: Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Features of queries, and their proportions."""
        q = self.split(self.q_proj(x))
        if self.scale_query:
            q = q / math.sqrt(self.head_width)
        return self._mapped(q, self.feature.query, self.q_proportion, positions, unscaled=True)

    def _keys(self, x: Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Features of keys, and their proportions."""
        k = self.split(self.k_proj(x))
        return self._mapped(k, self.feature.key, self.k_proportion, positions)

    def _mapped(
        self,
        x: Tensor,
        phi: Callable[[Tensor], Tensor],
        proportion: nn.Module | None,
        positions: Tensor | None,
        *,
        unscaled: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        features = phi(x)
        p = None
        if proportion is not None:
            seen = features if self.proportion_input == "features" else x
            p = self._for_all_heads(proportion(seen, positions))
        if unscaled and not self.normalise:
            # A query's scale will cancel, but three large factors would overflow before it does.
            features = features * unit_scale(features.to(accumulator(features)))
        turned = rotary(features, positions) if self.rotary else features
        if self.has_own_denominator:
            return torch.cat([turned, features.abs()], dim=1), p
        return turned, p

    def _take_causally(
        self,
        x: Tensor,
        v: Tensor,
        past: LinearState | None,
        *,
        key_mask: Tensor | None,
        positions: Tensor | None,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, LinearState]:
        """What each token of x takes of the values so far."""
        (q, p), (k, s) = self._queries(x, positions), self._keys(x, positions)
        attend = (
            causal_linear_attention
            if p is None or s is None
            else partial(causal_proportional_attention, p=p, s=s)
        )
        o, after = attend(
            q,
            k,
            self._values(v),
            state=past,
            key_mask=key_mask,
            cu_seqlens=cu_seqlens,
            log_gate=None if self.gate is None else self._for_all_heads(self.gate(x)),
            fade=self.fade,
            normalise=self.normalise,
            eps=self.eps,
        )
        return self._divided(o), after

    def _values(self, v: Tensor) -> Tensor:
        """Values as the op takes them."""
        if self.has_own_denominator:
            v = torch.cat([v, torch.ones_like(v)], dim=1)
        # A sum that has not been divided yet may be more than half precision can hold.
        return v if self.normalise else v.to(accumulator(v))

    def _for_all_heads(self, x: Tensor) -> Tensor:
        """What belongs to heads, for those of the denominator too."""
        return torch.cat([x, x], dim=1) if self.has_own_denominator else x

    def _attend(self, q: Tensor, read: LinearState) -> Tensor:
        o = read.attend(q.to(read.kv.dtype), normalise=self.normalise, eps=self.eps)
        return self._divided(o)

    def _divided(self, o: Tensor) -> Tensor:
        """Attended values, by the denominator if the op has not divided by it."""
        if not self.has_own_denominator:
            return o
        weighted, denominator = o.chunk(2, dim=1)
        return weighted / denominator.clamp_min(self.eps)

    def _finished(self, o: Tensor, x: Tensor) -> Tensor:
        """Attended values as they leave the heads."""
        if self.norm is not None:
            o = F.rms_norm(o, o.shape[-1:], eps=self.eps) * self.norm.weight
        return F.dropout(o.to(x.dtype), self.dropout, self.training)


class ForgetGate(nn.Module):
    """How much of the past to keep at each token, as a logarithm.

        log g = logsigmoid(4 + W x + b) / 16

    By the 4 and the 16 a fresh layer keeps 0.999 of its past at each token, and so remembers for
    hundreds. Gates of channels come through a bottleneck, as W would else be another projection.

    Args:
        hidden_size: width of x.
        n_head: heads to gate.
        n_channel: channels of each head, for a gate to each; None for one a head.
    """

    def __init__(self, hidden_size: int, n_head: int, n_channel: int | None) -> None:
        super().__init__()
        self.n_head = n_head
        self.of_channels = n_channel is not None
        self.net: nn.Module = (
            nn.Linear(hidden_size, n_head)
            if n_channel is None
            else nn.Sequential(
                nn.Linear(hidden_size, 16, bias=False), nn.Linear(16, n_head * n_channel)
            )
        )

    def forward(
        self, x: Float[Tensor, "b t d"]
    ) -> Float[Tensor, "b h t"] | Float[Tensor, "b h t c"]:
        """The log of the gates, one a head or one a channel of each."""
        log_gate = F.logsigmoid(4 + self.net(x)) / 16
        if self.of_channels:
            log_gate = log_gate.unflatten(-1, (self.n_head, -1))
        return log_gate.transpose(1, 2)


def _widened(features: Tensor, p: Tensor | None) -> Tensor:
    return features if p is None else proportional(features, p)


def _read(past: LinearState | None, k: Tensor, v: Tensor, key_mask: Tensor | None) -> LinearState:
    """The state after reading keys and values, recorded if the past is."""
    (b, h, _, f), width = k.shape, v.shape[-1]
    read = LinearState.empty(b, h, f, width, dtype=accumulator(v), device=v.device)
    read = read.advance(k=k, v=v, key_mask=key_mask)
    if past is None:
        return read
    if key_mask is None:
        key_mask = k.new_ones(k.shape[0], k.shape[2], dtype=torch.bool)
    return past.merge(read).after(past, k=k, v=v, key_mask=key_mask.unsqueeze(1))
