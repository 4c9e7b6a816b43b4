"""Softmax attention as a layer: the quadratic baseline, called like the linear ones.

    o_i = sum_j softmax_j(q_i . k_j / sqrt(w)) v_j

Axes: b batch, h heads, t tokens, s source tokens, d hidden size, v width of a head's values.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from leap.errors import ConfigError
from leap.layers.attention import (
    DotProductAttention,
    Form,
    check_alibi,
    distance_slopes,
    one_hot_values,
)
from leap.ops.features import rotary
from leap.ops.softmax import (
    SoftmaxState,
    causal_softmax_attention,
    softmax_attention,
    softmax_attention_reference,
)


class SoftmaxAttention(DotProductAttention):
    """Attention over `scaled_dot_product_attention`, with a state that grows by every token.

    With a window it grows no further than that.

    Args:
        hidden_size, n_head: width of all heads together, and their number.
        form: "causal", "bidirectional" or "cross", see `DotProductAttention`.
        rotary: turn queries and keys by their positions.
        alibi: in the causal form, take off scores in proportion to distance.
        window: in the cross form, how many tokens of the source each query sees: the last of those
            that it may see, pads not counted. By default all.
        naive: hold all scores at once, as plain matrix products do, in place of
            `scaled_dot_product_attention`; not in the causal form. For comparisons.
        value_width: width of a head's values, by default that of its queries.
        bias: of the projections.
        dropout: share of the scores to drop.
    """

    state_kind = SoftmaxState

    def __init__(
        self,
        hidden_size: int,
        n_head: int,
        *,
        form: Form = "causal",
        rotary: bool = False,
        alibi: bool = False,
        window: int | None = None,
        naive: bool = False,
        value_width: int | None = None,
        bias: bool = True,
        dropout: float = 0.0,
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

    def attend_causally(
        self,
        x: Float[Tensor, "b t d"],
        past: SoftmaxState | None,
        *,
        key_mask: Bool[Tensor, "b t"] | None,
        positions: Int[Tensor, "b t"] | None,
        cu_seqlens: Int[Tensor, " n"] | None,
    ) -> tuple[Float[Tensor, "b h t v"], SoftmaxState]:
        """Read x, each token attending to itself and the past."""
        q = self._placed(self.q_proj(x), positions)
        k = self._placed(self.k_proj(x), positions)
        v = self.split(self.v_proj(x))
        return causal_softmax_attention(
            q,
            k,
            v,
            past,
            key_mask=key_mask,
            cu_seqlens=cu_seqlens,
            slopes=self._slopes(x),
            dropout=self._dropout,
        )

    def attend_to(
        self,
        x: Float[Tensor, "b t d"],
        source: Float[Tensor, "b s d"] | None,
        past: SoftmaxState | None,
        *,
        visible: Int[Tensor, " t"] | Int[Tensor, "b t"] | None,
        key_mask: Bool[Tensor, "b s"] | None,
        positions: Int[Tensor, "b t"] | None,
        source_positions: Int[Tensor, "b s"] | None,
    ) -> tuple[Float[Tensor, "b h t v"], SoftmaxState]:
        """Read the source, then let each token of x attend to everything read."""
        after = past
        if source is not None:
            k = self._placed(self.k_proj(source), source_positions)
            v = self.split(self.v_proj(source))
            after = SoftmaxState.empty(k, v) if past is None else past
            after = after.advance(k=k, v=v, key_mask=key_mask)
        assert after is not None  # or there was nothing to attend to
        q = self._placed(self.q_proj(x), positions)
        attend = softmax_attention_reference if self.naive else softmax_attention
        o = attend(
            q,
            after.k,
            after.v,
            key_mask=after.mask,
            visible=visible,
            window=self.window,
            dropout=self._dropout,
        )
        if source is None or self.window is None:
            return o, after
        return o, after.last(self.window)

    def weigh(
        self,
        x: Float[Tensor, "b t d"],
        source: Float[Tensor, "b s d"],
        *,
        key_mask: Bool[Tensor, "b s"] | None,
        positions: Int[Tensor, "b t"] | None,
        source_positions: Int[Tensor, "b s"] | None,
    ) -> Float[Tensor, "b h t s"]:
        """The weights of the source's tokens; in the causal form the source is x."""
        v = one_hot_values(source, self.n_head)
        q = self._placed(self.q_proj(x), positions).to(v.dtype)
        k = self._placed(self.k_proj(source), source_positions).to(v.dtype)
        if self.form == "causal":
            return causal_softmax_attention(q, k, v, key_mask=key_mask, slopes=self._slopes(x))[0]
        return softmax_attention(q, k, v, key_mask=key_mask, window=self.window)

    def shares(
        self,
        x: Float[Tensor, "b t d"],
        state: SoftmaxState,
        earlier: Sequence[SoftmaxState],
        *,
        positions: Int[Tensor, "b t"] | None = None,
    ) -> Float[Tensor, "b h t n"]:
        """How much of its weights each token of x has on what was read before."""
        q = self._placed(self.q_proj(x), positions if self.looks_at_positions else None)
        lengths = torch.stack([each.length for each in earlier], dim=1)
        before = (state.places.unsqueeze(-1) <= lengths.unsqueeze(1)).to(q.dtype)
        # Attending to 1 where a key is among the earlier ones yields their weights' sum.
        values = before.unsqueeze(1).expand(-1, self.n_head, -1, -1)
        return softmax_attention(q, state.k, values, key_mask=state.mask)

    def _slopes(self, x: Tensor) -> Tensor | None:
        if not self.alibi:
            return None
        return x.new_tensor(distance_slopes(self.n_head), dtype=torch.float32)

    @property
    def _dropout(self) -> float:
        return self.dropout if self.training else 0.0

    def _placed(self, x: Tensor, positions: Tensor | None) -> Tensor:
        """The heads of x, turned by position if this layer looks at positions."""
        x = self.split(x)
        return x if positions is None else rotary(x, positions)
