"""Linear attention: exp(q . k) gives way to a plain dot product of non-negative features.

    o_i = sum_j (q_i . k_j) v_j  /  max(sum_j q_i . k_j, eps)

over all j, over j <= i, or over the first `visible_i` of a source (see `staircase`). `q` and `k`
arrive already mapped (see `leap.ops.features`), so nothing here knows of ReLU attention or
cosFormer: they are this one sum under different maps. LeaPformer's map alone has a version of its
own, because its scores can be had at half the width of its features.

Axes: b batch, h heads, t tokens (n of the source), f features, e values.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from leap.errors import InputError
from leap.ops.checks import check_axes, check_floating, check_key_mask, check_same, shape
from leap.ops.features import proportional, widened
from leap.ops.linear import square, whole
from leap.ops.linear.chunked import attend, normalised, unit_scale
from leap.ops.linear.gated import LOWEST, gated_attend
from leap.ops.linear.reference import (
    causal_linear_attention_reference,
    linear_attention_reference,
    staircase_linear_attention_reference,
)
from leap.ops.linear.state import LinearState
from leap.ops.packing import run_packed
from leap.ops.state import accumulator, as_given, count_tokens, mask_tokens

__all__ = [
    "LinearState",
    "causal_linear_attention",
    "causal_linear_attention_reference",
    "causal_proportional_attention",
    "linear_attention",
    "linear_attention_reference",
    "staircase_linear_attention_reference",
]

CHUNK_SIZE = 64


def linear_attention(
    q: Float[Tensor, "b h t f"],
    k: Float[Tensor, "b h n f"],
    v: Float[Tensor, "b h n e"],
    *,
    key_mask: Bool[Tensor, "b n"] | None = None,
    normalise: bool = True,
    eps: float = 1e-6,
) -> Float[Tensor, "b h t e"]:
    """Attend from every query to every unmasked key, in O(t + n).

    Args:
        q, k: features of the queries and keys, non-negative for a weighted mean.
        v: values.
        key_mask: true at real keys; the rest count in neither numerator nor denominator.
        normalise: divide by the sum of scores; without it, the weighted sum itself.
        eps: floor of the normaliser, reached where no key shares a feature with the query.
    """
    check_inputs(q, k, v, key_mask)
    return read_and_attend(q, k, v, key_mask=key_mask, normalise=normalise, eps=eps)[0]


def read_and_attend(
    q: Float[Tensor, "b h t f"],
    k: Float[Tensor, "b h n f"],
    v: Float[Tensor, "b h n e"],
    p: Float[Tensor, "b h t"] | None = None,
    s: Float[Tensor, "b h n"] | None = None,
    *,
    key_mask: Bool[Tensor, "b n"] | None = None,
    normalise: bool = True,
    eps: float = 1e-6,
) -> tuple[Float[Tensor, "b h t e"], LinearState]:
    """Attend from every query to every unmasked key, and keep the state to read on from.

    As `linear_attention`, under LeaPformer's map if there are proportions: then equal to it over
    `proportional(q, p)` and `proportional(k, s)`, which are never held whole.
    """
    check_inputs(q, k, v, key_mask)
    check_same("b h t", q=q, p=p)
    check_same("b h t", k=k, s=s)
    if square.is_cheaper(q, k, v):
        k, v = mask_tokens(k, key_mask), mask_tokens(v, key_mask)
        s = None if s is None else mask_tokens(s, key_mask)
        o = square.attend(q, k, v, p, s, normalise=normalise, eps=eps)
        return o, _state_of(k if s is None else proportional(k, s), v, key_mask)
    mask = None if key_mask is None else key_mask[:, None, :, None]
    o, kv, k_sum, *_ = whole.attend(q, k, v, p, s, mask, accumulator(q, k, v), normalise, eps)
    return o, LinearState(kv=kv, k=k_sum, length=_lengths(v, key_mask))


def causal_linear_attention(
    q: Float[Tensor, "b h t f"],
    k: Float[Tensor, "b h t f"],
    v: Float[Tensor, "b h t e"],
    state: LinearState | None = None,
    *,
    key_mask: Bool[Tensor, "b t"] | None = None,
    cu_seqlens: Int[Tensor, " n"] | None = None,
    log_gate: Float[Tensor, "b h t"] | Float[Tensor, "b h t f"] | None = None,
    fade: Sequence[float] | None = None,
    normalise: bool = True,
    chunk_size: int | None = None,
    eps: float = 1e-6,
) -> tuple[Float[Tensor, "b h t e"], LinearState]:
    """Attend causally in O(t), carrying the past in a state of fixed size.

    Training, prefill and decoding are the same call: pass no state to begin a sequence, and the
    returned state, with as few as one new token, to go on with it.

    Args:
        q, k: features of the queries and keys, non-negative for a weighted mean.
        v: values.
        state: what an earlier call returned; None at the start.
        key_mask: true at real tokens. Pads, wherever they are, change nothing for the others.
        cu_seqlens: where packed sequences begin, and the last one ends, `[0, 3, 5]` for lengths
            3 and 2. The batch is then 1, and the state has a row for each sequence.
        log_gate: log of the forget factor, at most 0, that fades the past before each token is
            added: one a head, or one a feature.
        fade: the same as a constant of each head, from -1 to 0, as ALiBi has it; it costs less.
        normalise: divide by the sum of scores; without it, the weighted sum itself.
        chunk_size: tokens attended to at once: more of them make fewer steps, each of more work.
        eps: floor of the normaliser, reached where no key so far shares a feature with the query.

    Returns:
        The attended values, and the state after the last token.
    """
    check_inputs(q, k, v, key_mask)
    check_same("b h t", k=k, q=q, log_gate=log_gate)
    if fade is not None:
        _check_fade(fade, q)
    is_plain = _is_plain(state, key_mask, cu_seqlens, log_gate)
    if is_plain and q.shape[2] == 1:
        return _step(q, k, v, None, None, state, fade, normalise, eps)
    if fade is not None:
        if is_plain and q.shape[2]:
            return _fading(q, k, v, None, None, state, fade, normalise, chunk_size, eps)
        log_gate = _as_gate(fade, k, log_gate)
    if cu_seqlens is not None:
        op = partial(causal_linear_attention, normalise=normalise, chunk_size=chunk_size, eps=eps)
        tokens = {"q": q, "k": k, "v": v, "log_gate": log_gate}
        return run_packed(op, cu_seqlens, tokens, state, key_mask)

    if state is None and log_gate is None and _is_short(q, chunk_size):
        return _square(q, k, v, None, None, key_mask, None, normalise, eps)
    before = _begin(q, k, v, state, features=k.shape[-1], gated=log_gate is not None)
    if not q.shape[2]:
        return v, before
    k, v = mask_tokens(k, key_mask), mask_tokens(v, key_mask)
    if log_gate is not None:
        log_gate = mask_tokens(_per_feature(log_gate, k), key_mask)
        o, after = _gated(q, k, v, before, key_mask, log_gate, normalise, chunk_size, eps)
    elif q.shape[2] > 1:
        o, after = _chunked(q, k, v, None, None, before, key_mask, normalise, chunk_size, eps)
    else:
        after = before.advance(k=k, v=v, key_mask=key_mask)
        o = after.attend(q, normalise=normalise, eps=eps).to(v.dtype)
    return o, _recorded(before, after, k, v, key_mask, log_gate)


def causal_proportional_attention(
    q: Float[Tensor, "b h t f"],
    k: Float[Tensor, "b h t f"],
    v: Float[Tensor, "b h t e"],
    p: Float[Tensor, "b h t"],
    s: Float[Tensor, "b h t"],
    state: LinearState | None = None,
    *,
    key_mask: Bool[Tensor, "b t"] | None = None,
    cu_seqlens: Int[Tensor, " n"] | None = None,
    log_gate: Float[Tensor, "b h t"] | Float[Tensor, "b h t f"] | None = None,
    fade: Sequence[float] | None = None,
    normalise: bool = True,
    chunk_size: int | None = None,
    eps: float = 1e-6,
) -> tuple[Float[Tensor, "b h t e"], LinearState]:
    """LeaPformer's causal attention: scores re-weighted by cos(pi/2 (p_i - s_j)).

    Equal to `causal_linear_attention` over `proportional(q, p)` and `proportional(k, s)`, whose
    arguments it shares, but the widened features are never formed for the whole sequence.

    Args:
        q, k, v: as there, before the widening.
        p, s: proportions of the queries and of the keys, from 0 to 1.
        state: what an earlier call of either returned, with features of width 2f.
        key_mask, cu_seqlens, fade, normalise, chunk_size, eps: as there.
        log_gate: as there; a gate for each of the f features fades both of its halves.
    """
    check_inputs(q, k, v, key_mask)
    check_floating(p=p, s=s)
    check_same("b h t", k=k, q=q, p=p, s=s, log_gate=log_gate)
    if fade is not None:
        _check_fade(fade, q)
    is_plain = _is_plain(state, key_mask, cu_seqlens, log_gate)
    if is_plain and q.shape[2] == 1:
        return _step(q, k, v, p, s, state, fade, normalise, eps)
    if fade is not None:
        if is_plain and q.shape[2]:
            return _fading(q, k, v, p, s, state, fade, normalise, chunk_size, eps)
        log_gate = _as_gate(fade, k, log_gate)
    if cu_seqlens is not None or log_gate is not None or q.shape[2] <= 1:
        if log_gate is not None and log_gate.ndim == 4:
            log_gate = torch.cat([log_gate, log_gate], dim=-1)
        total = accumulator(q, k, v)
        return causal_linear_attention(
            proportional(q.to(total), p.to(total)),
            proportional(k.to(total), s.to(total)),
            v,
            state,
            key_mask=key_mask,
            cu_seqlens=cu_seqlens,
            log_gate=log_gate,
            normalise=normalise,
            chunk_size=chunk_size,
            eps=eps,
        )

    if state is None and _is_short(q, chunk_size):
        return _square(q, k, v, p, s, key_mask, None, normalise, eps)
    before = _begin(q, k, v, state, features=2 * k.shape[-1])
    k, v = mask_tokens(k, key_mask), mask_tokens(v, key_mask)
    o, after = _chunked(q, k, v, p, s, before, key_mask, normalise, chunk_size, eps)
    if before.trail is not None:
        after = _recorded(before, after, proportional(k, s), v, key_mask, None)
    return o, after


def _is_short(q: Tensor, chunk_size: int | None) -> bool:
    """Whether tokens, of which there is more than one, are not more than a chunk."""
    return 1 < q.shape[2] <= min(_chunk_size(chunk_size), CHUNK_SIZE)


def _square(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    p: Tensor | None,
    s: Tensor | None,
    key_mask: Tensor | None,
    fade: Sequence[float] | None,
    normalise: bool,
    eps: float,
) -> tuple[Tensor, LinearState]:
    """A short sequence from its beginning: no state is attended to, so scores are all there is."""
    k, v = mask_tokens(k, key_mask), mask_tokens(v, key_mask)
    n, left = q.shape[2], None
    rate = torch.tensor(fade or (), dtype=accumulator(q, k, v), device=q.device).view(-1, 1, 1)
    if fade is not None:
        order = torch.arange(n, device=q.device)
        # Towards tokens to come, which are not seen, it would grow without bounds.
        left = torch.exp(rate * (order.unsqueeze(-1) - order).clamp_min(0))
    sees = square.causal(n, q.device)
    o = square.attend(q, k, v, p, s, sees=sees, left=left, normalise=normalise, eps=eps)
    if left is not None:
        k = k * left[:, -1, :, None]  # As the last token sees it.
    after = _state_of(k if s is None else proportional(k, s), v, key_mask)
    if fade is not None:
        after = replace(after, log_decay=(n * rate).squeeze(-1).expand_as(after.k))
    return o, after


def _chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    p: Tensor | None,
    s: Tensor | None,
    before: LinearState,
    key_mask: Tensor | None,
    normalise: bool,
    chunk_size: int | None,
    eps: float,
) -> tuple[Tensor, LinearState]:
    size = _chunk_size(chunk_size)
    o, _, kv, k_sum, *_ = attend(q, k, v, p, s, None, before.kv, before.k, size, normalise, eps)
    length = before.length + count_tokens(k, key_mask)
    return o, LinearState(kv=kv, k=k_sum, log_decay=before.log_decay, length=length)


def _is_plain(state: LinearState | None, *others: Tensor | None) -> bool:
    """Whether there are tokens and nothing else to heed: no pads, packing or gates, no trail."""
    is_noted = isinstance(state, LinearState) and state.trail is not None
    return not is_noted and all(other is None for other in others)


def _step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    p: Tensor | None,
    s: Tensor | None,
    state: LinearState | None,
    fade: Sequence[float] | None,
    normalise: bool,
    eps: float,
) -> tuple[Tensor, LinearState]:
    """One token: decoding, where the fewest calls are the fastest."""
    width = k.shape[-1] if s is None else 2 * k.shape[-1]
    before = _begin(q, k, v, state, features=width, gated=fade is not None)
    total = before.kv.dtype
    q_, k_, v_ = q.to(total), k.to(total), v.to(total)
    if p is not None and s is not None:
        q_, k_ = widened(torch.stack([q_, k_]), torch.stack([p, s]).to(total))
    kv, k_sum, log_decay = before.kv, before.k, before.log_decay
    if fade is not None:
        assert log_decay is not None  # `_begin` saw to it.
        rate = k_sum.new_tensor(fade).unsqueeze(-1)
        kept = rate.exp()
        kv, k_sum, log_decay = kv * kept.unsqueeze(-1), k_sum * kept, log_decay + rate
    after = LinearState(
        kv=torch.addcmul(kv, k_.mT, v_),
        k=k_sum + k_.squeeze(2),
        log_decay=log_decay,
        length=before.length + 1,
    )
    return after.attend(q_, normalise=normalise, eps=eps).to(v.dtype), after


def _check_fade(fade: Sequence[float], q: Tensor) -> None:
    if len(fade) != q.shape[1] or not all(-1 <= rate <= 0 for rate in fade):
        raise InputError(f"fade={tuple(fade)} must hold {q.shape[1]} rates from -1 to 0")


def _as_gate(fade: Sequence[float], k: Tensor, log_gate: Tensor | None) -> Tensor:
    """The same as a gate at each token, on top of those that there are."""
    rate = torch.tensor(fade, dtype=accumulator(k), device=k.device)
    if log_gate is None:
        return rate.view(1, -1, 1).expand(k.shape[:3])
    return log_gate + rate.view(1, -1, *[1] * (log_gate.ndim - 2))


def _fading(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    p: Tensor | None,
    s: Tensor | None,
    state: LinearState | None,
    fade: Sequence[float],
    normalise: bool,
    chunk_size: int | None,
    eps: float,
) -> tuple[Tensor, LinearState]:
    if state is None and _is_short(q, chunk_size):
        return _square(q, k, v, p, s, None, fade, normalise, eps)
    width = k.shape[-1] if s is None else 2 * k.shape[-1]
    before = _begin(q, k, v, state, features=width, gated=True)
    size = _chunk_size(chunk_size)
    rates = list(fade)
    o, _, kv, k_sum, *_ = attend(q, k, v, p, s, rates, before.kv, before.k, size, normalise, eps)
    assert before.log_decay is not None  # `_begin` saw to it.
    n, rate = q.shape[2], before.k.new_tensor(rates).unsqueeze(-1)
    log_decay = before.log_decay + n * rate
    return o, LinearState(kv=kv, k=k_sum, log_decay=log_decay, length=before.length + n)


def _gated(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    before: LinearState,
    key_mask: Tensor | None,
    log_gate: Tensor,
    normalise: bool,
    chunk_size: int | None,
    eps: float,
) -> tuple[Tensor, LinearState]:
    total = before.kv.dtype
    log_gate = log_gate.to(total).clamp_min(LOWEST)
    scale = unit_scale(q.to(total))
    num, den, kv, k_sum = gated_attend(
        q * scale, k.to(total), v.to(total), log_gate, before.kv, before.k, _chunk_size(chunk_size)
    )
    o = normalised(num, den, eps * scale) if normalise else num / scale
    assert before.log_decay is not None  # `_begin` saw to it.
    log_decay = before.log_decay + log_gate.sum(2)
    length = before.length + count_tokens(k, key_mask)
    return o.to(v.dtype), LinearState(kv=kv, k=k_sum, log_decay=log_decay, length=length)


def _state_of(k: Tensor, v: Tensor, key_mask: Tensor | None) -> LinearState:
    """The state after all there is to a sequence so far, 0 at pads."""
    total = accumulator(k, v)
    k, v = k.to(total), v.to(total)
    with as_given(k):
        kv = k.mT @ v
    return LinearState(kv=kv, k=k.sum(2), length=_lengths(v, key_mask))


def _lengths(v: Tensor, key_mask: Tensor | None) -> Tensor:
    """Real tokens of each row, `[b]`."""
    return torch.zeros(len(v), dtype=torch.long, device=v.device) + count_tokens(v, key_mask)


def _per_feature(log_gate: Tensor, k: Tensor) -> Tensor:
    """A gate `[b, h, t, 1]` or `[b, h, t, f]`."""
    log_gate = log_gate.unsqueeze(-1) if log_gate.ndim == 3 else log_gate
    if log_gate.ndim != 4 or log_gate.shape[-1] not in (1, k.shape[-1]):
        b, h, t, f = k.shape
        raise InputError(
            f"log_gate is {shape(log_gate)}; expected one a head, [{b}, {h}, {t}], "
            f"or one a feature, [{b}, {h}, {t}, {f}]"
        )
    return log_gate


def _recorded(
    before: LinearState,
    after: LinearState,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    log_gate: Tensor | None,
) -> LinearState:
    """The state after, with the tokens read added to the trail, if there is one."""
    if before.trail is None:
        return after
    if key_mask is None:
        key_mask = torch.ones(k.shape[0], k.shape[2], dtype=torch.bool, device=k.device)
    tokens = {"k": k, "v": v, "key_mask": key_mask.unsqueeze(1)}
    return after.after(before, **tokens if log_gate is None else tokens | {"log_gate": log_gate})


def _begin(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: LinearState | None,
    *,
    features: int,
    gated: bool = False,
) -> LinearState:
    """The state to go on from: the one given, if it fits these inputs, or an empty one."""
    expected = (*k.shape[:2], features, v.shape[-1])
    if state is None:
        state = LinearState.empty(*expected, dtype=accumulator(q, k, v), device=v.device)
    if not isinstance(state, LinearState):
        raise InputError(
            f"state is a {type(state).__name__}; linear attention goes on from a LinearState"
        )
    if state.kv.shape != expected:
        raise InputError(
            f"state.kv is {shape(state.kv)}; with k {shape(k)} and v {shape(v)} "
            f"it must be {list(expected)}"
        )
    if gated and state.log_decay is None:
        return replace(state, log_decay=torch.zeros_like(state.k))
    return state


def _chunk_size(chunk_size: int | None) -> int:
    if chunk_size is not None and chunk_size < 1:
        raise InputError(f"chunk_size={chunk_size} holds no token; give 1 or more, or None")
    return chunk_size or CHUNK_SIZE


def check_inputs(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> None:
    """What every linear attention asks of its queries, keys, values and mask."""
    check_floating(q=q, k=k, v=v)
    check_axes("b h t width", q=q, k=k, v=v)
    check_same("b h * f", q=q, k=k)
    check_same("b h t", k=k, v=v)
    check_key_mask(key_mask, k)
