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
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar, get_args

import torch
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
R = TypeVar("R", bound=Recurrent)


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
        raise ConfigError(f"{type(self).__name__} cannot tell how much of each token it takes")

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
    def attend_causally(
        self,
        x: Float[Tensor, "b t d"],
        q: Float[Tensor, "b h t w"],
        k: Float[Tensor, "b h t w"],
        v: Float[Tensor, "b h t v"],
        past: Any,
        *,
        key_mask: Bool[Tensor, "b t"] | None,
        positions: Where | None,
        cu_seqlens: Int[Tensor, " n"] | None,
    ) -> tuple[Float[Tensor, "b h t v"], Recurrent]:
        """Read x, projected to q, k and v, each token attending to itself and the past."""

    @abstractmethod
    def attend_to(
        self,
        x: Float[Tensor, "b t d"],
        source: Float[Tensor, "b s d"] | None,
        past: Any,
        *,
        visible: Int[Tensor, " t"] | Int[Tensor, "b t"] | None,
        key_mask: Bool[Tensor, "b s"] | None,
        positions: Int[Tensor, "b t"] | None,
        source_positions: Int[Tensor, "b s"] | None,
        angles: Float[Tensor, "b h t m"] | None,
    ) -> tuple[Float[Tensor, "b h t v"], Recurrent]:
        """Read the source, then let each token of x attend to everything read."""

    def forward(
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
    ) -> tuple[Float[Tensor, "b t d"], Recurrent]:
        """Attend, as `Attention.forward` says, and further:

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
        if cu_seqlens is not None and self.form == "bidirectional":
            return attend_packed(self, x, past, cu_seqlens, key_mask, positions)

        at, read_at = self._positions(x, source, past, key_mask, positions, cu_seqlens)
        if self.form == "causal":
            q, k, v, taps = self._projected(x, taps, key_mask, cu_seqlens)
            if self.rotation is not None:
                at, clock = walked(
                    self.rotation(x), clock, key_mask=key_mask, cu_seqlens=cu_seqlens
                )
            o, after = self.attend_causally(
                x, q, k, v, past, key_mask=key_mask, positions=at, cu_seqlens=cu_seqlens
            )
            if clock is not None:
                after = TurnedState.of(clock, after)
            if taps is not None:
                after = ConvolvedState.of(taps, after)
        else:
            o, after = self.attend_to(
                x,
                read,
                past,
                visible=visible,
                key_mask=key_mask,
                positions=at,
                source_positions=read_at,
                angles=angles,
            )
        y = self.join(self.finish(o, x))
        if self.output_gate is not None:
            y = y * self.output_gate(x).sigmoid()
        return self.o_proj(y), after

    def finish(
        self, o: Float[Tensor, "b h t v"], x: Float[Tensor, "b t d"]
    ) -> Float[Tensor, "b h t v"]:
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

        Args:
            source: what is attended to, in the cross form.
            key_mask: true at the real tokens of x, or in the cross form of the source.
        """
        self._check_form(None, source, None, None)
        self.check_tokens(x)
        read = x if source is None else source
        self.check_tokens(read, key_mask, name="x" if source is None else "source")
        at, read_at = self._positions(x, source, None, key_mask, positions, None)
        if self.rotation is not None:
            at = read_at = walked(self.rotation(x), key_mask=key_mask)[0]
        q, k = self.matched(x, read, key_mask)
        return self.weigh(x, read, q, k, key_mask=key_mask, positions=at, source_positions=read_at)

    def weigh(
        self,
        x: Float[Tensor, "b t d"],
        source: Float[Tensor, "b s d"],
        q: Float[Tensor, "b h t w"],
        k: Float[Tensor, "b h s w"],
        *,
        key_mask: Bool[Tensor, "b s"] | None,
        positions: Where | None,
        source_positions: Int[Tensor, "b s"] | Float[Tensor, "b h s p"] | None,
    ) -> Float[Tensor, "b h t s"]:
        """The weights of the source's tokens, from queries and keys; if causal, it is x itself."""
        return super().weights(x)

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


def placed(x: Float[Tensor, "b h t w"], at: Where) -> Float[Tensor, "b h t w"]:
    """Heads turned to where their tokens stand."""
    return turned(x, at) if at.is_floating_point() else rotary(x, at)


def check_alibi(alibi: bool, form: Form) -> None:
    """Distances count back from a token, and only the causal form looks back alone."""
    if alibi and form != "causal":
        raise ConfigError(f"alibi is for form='causal', not form={form!r}; use other positions")


def distance_slopes(n_head: int) -> tuple[float, ...]:
    """How fast each head forgets: ALiBi's slopes, 2^(-8 / h), 2^(-16 / h), ... 2^-8."""
    return tuple(2 ** (-8 * head / n_head) for head in range(1, n_head + 1))


def attend_packed(
    layer: Callable[..., tuple[Tensor, Any]],
    x: Float[Tensor, "1 t d"],
    past: Recurrent | None,
    cu_seqlens: Int[Tensor, " n"],
    key_mask: Bool[Tensor, "1 t"] | None,
    positions: Int[Tensor, "1 t"] | None,
) -> tuple[Float[Tensor, "1 t d"], Recurrent]:
    """What a layer makes of packed sequences, from what it makes of padded ones."""

    # Ops have an axis of heads, which layers do not.
    def op(
        x: Tensor, state: Recurrent | None, key_mask: Tensor, positions: Tensor | None = None
    ) -> tuple[Tensor, Recurrent]:
        positions = None if positions is None else positions.squeeze(1)
        y, after = layer(x.squeeze(1), state, key_mask=key_mask, positions=positions)
        return y.unsqueeze(1), after

    tokens = {
        "x": x.unsqueeze(1),
        "positions": None if positions is None else positions.unsqueeze(1),
    }
    y, after = run_packed(op, cu_seqlens, tokens, past, key_mask)
    return y.squeeze(1), after


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
