"""One causal call of linear attention, checked: what each version is given, and the state after.

Axes: b batch, h heads, t tokens, f features, e values, r rank of the re-weighting.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from leap.errors import InputError
from leap.ops.checks import shape
from leap.ops.linear.gated import LOWEST
from leap.ops.linear.parts import (
    Tokens,
    mapped,
    precision,
    state_width,
    wide_keys,
    without_pads,
)
from leap.ops.linear.state import LinearState
from leap.ops.packing import check_cu_seqlens
from leap.ops.state import count_tokens, finest, mask_tokens

CHUNK_SIZE = 64


class Call(NamedTuple):
    """What a version attends with, to return attended values `[b, h, t, e]` and the state after."""

    tokens: Tokens
    before: LinearState
    """The state before the first token, empty at the start."""
    is_first: bool
    """Whether it is empty because a sequence begins."""
    log_gate: Tensor | None
    """Logs of gates `[b, h, t, 1]`, or of widened features `[b, h, t, r f]`, 0 at pads."""
    rate: list[float] | None
    """The same as a constant of each head; never both."""
    key_mask: Tensor | None
    n_real: Tensor | int
    """Real tokens of each row."""
    cu_seqlens: Tensor | None
    """Where packed sequences begin, for versions that read them as they lie."""
    normalise: bool
    chunk_size: int
    eps: float


def sums_before(call: Call) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """The sums of the state before; None at the start."""
    return (None, None) if call.is_first else (call.before.kv, call.before.k)


def needs_grad(call: Call) -> bool:
    """Whether someone may ask for a gradient."""
    given = (*call.tokens, call.before.kv, call.before.k, call.log_gate)
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in given)


def mapped_by(call: Call, feature: str | None) -> Call:
    """The same with queries and keys gone through a feature map, if there is one to do."""
    return call if feature is None else call._replace(tokens=mapped(call.tokens, feature))


def real_tokens(call: Call) -> Tokens:
    """The tokens with 0 for what is read at pads."""
    return without_pads(call.tokens, call.key_mask)


def all_gates(call: Call) -> Tensor | None:
    """Gates, of a constant rate too; None where nothing fades."""
    if call.rate is None:
        return call.log_gate
    return gates(None, call.rate, call.tokens, call.key_mask)


def for_kernels(call: Call) -> tuple[Any, ...]:
    """Tokens, gates and mask as kernels take them; gates are `[b, h, t]` or `[b, h, t, f]`."""
    q, k, v, *weights = call.tokens
    x, y = (None if each is None else each.to(precision(call.tokens)) for each in weights)
    gate = call.log_gate
    if gate is not None:
        # Of a feature they are the same for each re-weighting.
        gate = gate.squeeze(-1) if gate.shape[-1] == 1 else gate[..., : k.shape[-1]]
    return q, k, v, x, y, gate, call.key_mask


def state_after(call: Call, kv: Tensor, k_sum: Tensor) -> LinearState:
    """The state after all tokens, from its sums."""
    log_decay, packed = call.before.log_decay, call.cu_seqlens
    length = call.before.length
    if packed is not None:
        k, mask = call.tokens.k, call.key_mask
        real = k.new_ones(1, k.shape[2], dtype=torch.long) if mask is None else mask.long()
        length = length + _sums_of_sequences(real, packed, 1).squeeze(0)
        gate = all_gates(call)
        if gate is not None and log_decay is not None:
            faded = _sums_of_sequences(gate.to(log_decay.dtype), packed, 2)
            log_decay = log_decay + faded.squeeze(0).transpose(0, 1)
    else:
        length = length + call.n_real
        if log_decay is not None and call.log_gate is not None:
            log_decay = log_decay + call.log_gate.sum(2)
        elif log_decay is not None and call.rate is not None:
            n_tokens = call.tokens.k.shape[2]
            log_decay = log_decay + n_tokens * log_decay.new_tensor(call.rate).unsqueeze(-1)
    before = call.before
    return replace(before, kv=kv, k=k_sum, log_decay=log_decay, length=length, trail=None)


def recorded(call: Call, after: LinearState, turn: Tensor | None) -> LinearState:
    """The state after, with its tokens on record as those before it are."""
    tokens, mask = real_tokens(call), call.key_mask
    if mask is None:
        mask = tokens.k.new_ones(tokens.k.shape[0], tokens.k.shape[2], dtype=torch.bool)
    read = {"k": wide_keys(tokens), "v": tokens.v, "key_mask": mask.unsqueeze(1)}
    noted = {"log_gate": call.log_gate, "turn": turn}
    read |= {name: x for name, x in noted.items() if x is not None}
    return after.after(call.before, **read)


def checked(
    tokens: Tokens,
    state: LinearState | None,
    *,
    log_gate: Tensor | None,
    fade: Sequence[float] | None,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    normalise: bool,
    chunk_size: int | None,
    eps: float,
) -> Call:
    """A call of tokens that have been checked, if all else fits them."""
    if chunk_size is not None and chunk_size < 1:
        raise InputError(f"chunk_size={chunk_size} holds no token; give 1 or more, or None")
    # Not len(), which is a fixed number where a graph is traced.
    n_rows = tokens.k.shape[0]
    if cu_seqlens is not None:
        n_rows = len(check_cu_seqlens(cu_seqlens, tokens.k)) - 1
        cu_seqlens = cu_seqlens.to(tokens.k.device)
    before = begin(tokens, state, n_rows)
    rate = None if fade is None else checked_fade(fade, tokens.q)
    if log_gate is not None or (rate and (key_mask is not None or before.trail is not None)):
        log_gate, rate = gates(log_gate, rate, tokens, key_mask), None
    if before.log_decay is None and (log_gate is not None or rate):
        n_gate = 1 if log_gate is None else log_gate.shape[-1]
        before = replace(before, log_decay=before.k.new_zeros(*before.k.shape[:2], n_gate))
    return Call(
        tokens,
        before,
        is_first=state is None,
        log_gate=log_gate,
        rate=rate,
        key_mask=key_mask,
        n_real=count_tokens(tokens.k, key_mask),
        cu_seqlens=cu_seqlens,
        normalise=normalise,
        chunk_size=chunk_size or CHUNK_SIZE,
        eps=eps,
    )


def checked_fade(fade: Sequence[float], q: Tensor) -> list[float]:
    """Rates of heads, if there are as many as heads and none grows."""
    if len(fade) != q.shape[1] or not all(rate <= 0 for rate in fade):
        raise InputError(f"fade={tuple(fade)} must hold {q.shape[1]} rates of at most 0")
    return [max(rate, LOWEST) for rate in fade]


def gates(
    log_gate: Tensor | None, rate: list[float] | None, tokens: Tokens, key_mask: Tensor | None
) -> Tensor:
    """Gates of heads `[b, h, t, 1]`, or of the widened features, any fade on top; 0 at pads."""
    b, h, t, f = tokens.k.shape
    gate = tokens.k.new_zeros(b, h, t, 1, dtype=precision(tokens))
    if log_gate is not None:
        gate = (log_gate.unsqueeze(-1) if log_gate.ndim == 3 else log_gate).to(precision(tokens))
        if gate.ndim != 4 or gate.shape[-1] not in (1, f):
            raise InputError(
                f"log_gate is {shape(log_gate)}; expected one per head, [{b}, {h}, {t}], "
                f"or one per feature, [{b}, {h}, {t}, {f}]"
            )
    if rate is not None:
        gate = gate + gate.new_tensor(rate).view(1, h, 1, 1)
    gate = mask_tokens(gate.clamp_min(LOWEST), key_mask)
    return gate if gate.shape[-1] == 1 else gate.repeat(1, 1, 1, state_width(tokens) // f)


def begin(tokens: Tokens, state: LinearState | None, rows: int) -> LinearState:
    """The state to go on from: the one given, if it fits these tokens, or an empty one."""
    k, v = tokens.k, tokens.v
    expected = (rows, k.shape[1], state_width(tokens), v.shape[-1])
    if state is None:
        return LinearState.empty(*expected, device=v.device)
    if not isinstance(state, LinearState):
        raise InputError(
            f"state is a {type(state).__name__}; linear attention goes on from a LinearState"
        )
    if state.kv.shape != expected:
        raise InputError(
            f"state.kv is {shape(state.kv)}; with k {shape(k)} and v {shape(v)} "
            f"it must be {list(expected)}"
        )
    total = finest(v.device)  # A file of an earlier version holds less.
    return (
        state
        if state.kv.dtype == total
        else replace(state, kv=state.kv.to(total), k=state.k.to(total))
    )


def _sums_of_sequences(x: Tensor, cu_seqlens: Tensor, axis: int) -> Tensor:
    """Sums over the tokens of each of packed sequences, which take the place of the tokens."""
    zero = torch.zeros_like(x.narrow(axis, 0, 1))
    return (
        torch.cat([zero, x.cumsum(axis)], axis).index_select(axis, cu_seqlens.long()).diff(dim=axis)
    )
