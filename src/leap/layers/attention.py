"""What attention layers share: heads, positions, states, and the forms of dot-product attention.

Every layer is called in one way, whatever it keeps of the past:

    y, state = layer(x)                whole sequences [b, t, hidden_size], from the start
    y, state = layer(x, state)         some tokens more
    y, state = layer.step(x, state)    one token more, [b, hidden_size]

and the numbers are the same however a sequence is cut. Only the attention itself is in a layer:
norms, the residual and the feed-forward are the block's.

Axes: b batch, t tokens, s source tokens, d hidden size (all heads), h heads.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeVar, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from leap.errors import ConfigError, InputError
from leap.layers.convolution import ConvolvedState, short_convolution
from leap.layers.travel import Rotation, TurnedState
from leap.ops.checks import check_floating, check_key_mask, shape
from leap.ops.convolution import TapState
from leap.ops.features import rotary, turned
from leap.ops.packing import check_cu_seqlens, run_packed
from leap.ops.state import Recurrent, State, accumulator
from leap.ops.travel import ClockState, walked

Form = Literal["causal", "bidirectional", "cross"]
Rotary = bool | Literal["selective"]
Where = Int[Tensor, "b t"] | Float[Tensor, "b h t p"]
"""Where tokens stand: their positions, or how far each pair of channels has turned."""
Hidden = Float[Tensor, "b t d"]
Source = Float[Tensor, "b s d"]
Heads = Float[Tensor, "b h t w"]
Values = Float[Tensor, "b h t v"]
Keys = Float[Tensor, "b h s w"]
KeyValues = Float[Tensor, "b h s v"]
R = TypeVar("R", bound=Recurrent)


class Call(NamedTuple):
    """What one call of a layer attends with, checked; None for what is not given."""

    x: Hidden
    """Tokens that attend."""
    source: Source | None
    """Tokens that are read; in the causal and bidirectional forms x itself."""
    q: Heads
    k: Keys | None
    v: KeyValues | None
    """Heads of queries, and of the keys and values of what is read."""
    past: Any
    """The attention's own state of what was read before."""
    key_mask: Bool[Tensor, "b s"] | None = None
    """True at the real tokens of what is read."""
    positions: Where | None = None
    """Where the tokens stand that attend, for layers that look at it."""
    source_positions: Where | None = None
    """Where those stand that are read."""
    cu_seqlens: Int[Tensor, " n"] | None = None
    """Where packed sequences begin, and the last one ends."""
    visible: Int[Tensor, " t"] | Int[Tensor, "b t"] | None = None
    """In the forms that are not causal, how many of the tokens read each may see."""
    angles: Float[Tensor, "b h t m"] | None = None
    """In the cross form, how far the tokens that attend have travelled."""
    taps: TapState | None = None
    """State after this call of a convolution over the projections."""
    clock: ClockState | None = None
    """State after this call of a rotation by angles that tokens choose."""


class Attention(nn.Module, ABC):
    """Base of all attention layers."""

    def __init__(self, hidden_size: int, n_head: int) -> None:
        super().__init__()
        if n_head < 1 or hidden_size < 1:
            raise ConfigError(f"hidden_size={hidden_size} and n_head={n_head} must be 1 or more")
        if hidden_size % n_head:
            below = hidden_size // n_head * n_head
            nearest = f"{below} and {below + n_head}" if below else f"{n_head}"
            raise ConfigError(
                f"hidden_size={hidden_size} does not divide into n_head={n_head} heads; "
                f"the nearest sizes that do are {nearest}"
            )
        self.hidden_size = hidden_size
        self.n_head = n_head
        self.head_width = hidden_size // n_head

    @abstractmethod
    def forward(
        self,
        x: Float[Tensor, "b t d"],
        state: State | None = None,
        *,
        key_mask: Bool[Tensor, "b t"] | None = None,
        positions: Int[Tensor, "b t"] | None = None,
        cu_seqlens: Int[Tensor, " n"] | None = None,
    ) -> tuple[Float[Tensor, "b t d"], State | None]:
        """Attend.

        Args:
            x: tokens.
            state: what an earlier call returned, to go on from; None at the start.
            key_mask: true at real tokens. Pads may stand anywhere; what comes out at them is
                finite, and of no meaning.
            positions: of the tokens, for layers that look at them. By default real tokens are
                counted, from what the state has read.
            cu_seqlens: where sequences packed into one row begin, and where the last one ends.
                States have a row for each.

        Returns:
            The attended tokens, and the state after the last one.
        """

    def step(
        self, x: Float[Tensor, "b d"], state: State | None, **inputs: Any
    ) -> tuple[Float[Tensor, "b d"], State | None]:
        """Attend from one token for each row: `forward`, less the axis of tokens."""
        y, state = self(x.unsqueeze(1), state, **inputs)
        return y.squeeze(1), state

    def weights(
        self,
        x: Float[Tensor, "b t d"],
        *,
        key_mask: Bool[Tensor, "b t"] | None = None,
        positions: Int[Tensor, "b t"] | None = None,
    ) -> Float[Tensor, "b h t t"]:
        """How much of each token's values every token takes, in a call of `forward` with the same.

        Row i holds the weights w_ij of o_i = sum_j w_ij v_j, in O(t^2): for looking at a text, not
        for reading it. They sum to 1; to less where a query matches hardly any key and the floor
        of the normaliser holds. Where scores may be negative, so may weights, and their sum.
        """
        values = one_hot_values(x, self.n_head)
        return self.take(x, values, key_mask=key_mask, positions=positions)[0]

    def take(
        self,
        x: Float[Tensor, "b t d"],
        values: Float[Tensor, "b h _ p"],
        state: State | None = None,
        *,
        key_mask: Bool[Tensor, "b _"] | None = None,
        positions: Int[Tensor, "b t"] | None = None,
    ) -> tuple[Float[Tensor, "b h t p"], State | None]:
        """What tokens take of any values, by the weights they have in `forward`: w_ij values_j.

        In linear time where the layer is linear. A causal layer goes on from a state, as `forward`
        does; it is one of the values' width.

        Args:
            x: tokens.
            values: one for each token that is attended to.
            state: what an earlier call returned; None at the start.
            key_mask, positions: as of `forward`; so is the source, in the cross form.
        """
        raise ConfigError(f"{type(self).__name__} cannot tell how much of each token it takes")

    def taken(
        self, x: Float[Tensor, "b t d"], by: Float[Tensor, "b _ t"], **inputs: Any
    ) -> Float[Tensor, "b h _"]:
        """How much of each token those of x take together, each counted by a factor: by_i w_ij.

        In linear time where the layer is linear, as it is the backward pass of `take`: with 1 at
        one token and 0 elsewhere, this is that token's row of `weights`.

        Args:
            x: tokens.
            by: the factor of each.
            inputs: as of `take`.
        """
        read = x if inputs.get("source") is None else inputs["source"]
        with torch.enable_grad():
            ones = read.new_ones(len(x), self.n_head, read.shape[1], 1, dtype=accumulator(x))
            ones.requires_grad_()
            o, _ = self.take(x.detach(), ones, **inputs)
            by = by.to(o.dtype).expand(o.shape[:3]).unsqueeze(-1)
            (found,) = torch.autograd.grad(o, ones, by)
        return found.squeeze(-1)

    def contributions(
        self,
        x: Float[Tensor, "b t d"],
        at: int,
        *,
        key_mask: Bool[Tensor, "b _"] | None = None,
        positions: Int[Tensor, "b t"] | None = None,
    ) -> Float[Tensor, "b _ d"]:
        """What each token contributes to what `forward` gives at the token `at`.

        They add up to it, less a bias: weights, gates and the scale of norms are as they are there,
        and what is left is linear in the values.

        Args:
            x: tokens.
            at: which of them takes.
            key_mask, positions: as of `take`.
        """
        raise ConfigError(f"{type(self).__name__} cannot tell what each token contributes")

    def added(
        self,
        x: Float[Tensor, "b t d"],
        *,
        key_mask: Bool[Tensor, "b _"] | None = None,
        positions: Int[Tensor, "b t"] | None = None,
    ) -> Float[Tensor, "b h _ d"]:
        """What the values of each token add to what comes out per unit of weight, by head.

        Gates and norms after the heads are left out.
        """
        raise ConfigError(f"{type(self).__name__} cannot tell what each token contributes")

    def through_projection(
        self, v: Float[Tensor, "b h t v"], projection: nn.Linear | None
    ) -> Float[Tensor, "b h t d"]:
        """Each head's values by its share of the last projection; by none, they stay in place."""
        (_, h, _, width), d = v.shape, self.hidden_size
        weight = torch.eye(d, dtype=v.dtype) if projection is None else projection.weight
        return torch.einsum("bhtv,dhv->bhtd", v, weight.to(v).view(d, h, width))

    def one_row(self, x: Float[Tensor, "b t d"], at: int, **inputs: Any) -> Float[Tensor, "b h _"]:
        """The weights by which the token `at` takes of each, in linear time where the layer is."""
        by = x.new_zeros(len(x), 1, x.shape[1])
        by[..., at] = 1
        return self.taken(x, by, **inputs)

    def split(self, x: Float[Tensor, "b t d"]) -> Float[Tensor, "b h t w"]:
        """Each head's share of the width."""
        return x.unflatten(-1, (self.n_head, -1)).transpose(1, 2)

    def join(self, x: Float[Tensor, "b h t w"]) -> Float[Tensor, "b t d"]:
        """The heads side by side again."""
        return x.transpose(1, 2).flatten(-2)

    def check_tokens(self, x: Tensor, key_mask: Tensor | None = None, *, name: str = "x") -> None:
        """Tokens must be of this layer's width, and a mask must say of each whether it is real."""
        check_floating(**{name: x})
        if x.ndim != 3 or x.shape[-1] != self.hidden_size:
            raise InputError(f"{name} is {shape(x)}; expected [batch, tokens, {self.hidden_size}]")
        check_key_mask(key_mask, x.unsqueeze(1), name)

    def check_state(
        self, state: State | None, kind: type[R], x: Tensor, cu_seqlens: Tensor | None = None
    ) -> R | None:
        """The state, if it is one that this layer could have returned for as many sequences."""
        if state is None:
            return None
        if not isinstance(state, kind):
            raise InputError(
                f"{type(self).__name__} goes on from a {kind.__name__}, not from a "
                f"{type(state).__name__}; give what this layer returned, or None to begin"
            )
        # By `shape`, as `len` would fix the size of a batch that an exported graph leaves free.
        n_rows = state.length.shape[0]
        n_sequences = x.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
        if n_rows != n_sequences:
            raise InputError(
                f"the state has {n_rows} rows and x {shape(x)} holds {n_sequences} sequences; "
                "pick rows by state.select, or begin with None"
            )
        return state


class DotProductAttention(Attention):
    """Attention of queries to keys and values, in one of three forms.

    causal          each token sees itself and those before it
    bidirectional   each token sees all that were read, those of the same call included
    cross           tokens see a source, not each other

    The last two differ only in what is read: x itself, or a source that is given. So a call with
    a state reads on, and attends to everything read so far: a source may arrive in pieces, and a
    bidirectional encoder that is fed in chunks is chunk-causal. The same numbers come from one
    call with `visible`, the number of tokens that each query may see.

    In the causal form a convolution may come between projections and attention, see
    `leap.layers.convolution`; the state is then a `ConvolvedState`. Rotary positions that are
    "selective" turn by angles that tokens choose, see `leap.layers.travel`; the state is then a
    `TurnedState`. An output gate multiplies what comes out by sigmoid(W x), channel by channel
    (Qiu et al. 2025, arXiv 2505.06708).
    """

    state_kind: type[Recurrent]
    """What such an attention keeps of what it has read."""
    walks = False
    """Whether queries of a cross form travel, so that `angles` must be given to go on from."""

    def __init__(
        self,
        hidden_size: int,
        n_head: int,
        *,
        form: Form,
        rotary: Rotary,
        value_width: int | None,
        bias: bool,
        dropout: float,
        convolution: int | None,
        output_gate: bool = False,
    ) -> None:
        super().__init__(hidden_size, n_head)
        self.form = one_of("form", form, get_args(Form))
        if rotary and self.head_width % 2:
            raise ConfigError(
                f"rotary turns pairs, and heads of hidden_size={hidden_size} / n_head={n_head} = "
                f"{self.head_width} features do not pair up; choose an even number"
            )
        if rotary == "selective" and form != "causal":
            raise ConfigError(
                f"rotary='selective' adds up turns along one sequence; form={form!r} has no such "
                "order; use it with form='causal'"
            )
        self.rotary = bool(rotary)
        self.looks_at_positions = rotary is True
        self.rotation = (
            Rotation(hidden_size, n_head, self.head_width) if rotary == "selective" else None
        )
        self.value_width = self.head_width if value_width is None else value_width
        self.q_proj = nn.Linear(hidden_size, hidden_size, bias=bias)
        self.k_proj = nn.Linear(hidden_size, hidden_size, bias=bias)
        self.v_proj = nn.Linear(hidden_size, n_head * self.value_width, bias=bias)
        self.o_proj = nn.Linear(n_head * self.value_width, hidden_size, bias=bias)
        self.output_gate = (
            nn.Linear(hidden_size, n_head * self.value_width, bias=bias) if output_gate else None
        )
        self.dropout = dropout
        n_channel = 2 * hidden_size + n_head * self.value_width
        self.convolution = short_convolution(convolution, n_channel, form)

    @abstractmethod
    def attend_causally(self, call: Call) -> tuple[Values, Recurrent]:
        """Read x, each token attending to itself and the past."""

    def attend_to(self, call: Call) -> tuple[Values, Recurrent]:
        """Read the source, then let each token of x attend to everything read."""
        raise ConfigError(f"{type(self).__name__} has form='causal' alone")

    def enter(
        self,
        x: Float[Tensor, "b t d"],
        state: State | None = None,
        *,
        source: Float[Tensor, "b s d"] | None = None,
        visible: Int[Tensor, " t"] | Int[Tensor, "b t"] | None = None,
        key_mask: Bool[Tensor, "b _"] | None = None,
        positions: Int[Tensor, "b t"] | None = None,
        cu_seqlens: Int[Tensor, " n"] | None = None,
        angles: Float[Tensor, "b h t m"] | None = None,
    ) -> Call:
        """What `forward` is given, as `Attention.forward` says, checked and projected; further:

        Args:
            source: tokens to read and attend to, in the cross form. Without any, x attends to
                what the state has read; x of no tokens only reads.
            visible: how many of the tokens read, pads counted, each of x may see, in the
                bidirectional and cross forms: a schedule, or the ends of chunks.
            key_mask: true at the real tokens of x, or in the cross form of the source.
            angles: how far the tokens of x have travelled, as `walk` of a layer that does tells;
                in the cross form, where x may go on from tokens that are not given again.
        """
        read = source if self.form == "cross" else x
        self._check_form(state, source, visible, cu_seqlens)
        self.check_tokens(x)
        if read is not None:
            self.check_tokens(read, key_mask, name="source" if self.form == "cross" else "x")
        past, taps, clock = self._unwrapped(state, x, cu_seqlens)
        at, read_at = self._positions(x, source, past, key_mask, positions, cu_seqlens)
        k = v = None
        if self.form == "causal":
            q, k, v, taps = self._projected(x, taps, key_mask, cu_seqlens)
        else:
            q = self.split(self.q_proj(x))
            if read is not None:
                k, v = self.split(self.k_proj(read)), self.split(self.v_proj(read))
        if self.rotation is not None:
            options: dict[str, Any] = {"key_mask": key_mask, "cu_seqlens": cu_seqlens}
            at, clock = walked(self.rotation(x), clock, **options)
            read_at = at
        given = past, key_mask, at, read_at, cu_seqlens, visible, angles
        return Call(x, read, q, k, v, *given, taps, clock)

    def attend_elsewhere(self, call: Call) -> tuple[Values, Recurrent]:
        """`attend_to`, of packed sequences too."""
        if call.cu_seqlens is None:
            return self.attend_to(call)

        def op(x: Tensor, at: Tensor | None = None, **given: Any) -> tuple[Tensor, Recurrent]:
            x, given["past"] = x.squeeze(1), given.pop("state")
            at = None if at is None else at.squeeze(1)
            given |= {"positions": at, "source_positions": at, "cu_seqlens": None}
            return self.attend_to(call._replace(x=x, source=x, **given))

        at = None if call.positions is None else call.positions.unsqueeze(1)
        tokens = {"x": call.x.unsqueeze(1), "at": at, "q": call.q, "k": call.k, "v": call.v}
        return run_packed(op, call.cu_seqlens, tokens, call.past, call.key_mask)

    def leave(self, o: Values, x: Hidden, whole: Values | None = None) -> Hidden:
        """What the layer gives, of attended values.

        Args:
            o: attended values, or a part of them.
            x: the tokens that attend.
            whole: all of them, where o is a part: norms divide by its scale.
        """
        y = self.join(self.finish(o, x, whole))
        if self.output_gate is not None:
            y = y * self.output_gate(x).sigmoid()
        return self.o_proj(y)

    def finish(self, o: Values, x: Hidden, whole: Values | None = None) -> Values:
        """Attended values as they leave the heads: normed, gated, dropped, as the layer does."""
        return o

    def weights(
        self,
        x: Float[Tensor, "b t d"],
        *,
        source: Float[Tensor, "b s d"] | None = None,
        key_mask: Bool[Tensor, "b _"] | None = None,
        positions: Int[Tensor, "b t"] | None = None,
    ) -> Float[Tensor, "b h t _"]:
        """How much of each token every token of x takes, as `Attention.weights` says.

        Where a norm takes any scale away, their magnitudes sum to 1.

        Args:
            source: what is attended to, in the cross form.
            key_mask: true at the real tokens of x, or in the cross form of the source.
        """
        values = one_hot_values(x if source is None else source, self.n_head)
        o, _ = self.take(x, values, source=source, key_mask=key_mask, positions=positions)
        if getattr(self, "norm", None) is None:
            return o
        return o / o.abs().sum(dim=-1, keepdim=True).clamp_min(torch.finfo(o.dtype).tiny)

    def take(
        self,
        x: Float[Tensor, "b t d"],
        values: Float[Tensor, "b h _ p"],
        state: State | None = None,
        *,
        source: Float[Tensor, "b s d"] | None = None,
        key_mask: Bool[Tensor, "b _"] | None = None,
        positions: Int[Tensor, "b t"] | None = None,
    ) -> tuple[Float[Tensor, "b h t p"], State | None]:
        """What tokens take of any values, as `Attention.take` says."""
        if state is not None and self.form != "causal":
            raise InputError(f"form={self.form!r} takes of whole sequences; give no state")
        given: dict[str, Any] = {"source": source, "key_mask": key_mask, "positions": positions}
        call = self.enter(x, state, **given)._replace(v=values)
        o, after = self.weigh(call)
        return o, after if after is None else wrapped(call, after)

    def contributions(
        self,
        x: Float[Tensor, "b t d"],
        at: int,
        *,
        source: Float[Tensor, "b s d"] | None = None,
        key_mask: Bool[Tensor, "b _"] | None = None,
        positions: Int[Tensor, "b t"] | None = None,
    ) -> Float[Tensor, "b _ d"]:
        """What each token contributes to what comes out, as `Attention.contributions` says."""
        given: dict[str, Any] = {"source": source, "key_mask": key_mask, "positions": positions}
        v = self._values_of(x if source is None else source, key_mask)
        each = self.one_row(x, at, **given).unsqueeze(-1) * v
        whole = each.sum(dim=2, keepdim=True).expand_as(each)
        taker = x[:, [at]].expand(-1, v.shape[2], -1)
        y = self.leave(each, taker, whole)
        return y if self.o_proj.bias is None else y - self.o_proj.bias

    def added(
        self,
        x: Float[Tensor, "b t d"],
        *,
        source: Float[Tensor, "b s d"] | None = None,
        key_mask: Bool[Tensor, "b _"] | None = None,
        positions: Int[Tensor, "b t"] | None = None,
    ) -> Float[Tensor, "b h _ d"]:
        """What the values of each token add, as `Attention.added` says."""
        v = self._values_of(x if source is None else source, key_mask)
        return self.through_projection(v, self.o_proj)

    def _values_of(self, source: Tensor, key_mask: Tensor | None) -> Tensor:
        """Values as they are attended to."""
        if self.form == "causal":
            return self._projected(source, None, key_mask, None)[2]
        return self.split(self.v_proj(source))

    def weigh(self, call: Call) -> tuple[Values, Recurrent | None]:
        """What queries take of any values in place of those of the keys."""
        raise ConfigError(f"{type(self).__name__} cannot tell how much of each token it takes")

    def shares(
        self,
        x: Float[Tensor, "b t d"],
        state: Any,
        earlier: Sequence[Any],
        *,
        positions: Int[Tensor, "b t"] | None = None,
        angles: Float[Tensor, "b h t m"] | None = None,
    ) -> Float[Tensor, "b h t n"]:
        """How much of its weights each token of x has on what was read before, in the cross form.

        Args:
            x: tokens that attend to all that the state has read.
            state: what has been read.
            earlier: n states on the way to it, of which `without_values` is enough.
            positions: of the tokens, for layers that look at them.
            angles: how far they have travelled, for layers that do.
        """
        raise ConfigError(f"{type(self).__name__} cannot tell how its weights are shared out")

    def matched(
        self,
        x: Float[Tensor, "b t d"],
        source: Float[Tensor, "b s d"],
        key_mask: Bool[Tensor, "b s"] | None,
    ) -> tuple[Float[Tensor, "b h t w"], Float[Tensor, "b h s w"]]:
        """The heads of queries and of keys that are matched with them, at the start."""
        if self.form == "causal":
            return self._projected(x, None, key_mask, None)[:2]
        return self.split(self.q_proj(x)), self.split(self.k_proj(source))

    def _projected(
        self,
        x: Tensor,
        past: TapState | None,
        key_mask: Tensor | None,
        cu_seqlens: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor, TapState | None]:
        """The heads of x, convolved if this layer does that; and the state of the convolution."""
        parts, after = (self.q_proj(x), self.k_proj(x), self.v_proj(x)), None
        if self.convolution is not None:
            y, after = self.convolution(
                torch.cat(parts, dim=-1), past, key_mask=key_mask, cu_seqlens=cu_seqlens
            )
            parts = y.split([part.shape[-1] for part in parts], dim=-1)
        q, k, v = map(self.split, parts)
        return q, k, v, after

    def _unwrapped(
        self, state: State | None, x: Tensor, cu_seqlens: Tensor | None
    ) -> tuple[Recurrent | None, TapState | None, ClockState | None]:
        """The state of the attention itself, and those of a convolution and a rotation before."""
        taps = clock = None
        if self.convolution is not None:
            convolved = self.check_state(state, ConvolvedState, x, cu_seqlens)
            state, taps = (None, None) if convolved is None else (convolved.inner, convolved.taps)
        if self.rotation is not None:
            turned = self.check_state(state, TurnedState, x, cu_seqlens)
            state, clock = (None, None) if turned is None else (turned.inner, turned.clock)
        return self.check_state(state, self.state_kind, x, cu_seqlens), taps, clock

    def _check_form(
        self,
        state: State | None,
        source: Tensor | None,
        visible: Tensor | None,
        cu_seqlens: Tensor | None,
    ) -> None:
        if source is not None and self.form != "cross":
            raise InputError(f"a source is for form='cross'; this layer has form={self.form!r}")
        if self.form == "cross" and source is None and state is None:
            raise InputError("nothing to attend to: give a source, or a state that has read one")
        if visible is not None and self.form == "causal":
            raise InputError(
                "visible is for form='bidirectional' and 'cross'; in form='causal' "
                "each token sees itself and those before it"
            )
        if visible is not None and state is not None:
            raise InputError(
                "visible counts the tokens of one whole call and does not go with a state; "
                "without visible, x sees all that was read so far"
            )
        if cu_seqlens is not None and (self.form == "cross" or visible is not None):
            raise InputError("cu_seqlens does not go with a source or visible; pad instead")

    def _positions(
        self,
        x: Tensor,
        source: Tensor | None,
        past: Recurrent | None,
        key_mask: Tensor | None,
        positions: Tensor | None,
        cu_seqlens: Tensor | None,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Positions of x and of what is read, for layers that look at them."""
        if positions is not None and positions.shape != x.shape[:2]:
            raise InputError(
                f"positions are {shape(positions)}; for x {shape(x)} expected {list(x.shape[:2])}"
            )
        if not self.looks_at_positions:
            return None, None
        if self.form != "cross":
            if positions is None:
                positions = token_positions(x, past, key_mask, cu_seqlens)
            return positions, positions
        if positions is None:
            if past is not None and x.shape[1]:
                raise InputError(
                    "give positions: the state knows how much of the source was read, "
                    "not how many queries came before x"
                )
            positions = token_positions(x)
        return positions, None if source is None else token_positions(source, past, key_mask)


def wrapped(call: Call, inner: Recurrent) -> Recurrent:
    """The state of an attention, with those of a rotation and a convolution before it."""
    after = inner if call.clock is None else TurnedState.of(call.clock, inner)
    return after if call.taps is None else ConvolvedState.of(call.taps, after)


def placed(x: Float[Tensor, "b h t w"], at: Where) -> Float[Tensor, "b h t w"]:
    """Heads turned to where their tokens stand."""
    return turned(x, at) if at.is_floating_point() else rotary(x, at)


def rms_normed(
    o: Float[Tensor, "*axes v"], whole: Float[Tensor, "*axes v"] | None, eps: float
) -> Float[Tensor, "*axes v"]:
    """Values over their root mean square, or a part of them over that of the whole."""
    if whole is None:
        return F.rms_norm(o, o.shape[-1:], eps=eps)
    return o * (whole.square().mean(dim=-1, keepdim=True) + eps).rsqrt()


def check_alibi(alibi: bool, form: Form) -> None:
    """Distances count back from a token, and only the causal form looks back alone."""
    if alibi and form != "causal":
        raise ConfigError(f"alibi is for form='causal', not form={form!r}; use other positions")


def distance_slopes(n_head: int) -> tuple[float, ...]:
    """How fast each head forgets: ALiBi's slopes, 2^(-8 / h), 2^(-16 / h), ... 2^-8."""
    return tuple(2 ** (-8 * head / n_head) for head in range(1, n_head + 1))


def token_positions(
    x: Float[Tensor, "b t d"],
    past: Recurrent | None = None,
    key_mask: Bool[Tensor, "b t"] | None = None,
    cu_seqlens: Int[Tensor, " n"] | None = None,
) -> Int[Tensor, "b t"]:
    """How many real tokens of its sequence come before each, those of the past included.

    A pad has the position of the real token before it, as far as there is one.
    """
    real = x.new_ones(x.shape[:2], dtype=torch.long) if key_mask is None else key_mask.long()
    count = real.cumsum(dim=1)
    if cu_seqlens is None:
        if past is not None:
            count = count + past.length.unsqueeze(1)
    else:
        check_cu_seqlens(cu_seqlens, x.unsqueeze(1))
        starts, order = cu_seqlens.long(), torch.arange(x.shape[1], device=x.device)
        sequence = torch.bucketize(order, starts[1:], right=True)
        count = count - (count - real)[:, starts[sequence]]
        if past is not None:
            count = count + past.length[sequence]
    return (count - 1).clamp_min(0)


def one_hot_values(x: Float[Tensor, "b t d"], n_head: int) -> Float[Tensor, "b h t t"]:
    """Values by which an attention shows its weights: token j's are 1 at j, and 0 elsewhere."""
    eye = torch.eye(x.shape[1], dtype=accumulator(x), device=x.device)
    return eye.expand(len(x), n_head, -1, -1)


def one_of(name: str, given: str, known: Sequence[str]) -> Any:
    """The given choice, if it is a known one."""
    if given not in known:
        raise ConfigError(f"{name}={given!r} is not known; there are {', '.join(known)}")
    return given
