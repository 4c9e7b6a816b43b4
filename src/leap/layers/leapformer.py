"""LeaPformer: linear attention whose scores are re-weighted by where tokens stand.

    o_i = sum_j a_ij v_j  /  sum_j a_ij            a_ij = phi(q_i) . phi(k_j) w_ij

phi is ReLU in the paper (Agostinelli et al. 2024, arXiv 2405.13046). The re-weighting w is one of

    travelled   w_ij = (1 + cos(omega_h (P_i - P_j))) / 2       P: the sum of learned steps so far
    learned     w_ij = cos(pi/2 (p_i - s_j))                    the paper's: p and s read off
                                                                phi(q_i) and phi(k_j) by small nets
    fixed       the same with p_i = s_i = (i + 1) / length      cosFormer (Qin et al. 2022,
                                                                arXiv 2202.08791)
    none        w_ij = 1                                        linear attention

See `leap.layers.travel` and `leap.layers.proportion`. Travelled places serve every form:

    causal          the distance travelled between two tokens, of one or several clocks per head
    bidirectional   the same; or, with places="divided", the cosine of places divided by the last
                    one, which with steps of one length is cosFormer
    cross           source and target travel by steps of their own, and a token of the target looks
                    where the source has come to: a soft alignment that needs no length

The authors' next steps are here too: `normaliser="norm"`, where a norm takes the place of the
denominator, and `gate`, by which a layer learns to forget. In the bidirectional form gates and
alibi fade scores in both directions.

Dropout falls on attended values: scores, on which softmax attention drops, are never formed.

Axes: b batch, h heads, t tokens, s source tokens, w width of a head, v width of its values,
r rank of the re-weighting, m clocks.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from leap.errors import ConfigError, InputError
from leap.layers.attention import (
    Call,
    DotProductAttention,
    Form,
    Hidden,
    Rotary,
    Values,
    check_alibi,
    distance_slopes,
    one_of,
    placed,
    rms_normed,
    wrapped,
)
from leap.layers.gate import ForgetGate, Gate, check_gate
from leap.layers.proportion import FixedProportion, LearnedProportion
from leap.layers.travel import Steps
from leap.ops.features import FeatureMap, cosine, feature_map, widen
from leap.ops.linear import (
    LinearState,
    causal_linear_attention,
    read_and_attend,
    two_way_linear_attention,
)
from leap.ops.linear.parts import unit_scale
from leap.ops.staircase import staircase_linear_attention
from leap.ops.state import Recurrent, State, accumulator, count_tokens, mask_tokens
from leap.ops.travel import ClockState, clock, travelled, walked

Proportion = Literal["travelled", "learned", "fixed", "none"]
Places = Literal["undivided", "divided"]
Normaliser = Literal["denominator", "norm"]


class LeapformerAttention(DotProductAttention):
    """LeaPformer's attention, and with other proportions cosFormer's and plain linear attention.

    Args:
        hidden_size, n_head: width of all heads together, and their number.
        form: "causal", "bidirectional" or "cross", see `DotProductAttention`.
        feature: phi, by its name in `leap.ops.features.FEATURES`, or as `feature_map` makes it.
            Where phi is signed, magnitudes |phi(q)| . |phi(k)| make the denominator, so that
            attended values stay within the values; LRA's `cubic` divides by scores that cancel.
        proportion: "travelled", "learned" (the paper's), "fixed" (cosFormer) or "none" (linear
            attention).
        proportion_hidden: hidden units of the nets; by default 16 for learned proportions, and a
            single layer for steps.
        proportion_per_head: a net for each head, in place of one that all heads share; by default
            for steps, not for learned proportions.
        proportion_step_down, proportion_bins: of learned proportions, see `LearnedProportion`.
        proportion_input: whether nets of learned proportions see "features", as in the paper, or
            "projections", which phi has not touched.
        constant_steps: let every token step as far as any other, so that only clocks learn.
        clocks: frequencies of each head, for travelled places.
        places: of a bidirectional layer that travels: "undivided", or "divided" by the last one,
            which needs whole sequences.
        length: the longest sequence, for fixed proportions; None only in the bidirectional form,
            for the length of each row.
        rotary: turn features by their position, or, if "selective", by angles that tokens choose.
            The denominator is that of unturned ones, which stays positive (RoFormer, equation 19).
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
        convolution: taps of a convolution over projections, in the causal form; usually 4.
        output_gate: multiply what comes out by a learned gate, see `DotProductAttention`.
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
        proportion_hidden: int | None = None,
        proportion_step_down: int | None = None,
        proportion_per_head: bool | None = None,
        constant_steps: bool = False,
        clocks: int = 1,
        places: Places = "undivided",
        proportion_bins: int | None = None,
        proportion_input: Literal["features", "projections"] = "features",
        length: int | None = None,
        rotary: Rotary = False,
        alibi: bool = False,
        normaliser: Normaliser = "denominator",
        gate: Gate | None = None,
        scale_query: bool = False,
        value_width: int | None = None,
        bias: bool = True,
        dropout: float = 0.0,
        eps: float = 1e-6,
        convolution: int | None = None,
        output_gate: bool = False,
    ) -> None:
        super().__init__(
            hidden_size,
            n_head,
            form=form,
            rotary=rotary,
            value_width=value_width,
            bias=bias,
            dropout=dropout,
            convolution=convolution,
            output_gate=output_gate,
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
                    hidden=16 if proportion_hidden is None else proportion_hidden,
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
            if rotary == "selective":
                raise ConfigError(
                    "proportion='fixed' stands by positions, and rotary='selective' by turns; "
                    "choose one of them"
                )
            self.q_proportion = self.k_proportion = FixedProportion(length)
            self.looks_at_positions = True
        self.places = one_of("places", places, get_args(Places))
        if places == "divided" and (form != "bidirectional" or proportion != "travelled"):
            raise ConfigError(
                f"places='divided' are for proportion='travelled' in form='bidirectional', where "
                f"the last place is known; this is proportion={proportion!r} in form={form!r}"
            )
        self.steps: Steps | None = None
        self.query_steps: Steps | None = None
        if proportion == "travelled":
            travel: dict[str, Any] = {
                "hidden": proportion_hidden,
                "per_head": proportion_per_head is not False,
                "learned": not constant_steps,
            }
            self.steps = Steps(hidden_size, n_head, clocks=clocks, **travel)
            if form == "cross":
                self.query_steps = Steps(hidden_size, n_head, clocks=None, **travel)
                self.walks = True

        self.norm = nn.RMSNorm(self.value_width, eps=eps) if normaliser == "norm" else None
        # Scores that may be negative cannot be summed into a denominator. Then it is attended to as
        # further heads are: magnitudes of the features, and values of 1.
        self.has_own_denominator = self.norm is None and (rotary or self.feature.signed)
        self.normalise = self.norm is None and not self.has_own_denominator
        # The feature map may be left to the op where nothing else looks at features.
        nets = self.q_proportion is not None or self.k_proportion is not None
        self.fused_feature = self.feature.name if self.normalise and not nets else None
        if form == "cross":
            check_alibi(alibi, form)
        # The denominator's heads, if it has its own, fade as those they belong to.
        times = 2 if self.has_own_denominator else 1
        self.fade = tuple(-slope for slope in distance_slopes(n_head)) * times if alibi else None
        self.gate: ForgetGate | None = None
        if gate is not None:
            one_of("gate", gate, get_args(Gate))
            if form != "bidirectional" or gate != "head":
                check_gate(gate, form)
            self.gate = ForgetGate(
                hidden_size, n_head, self.head_width if gate == "channel" else None
            )
        self.fades_both_ways = form == "bidirectional" and (alibi or gate is not None)
        self.knows_only_whole_sequences = (
            (proportion == "fixed" and length is None)
            or places == "divided"
            or self.fades_both_ways
        )

    def forward(
        self, x: Hidden, state: State | None = None, **given: Any
    ) -> tuple[Hidden, Recurrent]:
        """Attend, given what `DotProductAttention.enter` takes."""
        call = self.enter(x, state, **given)
        attend = self.attend_causally if self.form == "causal" else self.attend_elsewhere
        o, after = attend(call)
        return self.leave(o, x), wrapped(call, after)

    def attend_causally(self, call: Call) -> tuple[Values, LinearState]:
        """Read x, each token attending to itself and the past."""
        assert call.k is not None and call.v is not None
        q, k, feature, weights = self._scaled(call.q), call.k, self.fused_feature, None
        if feature is None:
            at = call.positions
            (q, x_weights), (k, y_weights) = self._queries(call.q, at), self._keys(k, at)
            weights = _both(x_weights, y_weights)
        gate = None if self.gate is None else self._for_all_heads(self.gate(call.x))
        turn = None if self.steps is None else self._for_all_heads(self.steps(call.x))
        o, after = causal_linear_attention(
            q,
            k,
            self._values(call.v),
            call.past,
            reweighting=weights,
            turn=turn,
            feature=feature,
            key_mask=call.key_mask,
            cu_seqlens=call.cu_seqlens,
            log_gate=gate,
            fade=self.fade,
            normalise=self.normalise,
            eps=self.eps,
        )
        return self._divided(o), after

    def attend_to(self, call: Call) -> tuple[Values, LinearState]:
        """Read the source, then let each token of x attend to everything read."""
        past = call.past
        if self.knows_only_whole_sequences and (call.visible is not None or past is not None):
            raise InputError(
                "this layer needs whole sequences: shares of a row's length or of its last place, "
                "and fading in both directions, cannot be known while it is read; give the layer "
                "length, places='undivided' and no gate"
            )
        if call.source is None:  # Then there is a past, or nothing to attend to.
            return self._attend(widen(*self._asked(call)), past), past
        return self._take(call)

    def walk(
        self,
        x: Float[Tensor, "b t d"],
        past: ClockState | None = None,
        key_mask: Bool[Tensor, "b t"] | None = None,
    ) -> tuple[Float[Tensor, "b h t m"], ClockState]:
        """Where queries of a cross form that travels come to, from where those before them were.

        Args:
            x: tokens that are going to attend.
            past: what an earlier call returned; None at the start.
            key_mask: true at real tokens of x.
        """
        if self.steps is None or self.query_steps is None:
            raise ConfigError("only form='cross' with proportion='travelled' walks")
        turn = self._for_all_heads(self.steps.turns(self.query_steps.lengths(x)))
        return walked(turn, past, key_mask=key_mask)

    def weigh(self, call: Call) -> tuple[Values, Recurrent | None]:
        """What queries take of any values in place of those of the keys."""
        return self.attend_causally(call) if self.form == "causal" else (self._take(call)[0], None)

    def shares(
        self,
        x: Float[Tensor, "b t d"],
        state: LinearState,
        earlier: Sequence[LinearState],
        *,
        positions: Int[Tensor, "b t"] | None = None,
        angles: Float[Tensor, "b h t m"] | None = None,
    ) -> Float[Tensor, "b h t n"]:
        """How much of its weights each token of x has on what was read before: q.k_n / q.k."""
        at = positions if self.looks_at_positions else None
        call = Call(x, None, self.split(self.q_proj(x)), None, None, state, positions=at)
        q = widen(*self._asked(call._replace(angles=angles)))
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
        """Where the queries stand, p, and where the keys do, s: those of x or of the source.

        Places that are travelled are sums of steps; divided by the last one where the layer does.
        """
        read = source if self.form == "cross" else x
        if self.proportion == "none" or read is None:
            raise ConfigError(
                "no proportions to show: "
                + ("this layer has proportion='none'" if read is not None else "give the source")
            )
        self.check_tokens(x)
        self.check_tokens(read, key_mask)
        if self.steps is not None:
            places = self._places(self.steps, read, key_mask)
            return places if self.query_steps is None else self._places(self.query_steps, x), places
        at, read_at = self._positions(x, source, None, key_mask, positions, None)
        q, k = self.matched(x, read, key_mask)
        q = self._scaled(q)
        p = self._proportion(self.q_proportion, q, self.feature.query(q), at)
        s = self._proportion(self.k_proportion, k, self.feature.key(k), read_at)
        assert p is not None and s is not None
        return p, s

    def _places(self, steps: Steps, x: Tensor, key_mask: Tensor | None = None) -> Tensor:
        if self.places == "divided":
            return steps.shares(x, key_mask)
        return mask_tokens(steps.lengths(x).double(), key_mask).cumsum(2)

    def _take(self, call: Call) -> tuple[Tensor, LinearState]:
        """What each token of x takes of the values of the source, read on top of the past."""
        x, source, past, key_mask = call.x, call.source, call.past, call.key_mask
        assert source is not None and call.k is not None and call.v is not None
        k, y_weights = self._keys(call.k, call.source_positions)
        turn = last = None
        if self.places == "divided":
            assert self.steps is not None
            y_weights = self._cosine(self.steps.shares(source, key_mask))
        elif self.steps is not None:
            turn = self._for_all_heads(self.steps(source))
            at, last = travelled(turn, None if past is None else past.angle, key_mask)
            y_weights = clock(at, accumulator(call.q))
        if self.form == "bidirectional" and self.steps is not None:
            q, x_weights = self._queries(call.q, call.positions)[0], y_weights
        else:
            q, x_weights = self._asked(call)
        weights, v = _both(x_weights, y_weights), self._values(call.v)
        options: dict[str, Any] = {"normalise": self.normalise, "eps": self.eps}
        if self.fades_both_ways:
            gate = None if self.gate is None else self._for_all_heads(self.gate(x))
            fading: dict[str, Any] = {"log_gate": gate, "fade": self.fade, "key_mask": key_mask}
            o = two_way_linear_attention(q, k, v, reweighting=weights, **fading, **options)
            # A state that nothing can be read on from keeps its length alone.
            empty = _read(None, k[:, :, :0], v[:, :, :0], None)
            return self._divided(o), replace(empty, length=empty.length + count_tokens(k, key_mask))
        if past is None and call.visible is None:
            o, after = read_and_attend(q, k, v, reweighting=weights, key_mask=key_mask, **options)
            return self._divided(o), replace(after, angle=last)
        after = _read(past, widen(k, y_weights), v, key_mask, turn, last)
        if call.visible is None:
            return self._attend(widen(q, x_weights), after), after
        o = staircase_linear_attention(
            q, k, v, call.visible, reweighting=weights, key_mask=key_mask, **options
        )
        return self._divided(o), after

    def _asked(self, call: Call) -> tuple[Tensor, Tensor | None]:
        """Features and re-weighting of queries that attend to a source."""
        q, weights = self._queries(call.q, call.positions)
        if self.steps is None:
            return q, weights
        angles = call.angles
        if angles is None:
            if call.past is not None and call.x.shape[1]:
                raise InputError(
                    "give angles, which layer.walk(x) tells: the state knows how far the source "
                    "has come, not the queries before x"
                )
            angles, _ = self.walk(call.x)
        return q, clock(angles, accumulator(q))

    def _queries(self, q: Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Features of queries, and the re-weighting by their proportions."""
        q = self._scaled(q)
        features = self.feature.query(q)
        p = self._proportion(self.q_proportion, q, features, positions)
        if not self.normalise:
            # A query's scale will cancel, but three large factors would overflow before it does.
            features = features * unit_scale(features.to(accumulator(features)))
        return self._turned(features, positions), self._cosine(p)

    def _keys(self, k: Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Features of keys, and the re-weighting by their proportions."""
        features = self.feature.key(k)
        s = self._proportion(self.k_proportion, k, features, positions)
        return self._turned(features, positions), self._cosine(s)

    def _scaled(self, q: Tensor) -> Tensor:
        return q / math.sqrt(self.head_width) if self.scale_query else q

    def _proportion(
        self,
        net: nn.Module | None,
        heads: Tensor,
        features: Tensor,
        positions: Tensor | None,
    ) -> Tensor | None:
        """Proportions of queries or keys, from their projected heads or features."""
        if net is None:
            return None
        at = positions if isinstance(net, FixedProportion) else None
        return net(features if self.proportion_input == "features" else heads, at)

    def _turned(self, features: Tensor, positions: Tensor | None) -> Tensor:
        """Features turned by position, if they are; and their magnitudes, for a denominator."""
        turned = placed(features, positions) if positions is not None and self.rotary else features
        if self.has_own_denominator:
            return torch.cat([turned, features.abs()], dim=1)
        return turned

    def _cosine(self, p: Tensor | None) -> Tensor | None:
        if p is None:
            return None
        return self._for_all_heads(cosine(p.to(accumulator(p))))

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
        o = read.attend(q.to(accumulator(q)), normalise=self.normalise, eps=self.eps)
        return self._divided(o)

    def _divided(self, o: Tensor) -> Tensor:
        """Attended values, by the denominator if the op has not divided by it."""
        if not self.has_own_denominator:
            return o
        weighted, denominator = o.chunk(2, dim=1)
        return weighted / denominator.clamp_min(self.eps)

    def finish(self, o: Values, x: Hidden, whole: Values | None = None) -> Values:
        """Attended values as they leave the heads."""
        if self.norm is not None:
            o = rms_normed(o, whole, self.eps) * self.norm.weight
        return F.dropout(o.to(x.dtype), self.dropout, self.training)


def _both(x: Tensor | None, y: Tensor | None) -> tuple[Tensor, Tensor] | None:
    return None if x is None or y is None else (x, y)


def _read(
    past: LinearState | None,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    turn: Tensor | None = None,
    angle: Tensor | None = None,
) -> LinearState:
    """The state after reading keys and values, recorded if the past is.

    Keys stand where they have come to already, so that the past's clocks do not turn them on.
    """
    (b, h, _, f), width = k.shape, v.shape[-1]
    read = LinearState.empty(b, h, f, width, device=v.device)
    read = read.advance(k=k, v=v, key_mask=key_mask)
    if past is None:
        return replace(read, angle=angle)
    if key_mask is None:
        key_mask = k.new_ones(k.shape[0], k.shape[2], dtype=torch.bool)
    tokens = {"k": k, "v": v, "key_mask": key_mask.unsqueeze(1)}
    if turn is not None:
        tokens["turn"] = turn
    return replace(past.merge(read), angle=angle).after(past, **tokens)
