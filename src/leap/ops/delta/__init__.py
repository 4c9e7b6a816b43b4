"""The gated delta rule: a state that corrects what it holds of a key, in place of adding to it.

    S_t = a_t (I - b_t k_t k_t^T) S_{t-1} + b_t k_t v_t^T        o_t = q_t S_t

    a_t = exp(l_t), l_t <= 0   the forget gate, one per head
    b_t in (0, 1)              beta, the share by which what k_t recalls gives way to v_t
    |k_t| = 1                  or the state may grow without bounds

From Gated Delta Networks: Improving Mamba2 with Delta Rule (Yang, Kautz, Hatamizadeh, 2024, arXiv
2412.06464). With l = 0 it is DeltaNet (Yang et al., 2024, arXiv 2406.06484).

Axes: b batch, h heads, t tokens, f features, e values.
"""

from dataclasses import replace
from functools import partial

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from leap.errors import InputError
from leap.ops.backends import traces
from leap.ops.checks import check_axes, check_floating, check_key_mask, check_same, shape
from leap.ops.delta.chunked import attend
from leap.ops.delta.reference import causal_delta_attention_reference
from leap.ops.linear.gated import LOWEST
from leap.ops.packing import run_packed
from leap.ops.state import (
    Recurrent,
    accumulator,
    as_given,
    count_tokens,
    finest,
    mask_tokens,
    state,
)

__all__ = ["DeltaState", "causal_delta_attention", "causal_delta_attention_reference"]

CHUNK_SIZE = 32
AT_ONCE = 64
"""The most tokens that a graph takes at once."""


@state
class DeltaState(Recurrent):
    """The matrix that maps keys to values, in float32 (float64 for float64 inputs)."""

    s: Float[Tensor, "b h f e"]

    @classmethod
    def empty(
        cls,
        batch: int,
        heads: int,
        features: int,
        values: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> "DeltaState":
        """The state before the first token."""
        return cls(
            s=torch.zeros(batch, heads, features, values, dtype=dtype, device=device),
            length=torch.zeros(batch, dtype=torch.long, device=device),
        )

    def advance(
        self,
        *,
        k: Float[Tensor, "b h t f"],
        v: Float[Tensor, "b h t e"],
        beta: Float[Tensor, "b h t"],
        log_gate: Float[Tensor, "b h t"] | None = None,
        key_mask: Bool[Tensor, "b t"] | Bool[Tensor, "b 1 t"] | None = None,
    ) -> "DeltaState":
        """Read tokens without attending to anything: the state after them."""
        mask = None if key_mask is None else key_mask.flatten(1)
        before = replace(self, trail=None)
        return causal_delta_attention(k, k, v, beta, before, log_gate=log_gate, key_mask=mask)[1]

    def merge(self, later: "DeltaState") -> "DeltaState":
        """Refused: what B leaves of A is a product of matrices, which B's state does not hold."""
        raise InputError(
            "states of the delta rule cannot be merged: what later tokens leave of an earlier "
            "state is a matrix per head, which is not kept; read them on from the earlier state"
        )


def causal_delta_attention(
    q: Float[Tensor, "b h t f"],
    k: Float[Tensor, "b h t f"],
    v: Float[Tensor, "b h t e"],
    beta: Float[Tensor, "b h t"],
    state: DeltaState | None = None,
    *,
    log_gate: Float[Tensor, "b h t"] | None = None,
    key_mask: Bool[Tensor, "b t"] | None = None,
    cu_seqlens: Int[Tensor, " n"] | None = None,
    chunk_size: int | None = None,
) -> tuple[Float[Tensor, "b h t e"], DeltaState]:
    """Attend causally by the gated delta rule in O(t), carrying the past in a state of fixed size.

    Training, prefill and decoding are the same call: pass no state to begin a sequence, and the
    returned state, with as few as one new token, to go on with it.

    Args:
        q: queries. The op does not scale them.
        k: keys of unit length.
        v: values.
        beta: from 0 to 1, how far what the state holds of a key gives way to the value.
        state: what an earlier call returned; None at the start.
        log_gate: log of the forget factor, at most 0, that fades the past before each token is
            read; None to forget nothing but what is overwritten.
        key_mask: true at real tokens. Pads, wherever they are, change nothing for the others.
        cu_seqlens: where packed sequences begin, and the last one ends, `[0, 3, 5]` for lengths
            3 and 2. The batch is then 1, and the state has a row for each sequence.
        chunk_size: tokens computed at once: more of them make fewer steps, each of more work.

    Returns:
        The attended values, and the state after the last token.
    """
    check_floating(q=q, k=k, v=v, beta=beta, log_gate=log_gate)
    check_axes("b h t width", q=q, k=k, v=v)
    check_axes("b h t", beta=beta, log_gate=log_gate)
    check_same("b h t f", q=q, k=k)
    check_same("b h t", k=k, v=v, beta=beta, log_gate=log_gate)
    check_key_mask(key_mask, k)
    if chunk_size is not None and chunk_size < 1:
        raise InputError(f"chunk_size={chunk_size} holds no token; give 1 or more, or None")
    if cu_seqlens is not None:
        op = partial(causal_delta_attention, chunk_size=chunk_size)
        tokens = {"q": q, "k": k, "v": v, "beta": beta, "log_gate": log_gate}
        return run_packed(op, cu_seqlens, tokens, state, key_mask)

    before = _begin(q, k, v, state)
    if not q.shape[2]:
        return v, before
    k, v, beta = (mask_tokens(x, key_mask) for x in (k, v, beta))
    log_gate = None if log_gate is None else mask_tokens(log_gate, key_mask)
    total = before.s.dtype
    inputs = q.to(total), k.to(total), v.to(total), beta.to(total)
    gate = None if log_gate is None else log_gate.to(total).clamp_min(LOWEST)
    with as_given(q):
        if traces():
            o, s = _at_once(*inputs, gate, before.s)
        elif q.shape[2] == 1:
            o, s = _step(*inputs, gate, before.s)
        else:
            o, s = attend(*inputs, gate, before.s, min(chunk_size or CHUNK_SIZE, q.shape[2]))
    after = DeltaState(s=s, length=before.length + count_tokens(k, key_mask))
    if before.trail is not None:
        if key_mask is None:
            key_mask = torch.ones(k.shape[0], k.shape[2], dtype=torch.bool, device=k.device)
        if log_gate is None:
            log_gate = torch.zeros_like(beta)
        read = {"k": k, "v": v, "beta": beta, "log_gate": log_gate}
        after = after.after(before, **read, key_mask=key_mask.unsqueeze(1))
    return o.to(v.dtype), after


def _step(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_gate: Tensor | None, s: Tensor
) -> tuple[Tensor, Tensor]:
    """One token: decoding, where the fewest calls are the fastest."""
    if log_gate is not None:
        s = s * log_gate.exp().unsqueeze(-1)
    change = (v - k @ s) * beta.unsqueeze(-1)
    s = torch.addcmul(s, k.mT, change)
    return q @ s, s


def _at_once(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_gate: Tensor | None, s: Tensor
) -> tuple[Tensor, Tensor]:
    """Up to `AT_ONCE` tokens without a loop over them, for graphs; see `chunked` for the formulas.

    The triangular system is solved by its inverse. Where that of the blocks A and C on the diagonal
    is known, that of [[A, 0], [B, C]] has -C^-1 B A^-1 in the corner: from single tokens on, blocks
    twice as large each time. All is as exact as solving row by row.
    """
    n = q.shape[2]
    place = torch.arange(n, device=q.device)
    gate = torch.zeros_like(beta) if log_gate is None else log_gate
    # Else a difference of sums would lose its digits behind a gate that forgets all.
    decay = gate.to(finest(q.device)).cumsum(2).unsqueeze(-1)
    between = (decay - decay.mT).clamp_max(0).exp().to(q.dtype)
    between = between.masked_fill(place > place[:, None], 0)
    written, since = k * beta.unsqueeze(-1), decay.exp().to(q.dtype)
    system = (written @ k.mT) * between
    inverse = torch.eye(AT_ONCE, dtype=q.dtype, device=q.device)[:n, :n]
    for size in (2**i for i in range(AT_ONCE.bit_length() - 1)):
        mine, pair = place // size, place // (2 * size)
        is_corner = (pair[:, None] == pair) & (mine[:, None] > mine)
        corner = system.masked_fill(~is_corner, 0)
        inverse = inverse - inverse @ corner @ inverse
    change = inverse @ ((v - (k * since) @ s) * beta.unsqueeze(-1))
    o = (q * since) @ s + ((q @ k.mT) * between) @ change
    kept = k * (decay[:, :, -1:] - decay).exp().to(q.dtype)
    return o, s * since[:, :, -1:] + kept.mT @ change


def _begin(q: Tensor, k: Tensor, v: Tensor, state: DeltaState | None) -> DeltaState:
    """The state to go on from: the one given, if it fits these inputs, or an empty one."""
    expected = (*k.shape[:2], k.shape[-1], v.shape[-1])
    if state is None:
        return DeltaState.empty(*expected, dtype=accumulator(q, k, v), device=v.device)
    if not isinstance(state, DeltaState):
        raise InputError(
            f"state is a {type(state).__name__}; the delta rule goes on from a DeltaState"
        )
    if state.s.shape != expected:
        raise InputError(
            f"state.s is {shape(state.s)}; with k {shape(k)} and v {shape(v)} "
            f"it must be {list(expected)}"
        )
    return state
