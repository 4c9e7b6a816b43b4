"""The state of linear attention: two sums over the past, of a size that never grows.

    kv = sum_j k_j v_j^T        k = sum_j k_j        k_j: features of the keys

With a forget gate both are multiplied by it before a token is added. Being sums, the states of
two halves of a sequence add up to the state of the whole, and tokens can be subtracted again.

A token far into a sequence is little more than the rounding of such sums in float32: a million of
them, one by one, would be off by 1e-2 in the worst case. So sums are of double precision where the
device has it, and what is computed of each token is not.

Where places are travelled (see `leap.ops.travel`), the state also knows how far: the angle of each
clock. The second half of a sequence began at 0, so that adding it up means to turn its clocks on.

Axes: b batch, h heads, t tokens, f features, e values, m clocks.
"""

from dataclasses import replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from leap.errors import InputError
from leap.ops.checks import shape
from leap.ops.linear.parts import normalised, unit_scale
from leap.ops.state import (
    Recurrent,
    accumulator,
    as_given,
    count_tokens,
    finest,
    mask_tokens,
    product,
    state,
)
from leap.ops.travel import travelled, turned_on


@state
class LinearState(Recurrent):
    """Sums over the tokens read so far, in float64 (float32 on devices that have none)."""

    kv: Float[Tensor, "b h f e"]
    k: Float[Tensor, "b h f"]
    log_decay: Float[Tensor, "b h #f"] | None = None
    """Log of the share of an earlier state that these tokens leave; None without gates."""
    angle: Float[Tensor, "b h m"] | None = None
    """How far each clock has turned, in double precision; None where no places are travelled."""

    @classmethod
    def empty(
        cls,
        batch: int,
        heads: int,
        features: int,
        values: int,
        *,
        device: torch.device | str = "cpu",
    ) -> "LinearState":
        """The state before the first token."""
        zero = torch.zeros((), dtype=finest(device), device=device)  # One for all places.
        return cls(
            kv=zero.expand(batch, heads, features, values),
            k=zero.expand(batch, heads, features),
            length=torch.zeros(batch, dtype=torch.long, device=device),
        )

    def advance(
        self,
        *,
        k: Float[Tensor, "b h t f"],
        v: Float[Tensor, "b h t e"],
        key_mask: Bool[Tensor, "b t"] | Bool[Tensor, "b 1 t"] | None = None,
        log_gate: Float[Tensor, "b h t #f"] | None = None,
        turn: Float[Tensor, "b h t m"] | None = None,
    ) -> "LinearState":
        """Read tokens without attending to anything: the state after them.

        Args:
            k: features of the keys, their re-weighting multiplied in.
            v: values.
            key_mask: true at real tokens.
            log_gate: log of the gates.
            turn: how far the clocks turn on at each token.
        """
        total = accumulator(k, v)
        k, v = mask_tokens(k.to(total), key_mask), mask_tokens(v.to(total), key_mask)
        length = self.length + count_tokens(k, key_mask)
        angle = self.angle if turn is None else travelled(turn, self.angle, key_mask)[1]
        kv, k_sum, log_decay = self.kv, self.k, self.log_decay
        if log_gate is not None:
            log_gate = mask_tokens(log_gate.to(total), key_mask)
            later = torch.nn.functional.pad(log_gate[:, :, 1:], (0, 0, 0, 1))  # what comes after j
            k = k * later.flip(2).cumsum(2).flip(2).exp()
            decay = log_gate.sum(2)
            kv, k_sum = decay.exp().unsqueeze(-1) * kv, decay.exp() * k_sum
            log_decay = decay if log_decay is None else log_decay + decay
        kv_new, k_new = sums(k, v)
        return LinearState(
            kv=kv + kv_new,
            k=k_sum + k_new,
            log_decay=log_decay,
            angle=angle,
            length=length,
        )

    def attend(
        self, q: Float[Tensor, "b h t f"], *, normalise: bool = True, eps: float = 1e-6
    ) -> Float[Tensor, "b h t e"]:
        """Attend from every query to all tokens read so far, adding none."""
        if q.shape[:2] != self.k.shape[:2] or q.shape[-1] != self.k.shape[-1]:
            b, h, f = self.k.shape
            raise InputError(f"q is {shape(q)}; this state answers queries [{b}, {h}, any, {f}]")
        total, scale = self.kv.dtype, None
        scaled = q.to(total)
        if q.dtype == total or total == torch.float32:  # Else no three numbers overflow.
            scale = unit_scale(scaled)
            scaled = scaled * scale
        with as_given(q):
            num = scaled @ self.kv
            den = torch.linalg.vecdot(scaled, self.k.unsqueeze(-2)).unsqueeze(-1)
        if normalise:
            return normalised(num, den, eps if scale is None else eps * scale).to(q.dtype)
        return (num if scale is None else num / scale).to(q.dtype)

    def merge(self, later: "LinearState") -> "LinearState":
        """The state after A then B, from the state after A and the one after B alone."""
        if later.kv.shape != self.kv.shape:
            raise InputError(
                f"states of {shape(self.kv)} and {shape(later.kv)} are not of one layer: "
                "merge takes two of the same shape"
            )
        kv, k, log_decay, angle = self.kv, self.k, later.log_decay, self.angle
        if log_decay is not None:
            left = log_decay.exp()
            kv, k = left.unsqueeze(-1) * kv, left * k
        if self.log_decay is not None:
            log_decay = self.log_decay if log_decay is None else self.log_decay + log_decay
        kv_later, k_later = later.kv, later.k
        if angle is not None and later.angle is not None:
            kv_later, k_later = (turned_on(x, angle) for x in (kv_later, k_later))
            _, angle = travelled(later.angle.unsqueeze(2), angle)
        return LinearState(
            kv=kv + kv_later,
            k=k + k_later,
            log_decay=log_decay,
            angle=angle,
            length=self.length + later.length,
        )

    def without_values(self) -> "LinearState":
        """The sum of the keys alone: what tells how weights are shared out, but attends to none."""
        return replace(self, kv=self.kv.new_empty(*self.kv.shape[:-1], 0), trail=None)

    def without(
        self,
        *,
        k: Float[Tensor, "b h t f"],
        v: Float[Tensor, "b h t e"],
        key_mask: Bool[Tensor, "b t"] | None = None,
    ) -> "LinearState":
        """Take tokens back out, given again: the last ones, or any others (to forget a passage).

        Each subtraction rounds once, so for drafting and rejecting in a long loop `record` and
        `rollback`, which leave no trace, are the better choice. Gated states cannot subtract.
        """
        if self.log_decay is not None:
            raise InputError("a gated state cannot subtract tokens; use record() and rollback(n)")
        length = self.length - count_tokens(k, key_mask)
        return replace(self.advance(k=-k, v=v, key_mask=key_mask), length=length)


def sums(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """sum_j k_j v_j^T and sum_j k_j, in the precision that states have."""
    total = finest(k.device)
    with as_given(k):
        return product(k.mT, v).to(total), k.sum(2).to(total)
