"""What the mechanisms here share: they see whole sequences, in both directions, and keep no state.

Pads are taken out before a mechanism sees a row: for one that looks at the order of tokens the
real ones are moved to the front, and back afterwards. So pads may stand anywhere and hold anything,
and landmarks, blocks, buckets and directions are counted from a row's true ends.

Axes: b batch, h heads, t tokens, d hidden size, w width of a head.
"""

from abc import abstractmethod
from typing import Any, ClassVar, TypedDict

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from leap.errors import ConfigError, InputError
from leap.layers.attention import Attention, Heads, Hidden
from leap.ops.packing import run_packed
from leap.ops.state import Recurrent, State

Real = Bool[Tensor, "b t"]
"""True at real tokens."""


class Projections(TypedDict, total=False):
    """What may be chosen of the projections around any `MatchingAttention`."""

    bias: bool
    dropout: float


class WholeSequenceAttention(Attention):
    """Attention of an encoder, from which `attend` is all that a mechanism writes."""

    looks_at_order: ClassVar[bool] = True
    """Whether it matters in which order tokens stand."""
    needs_length: ClassVar[bool] = False
    """Whether it is made for sequences up to `length`, which the constructor then asks for."""
    reads_on: ClassVar[str] = "LeapformerAttention"
    """What to use in its place for sequences that are still arriving."""

    @abstractmethod
    def attend(self, x: Hidden, real: Real | None) -> Hidden:
        """Mix the tokens of each row.

        Args:
            x: tokens, 0 at pads.
            real: true at real tokens, which come first if the layer looks at order; None if all
                are real.
        """

    def forward(
        self,
        x: Float[Tensor, "b t d"],
        state: State | None = None,
        *,
        key_mask: Bool[Tensor, "b t"] | None = None,
        positions: Int[Tensor, "b t"] | None = None,
        cu_seqlens: Int[Tensor, " n"] | None = None,
    ) -> tuple[Float[Tensor, "b t d"], None]:
        """Attend, as `Attention.forward` says, to whole sequences: there is no state."""
        self.check_tokens(x, key_mask)
        if state is not None:
            raise InputError(
                f"{type(self).__name__} sees whole sequences and goes on from no state; "
                f"give all tokens in one call, or use {self.reads_on} to read on"
            )
        if cu_seqlens is not None:
            tokens = {"x": x.unsqueeze(1)}
            return run_packed(self._attend_padded, cu_seqlens, tokens, None, key_mask)[0].squeeze(
                1
            ), None
        return self._without_pads(x, key_mask), None

    def step(self, x: Float[Tensor, "b d"], state: State | None, **inputs: Any) -> Any:
        """Not possible: a token that arrives alone is not a whole sequence."""
        raise InputError(
            f"{type(self).__name__} sees whole sequences and takes no steps; use {self.reads_on}"
        )

    def _without_pads(self, x: Tensor, key_mask: Tensor | None) -> Tensor:
        if x.shape[1] == 0:
            return x
        if key_mask is None:
            return self.attend(x, None)
        x = x.masked_fill(~key_mask.unsqueeze(-1), 0)
        if not self.looks_at_order:
            return self.attend(x, key_mask)
        order = (~key_mask).int().argsort(dim=1, stable=True)
        front = self.attend(
            x.take_along_dim(order.unsqueeze(-1), dim=1), key_mask.take_along_dim(order, dim=1)
        )
        return front.take_along_dim(order.argsort(dim=1).unsqueeze(-1), dim=1)

    def _attend_padded(self, x: Tensor, state: None, key_mask: Tensor) -> tuple[Tensor, Recurrent]:
        """As `run_packed` calls it: with an axis of heads, and a state that only counts."""
        y = self._without_pads(x.squeeze(1), key_mask)
        return y.unsqueeze(1), Recurrent(length=key_mask.sum(dim=1))


class MatchingAttention(WholeSequenceAttention):
    """Attention that matches queries with keys to weigh values.

    Args:
        hidden_size, n_head: width of all heads together, and their number.
        bias: of the projections.
        dropout: share of the attended values to drop.
    """

    def __init__(
        self, hidden_size: int, n_head: int, *, bias: bool = True, dropout: float = 0.0
    ) -> None:
        super().__init__(hidden_size, n_head)
        self.q_proj = nn.Linear(hidden_size, hidden_size, bias=bias)
        self.k_proj = nn.Linear(hidden_size, hidden_size, bias=bias)
        self.v_proj = nn.Linear(hidden_size, hidden_size, bias=bias)
        self.o_proj = nn.Linear(hidden_size, hidden_size, bias=bias)
        self.dropout = dropout

    @abstractmethod
    def match(self, q: Heads, k: Heads, v: Heads, real: Real | None) -> Heads:
        """The values each query attends to. The projections' biases stand at pads."""

    def attend(self, x: Hidden, real: Real | None) -> Hidden:
        """Project, match, and join the heads."""
        q, k, v = (self.split(proj(x)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        o = self.match(q, k, v, real).to(v.dtype)
        return self.o_proj(self.join(F.dropout(o, self.dropout, self.training)))


def row_lengths(
    x: Float[Tensor, "b h t w"] | Float[Tensor, "b t d"], real: Bool[Tensor, "b t"] | None
) -> Int[Tensor, " b"]:
    """How many real tokens each row has."""
    if real is None:
        return torch.full((len(x),), x.shape[-2], device=x.device)
    return real.sum(dim=1)


def at_least(name: str, given: int, least: int = 1) -> int:
    """A count, if it is large enough."""
    if given < least:
        raise ConfigError(f"{name}={given} is too few; give {least} or more")
    return given
