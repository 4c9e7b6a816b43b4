"""Softmax attention as a layer: the quadratic baseline, called like the linear ones.

    o_i = sum_j softmax_j(q_i . k_j / sqrt(w)) v_j

With `gate="head"` each head forgets as its tokens say: the Forgetting Transformer (Lin et al. 2025,
arXiv 2503.02130).

Axes: b batch, h heads, t tokens, s source tokens, d hidden size, v width of a head's values.
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from leap.errors import ConfigError
from leap.layers.attention import (
    Call,
    DotProductAttention,
    Form,
    Hidden,
    Rotary,
    Values,
    check_alibi,
    distance_slopes,
    placed,
    wrapped,
)
from leap.layers.gate import ForgetGate, Gate, check_gate
from leap.ops.softmax import (
    SoftmaxState,
    causal_softmax_attention,
    softmax_attention,
    softmax_attention_reference,
)
from leap.ops.state import Recurrent, State


class SoftmaxAttention(DotProductAttention):
    """Attention over `scaled_dot_product_attention`, with a state that grows by every token.

    With a window it grows no further than that.

    Args:
        hidden_size, n_head: width of all heads together, and their number.
        form: "causal", "bidirectional" or "cross", see `DotProductAttention`.
        rotary: turn queries and keys by their positions; "selective" by angles that tokens choose,
            in the causal form.
        alibi: in the causal form, take off scores in proportion to distance.
        window: in the cross form, how many tokens of the source each query sees: the last of those
            that it may see, pads not counted. By default all.
        naive: hold all scores at once, as plain matrix products do, in place of
            `scaled_dot_product_attention`; not in the causal form. For comparisons.
        value_width: width of a head's values, by default that of its queries.
        bias: of the projections.
        dropout: share of the scores to drop.
        gate: in the causal form, "head" for a gate by which each head learns to forget.
        convolution: taps of a convolution over projections, in the causal form; usually 4.
        output_gate: multiply what comes out by a learned gate, see `DotProductAttention`.
    """

    state_kind = SoftmaxState

    def __init__(
        self,
        hidden_size: int,
        n_head: int,
        *,
        form: Form = "causal",
        rotary: Rotary = False,
        alibi: bool = False,
        window: int | None = None,
        naive: bool = False,
        value_width: int | None = None,
        bias: bool = True,
        dropout: float = 0.0,
        gate: Gate | None = None,
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
        self.alibi = alibi
        check_alibi(alibi, form)
        if window is not None and (form != "cross" or window < 1):
            raise ConfigError(
                f"window={window} in form={form!r}: a window is for form='cross', of 1 or more"
            )
        self.window = window
        if naive and form == "causal":
            raise ConfigError("naive=True is for form='bidirectional' or 'cross'")
        self.naive = naive
        check_gate(gate, form)
        if gate not in (None, "head"):
            raise ConfigError(
                f"gate={gate!r}: softmax attention adds one number to a score, and has a gate "
                "per head; use gate='head', or linear attention for gates of channels"
            )
        self.gate = None if gate is None else ForgetGate(hidden_size, n_head)

    def forward(
        self, x: Hidden, state: State | None = None, **given: Any
    ) -> tuple[Hidden, Recurrent]:
        """Attend, given what `DotProductAttention.enter` takes."""
        call = self.enter(x, state, **given)
        attend = self.attend_causally if self.form == "causal" else self.attend_elsewhere
        o, after = attend(call)
        return self.leave(o, x), wrapped(call, after)

    def attend_causally(self, call: Call) -> tuple[Values, SoftmaxState]:
        """Read x, each token attending to itself and the past."""
        assert call.k is not None and call.v is not None
        return causal_softmax_attention(
            _placed(call.q, call.positions),
            _placed(call.k, call.positions),
            call.v,
            call.past,
            key_mask=call.key_mask,
            cu_seqlens=call.cu_seqlens,
            slopes=self._slopes(call.x),
            log_gate=self._log_gate(call.x),
            dropout=self._dropout,
        )

    def attend_to(self, call: Call) -> tuple[Values, SoftmaxState]:
        """Read the source, then let each token of x attend to everything read."""
        after = call.past
        if call.k is not None and call.v is not None:
            k = _placed(call.k, call.source_positions)
            after = SoftmaxState.empty(k, call.v) if after is None else after
            after = after.advance(k=k, v=call.v, key_mask=call.key_mask)
        attend = softmax_attention_reference if self.naive else softmax_attention
        o = attend(
            _placed(call.q, call.positions),
            after.k,
            after.v,
            key_mask=after.mask,
            visible=call.visible,
            window=self.window,
            dropout=self._dropout,
        )
        return o, after if call.k is None or self.window is None else after.last(self.window)

    def weigh(self, call: Call) -> tuple[Values, Recurrent | None]:
        """What queries take of any values in place of those of the keys."""
        assert call.k is not None and call.v is not None
        q = _placed(call.q, call.positions).to(call.v.dtype)
        k = _placed(call.k, call.source_positions).to(call.v.dtype)
        if self.form == "causal":
            slopes, log_gate = self._slopes(call.x), self._log_gate(call.x)
            return causal_softmax_attention(
                q, k, call.v, call.past, key_mask=call.key_mask, slopes=slopes, log_gate=log_gate
            )
        window = self.window
        return softmax_attention(q, k, call.v, key_mask=call.key_mask, window=window), None

    def shares(
        self,
        x: Float[Tensor, "b t d"],
        state: SoftmaxState,
        earlier: Sequence[SoftmaxState],
        *,
        positions: Int[Tensor, "b t"] | None = None,
        angles: Float[Tensor, "b h t m"] | None = None,
    ) -> Float[Tensor, "b h t n"]:
        """How much of its weights each token of x has on what was read before."""
        at = positions if self.looks_at_positions else None
        q = _placed(self.split(self.q_proj(x)), at)
        lengths = torch.stack([each.length for each in earlier], dim=1)
        before = (state.places.unsqueeze(-1) <= lengths.unsqueeze(1)).to(q.dtype)
        # Attending to 1 where a key is among the earlier ones yields their weights' sum.
        values = before.unsqueeze(1).expand(-1, self.n_head, -1, -1)
        return softmax_attention(q, state.k, values, key_mask=state.mask)

    def _slopes(self, x: Tensor) -> Tensor | None:
        if not self.alibi:
            return None
        return x.new_tensor(distance_slopes(self.n_head), dtype=torch.float32)

    def _log_gate(self, x: Tensor) -> Tensor | None:
        return None if self.gate is None else self.gate(x)

    @property
    def _dropout(self) -> float:
        return self.dropout if self.training else 0.0


def _placed(heads: Tensor, positions: Tensor | None) -> Tensor:
    """Queries or keys, turned by position if their layer looks at positions."""
    return heads if positions is None else placed(heads, positions)
