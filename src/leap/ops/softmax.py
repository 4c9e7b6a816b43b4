"""Softmax attention, the quadratic baseline, over `scaled_dot_product_attention`.

    o_i = sum_j exp(q_i . k_j / sqrt(f)) v_j  /  sum_j exp(q_i . k_j / sqrt(f))

with j <= i in the causal form. A query that sees no key gets 0. What is kept of the past is every
key and value, so the state grows with each token where the linear ones do not, unless queries see
no more than a window of the last keys, and the state forgets those before it.

Causal attention may forget by gates, as in the Forgetting Transformer (Lin et al. 2025, arXiv
2503.02130): to the score of key j at query i comes the sum of log g over j + 1 ... i.

Axes: b batch, h heads, t queries, n keys, f features, v values.
"""

import math
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from leap.errors import InputError
from leap.ops.backends import traces
from leap.ops.checks import check_axes, check_floating, check_key_mask, check_same, shape
from leap.ops.derivatives import transformed
from leap.ops.packing import run_packed
from leap.ops.staircase import check_schedule
from leap.ops.state import Recurrent, accumulator, as_given, mask_tokens, state


def softmax_attention_reference(
    q: Float[Tensor, "b h t f"],
    k: Float[Tensor, "b h n f"],
    v: Float[Tensor, "b h n v"],
    *,
    key_mask: Bool[Tensor, "b n"] | None = None,
    visible: Int[Tensor, " t"] | Int[Tensor, "b t"] | None = None,
    window: int | None = None,
    dropout: float = 0.0,
) -> Float[Tensor, "b h t v"]:
    """The formula by plain matrix products, which hold all scores in memory at once.

    What efficient attentions are often compared with, and the same numbers as `softmax_attention`,
    but for a query that sees no key: it gets the mean of the values.
    """
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    sees = _sight(k, key_mask, visible, window)
    if sees is not None:
        scores = scores.masked_fill(~sees, torch.finfo(scores.dtype).min)
    return F.dropout(scores.softmax(dim=-1), dropout) @ v


def softmax_attention(
    q: Float[Tensor, "b h t f"],
    k: Float[Tensor, "b h n f"],
    v: Float[Tensor, "b h n v"],
    *,
    key_mask: Bool[Tensor, "b n"] | None = None,
    visible: Int[Tensor, " t"] | Int[Tensor, "b t"] | None = None,
    window: int | None = None,
    dropout: float = 0.0,
) -> Float[Tensor, "b h t v"]:
    """Attend to every key, or each query to the first few of them, or to the last of those.

    Args:
        q, k, v: queries, keys and values.
        key_mask: true at real keys; others are not attended to.
        visible: how many keys each query sees, pads counted, never fewer than the one before; by
            default all.
        window: how many of these each query sees at most, the last ones, pads not counted.
        dropout: share of the scores to drop.
    """
    _check(q, k, v, key_mask)
    if visible is not None:
        check_schedule(visible, q, k)
    return _attend(q, k, v, _sight(k, key_mask, visible, window), dropout)


def causal_softmax_attention(
    q: Float[Tensor, "b h t f"],
    k: Float[Tensor, "b h t f"],
    v: Float[Tensor, "b h t v"],
    state: "SoftmaxState | None" = None,
    *,
    key_mask: Bool[Tensor, "b t"] | None = None,
    cu_seqlens: Int[Tensor, " n"] | None = None,
    slopes: Float[Tensor, " h"] | None = None,
    log_gate: Float[Tensor, "b h t"] | None = None,
    dropout: float = 0.0,
) -> tuple[Float[Tensor, "b h t v"], "SoftmaxState"]:
    """Attend to the past: the keys in `state`, and those up to each query's own.

    Args:
        q, k, v: queries, keys and values of the new tokens.
        state: what an earlier call returned; None at the start of a sequence.
        key_mask: true at real tokens; pads may stand anywhere.
        cu_seqlens: where packed sequences begin, and the last one ends. The batch is then 1, and
            the state has a row for each sequence.
        slopes: what each head takes off a score for every token of distance (ALiBi).
        log_gate: how much of its past each token keeps in each head, as a logarithm, 0 or below.
        dropout: share of the scores to drop.

    Returns:
        The attended values, and the state after the last token.
    """
    _check(q, k, v, key_mask)
    check_same("b h t f", q=q, k=k)
    if cu_seqlens is not None:
        attend = partial(causal_softmax_attention, slopes=slopes, dropout=dropout)
        tokens = {"q": q, "k": k, "v": v, "log_gate": log_gate}
        return run_packed(attend, cu_seqlens, tokens, state, key_mask)
    n_past = 0 if state is None else state.k.shape[2]
    after = SoftmaxState.empty(k, v, log_gate) if state is None else state
    after = after.advance(k=k, v=v, key_mask=key_mask, log_gate=log_gate)
    if n_past == 0 and not traces() and after.mask is None and slopes is None:
        # Told rather than shown that the mask is causal, the fast kernels skip half of the work.
        return _attend(q, k, v, None, dropout, after.log_gate, is_causal=True), after
    visible = None
    if traces() or q.shape[2] > 1:
        visible = torch.arange(n_past + 1, n_past + q.shape[2] + 1, device=q.device)
    sees = _sight(after.k, after.mask, visible)
    if slopes is not None:
        bias = _distance_bias(q, after.k, after.mask, slopes)
        sees = bias if sees is None else bias.masked_fill(~sees, -torch.inf)
    return _attend(q, after.k, after.v, sees, dropout, after.log_gate), after


@state
class SoftmaxState(Recurrent):
    """Every key and value so far, or the last of them."""

    k: Float[Tensor, "b h n f"]
    v: Float[Tensor, "b h n v"]
    mask: Bool[Tensor, "b n"] | None = None
    """True at real tokens; None as long as all of them are."""
    log_gate: Float[Tensor, "b h n"] | None = None
    """Of each token that is kept, 0 at pads; None without gates."""

    @classmethod
    def empty(
        cls,
        k: Float[Tensor, "b h t f"],
        v: Float[Tensor, "b h t v"],
        log_gate: Float[Tensor, "b h t"] | None = None,
    ) -> "SoftmaxState":
        """The state before the first token, for keys, values and gates like these."""
        length = k.new_zeros(k.shape[0], dtype=torch.long)
        if log_gate is not None:
            log_gate = log_gate[:, :, :0].to(accumulator(log_gate))
        return cls(k[:, :, :0], v[:, :, :0], log_gate=log_gate, length=length)

    def advance(
        self,
        *,
        k: Float[Tensor, "b h t f"],
        v: Float[Tensor, "b h t v"],
        key_mask: Bool[Tensor, "b t"] | None = None,
        log_gate: Float[Tensor, "b h t"] | None = None,
    ) -> "SoftmaxState":
        """The state after reading keys, values and gates."""
        for name, new, old in (("k", k, self.k), ("v", v, self.v)):
            if (*new.shape[:2], new.shape[3]) != (*old.shape[:2], old.shape[3]):
                raise InputError(
                    f"{name} is {shape(new)} and the state was made by {name} {shape(old)}: "
                    "batch, heads and width must agree"
                )
        if (log_gate is None) != (self.log_gate is None):
            has, given = ("no gates", "some") if self.log_gate is None else ("gates", "none")
            raise InputError(f"the state was made with {has}, and now {given} are given")
        gates = None
        if log_gate is not None and self.log_gate is not None:
            gates = torch.cat([self.log_gate, mask_tokens(log_gate, key_mask)], dim=2)
        mask = self.mask
        if mask is not None or key_mask is not None:
            mask = torch.cat([_or_ones(self.mask, self.k), _or_ones(key_mask, k)], dim=1)
        n_new = k.shape[2] if key_mask is None else key_mask.sum(dim=1)
        return replace(
            self,
            k=torch.cat([self.k, k], dim=2),
            v=torch.cat([self.v, v], dim=2),
            mask=mask,
            log_gate=gates,
            length=self.length + n_new,
        )

    def last(self, window: int) -> "SoftmaxState":
        """The state with no more than each row's last `window` tokens, and pads between them."""
        if traces():  # Of fewer tokens than that, all.
            return replace(self, k=self.k[:, :, -window:], v=self.v[:, :, -window:])
        start, mask = self.k.shape[2] - window, None
        if start <= 0:
            return self
        if self.mask is not None:
            # A row with pads reaches further back than one without.
            needed = self.mask & (self.places > self.length.unsqueeze(1) - window)
            start = int(needed.any(dim=0).int().argmax())
            mask = needed[:, start:]
        k, v = self.k[:, :, start:], self.v[:, :, start:]
        if start > window:  # A view would keep all that was read in memory.
            k, v = k.clone(), v.clone()
        gates = None if self.log_gate is None else self.log_gate[:, :, start:].clone()
        return replace(self, k=k, v=v, mask=mask, log_gate=gates)

    @property
    def places(self) -> Int[Tensor, "b n"]:
        """How many real tokens had been read with each that is kept, itself counted."""
        real = _or_ones(self.mask, self.k)
        return real.cumsum(dim=1) + (self.length - real.sum(dim=1)).unsqueeze(1)

    def concat(self, others: Iterable["SoftmaxState"]) -> "SoftmaxState":
        """The rows of this state, then those of the others, filled up with pads in front.

        No more of them than the longest row asks for, whatever there was before.
        """
        states = [self, *others]
        n = max(x.k.shape[2] for x in states)
        k, v = (
            torch.cat([F.pad(x, (0, 0, n - x.shape[2], 0)) for x in rows])
            for rows in ([x.k for x in states], [x.v for x in states])
        )
        masks = [_or_ones(x.mask, x.k) for x in states]
        mask = torch.cat([F.pad(x, (n - x.shape[1], 0)) for x in masks])
        # Pads that stood behind go to the front as well, where `rollback` does not count them.
        order = mask.int().argsort(dim=1, stable=True)[:, n - int(mask.sum(dim=1).max()) :]
        k, v = (x.take_along_dim(order[:, None, :, None], dim=2) for x in (k, v))
        gates = [x.log_gate for x in states if x.log_gate is not None]
        log_gate = None
        if gates:
            log_gate = torch.cat([F.pad(x, (n - x.shape[2], 0)) for x in gates])
            log_gate = log_gate.take_along_dim(order[:, None], dim=2)
        length = torch.cat([x.length for x in states])
        return SoftmaxState(k, v, mask.take_along_dim(order, dim=1), log_gate, length=length)

    def merge(self, later: "SoftmaxState") -> "SoftmaxState":
        """The state after A then B, from the state after A and the one after B alone."""
        both = self.advance(k=later.k, v=later.v, key_mask=later.mask, log_gate=later.log_gate)
        return replace(both, length=self.length + later.length)

    def without_values(self) -> "SoftmaxState":
        """What tells how much had been read: its length, and no keys."""
        k, v = (x.new_empty(*x.shape[:2], 0, x.shape[3]) for x in (self.k, self.v))
        return replace(self, k=k, v=v, mask=None, log_gate=None)

    def layout(self) -> dict[str, list[int]]:
        """Heads and width of keys and values: what stays the same as tokens are read."""
        return {name: [x.shape[1], x.shape[3]] for name, x in (("k", self.k), ("v", self.v))}

    def record(self, limit: int = 64) -> "SoftmaxState":
        """The state itself: all tokens that it keeps can be taken back, if none were dropped."""
        return self

    def rollback(self, n: int) -> "SoftmaxState":
        """The state before its last `n` tokens, pads counted."""
        n_kept = self.k.shape[2] - n
        if n < 0 or n_kept < 0:
            raise InputError(f"cannot take back {n} tokens, {self.k.shape[2]} are kept")
        if n and bool((self.length > _or_ones(self.mask, self.k).sum(dim=1)).any()):
            raise InputError(
                f"cannot take back {n} tokens: the state has forgotten those that would come "
                "into the window instead; keep the state from before"
            )
        mask = None if self.mask is None else self.mask[:, :n_kept]
        taken = n if self.mask is None else self.mask[:, n_kept:].sum(dim=1)
        k, v = self.k[:, :, :n_kept], self.v[:, :, :n_kept]
        gates = None if self.log_gate is None else self.log_gate[:, :, :n_kept]
        return replace(self, k=k, v=v, mask=mask, log_gate=gates, length=self.length - taken)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sees: Tensor | None,
    dropout: float,
    log_gate: Tensor | None = None,
    *,
    is_causal: bool = False,
) -> Tensor:
    given: dict[str, Any] = {"dropout_p": dropout, "is_causal": is_causal}
    if log_gate is None:
        with _fitting_kernel():
            return F.scaled_dot_product_attention(q, k, v, attn_mask=sees, **given)
    # With C the running sum of log gates, C_i - C_j comes to a score. C_i is the same for all keys
    # and cancels in the softmax, so it is enough that keys have -C_j as one feature more, and
    # queries a 1: no matrix of biases, and the fast kernels stay. They want values as wide.
    dtype, width, n_value = accumulator(q, k, v), q.shape[-1], v.shape[-1]
    if sees is not None and sees.is_floating_point():
        sees = sees.to(dtype)
    with as_given(q):
        lift = -log_gate.to(dtype).cumsum(dim=-1).unsqueeze(-1)
        q1 = F.pad(q.to(dtype) / math.sqrt(width), (0, 1), value=1.0)
        k1, v0 = torch.cat([k.to(dtype), lift], dim=-1), F.pad(v.to(dtype), (0, 1))
        with _fitting_kernel():
            o = F.scaled_dot_product_attention(q1, k1, v0, attn_mask=sees, scale=1.0, **given)
    return o[..., :n_value].to(v.dtype)


def _fitting_kernel() -> AbstractContextManager[Any]:
    """Plain operations under transforms of `torch.func`, which know no kernels."""
    return sdpa_kernel(SDPBackend.MATH) if transformed() else nullcontext()


def _sight(
    k: Tensor, key_mask: Tensor | None, visible: Tensor | None, window: int | None = None
) -> Tensor | None:
    """True where a query sees a key; None where all see all."""
    sees = None if key_mask is None else key_mask[:, None, None, :]
    if visible is not None:
        rows = visible if visible.ndim == 2 else visible.unsqueeze(0)
        stairs = torch.arange(k.shape[2], device=k.device) < rows[:, None, :, None]
        sees = stairs if sees is None else sees & stairs
    if window is None or k.shape[2] <= window:
        return sees
    # Counted from 1 at the first real key; of the keys that a query may see, the last has `seen`.
    place = _or_ones(key_mask, k).cumsum(dim=1)
    seen = place[:, -1:]
    if visible is not None:
        seen = F.pad(place, (1, 0)).take_along_dim(visible.expand(k.shape[0], -1).long(), dim=1)
    near = place[:, None, None, :] > (seen - window)[:, None, :, None]
    return near if sees is None else sees & near


def _distance_bias(q: Tensor, k: Tensor, key_mask: Tensor | None, slopes: Tensor) -> Tensor:
    """What each key's score loses at each query, the queries being the last of the keys."""
    at = _or_ones(key_mask, k).cumsum(dim=1)
    gap = at[:, None, k.shape[2] - q.shape[2] :, None] - at[:, None, None, :]
    return (-slopes.to(q)[:, None, None]) * gap


def _or_ones(mask: Tensor | None, k: Tensor) -> Tensor:
    """The mask, or for None the one that hides none of the keys."""
    return mask if mask is not None else k.new_ones(k.shape[0], k.shape[2], dtype=torch.bool)


def _check(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> None:
    check_floating(q=q, k=k, v=v)
    check_axes("b h t f", q=q, k=k, v=v)
    check_same("b h * f", q=q, k=k)
    check_same("b h t *", k=k, v=v)
    check_key_mask(key_mask, k)
