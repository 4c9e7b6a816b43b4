"""Linear attention: exp(q . k) gives way to a plain dot product of non-negative features.

    o_i = sum_j a_ij v_j  /  max(sum_j a_ij, eps)        a_ij = (q_i . k_j) (x_i . y_j)

over all j, over j <= i, or over the first `visible_i` of a source (see `staircase`). `q` and `k`
arrive already mapped (see `leap.ops.features`), so nothing here knows of ReLU attention: it is this
one sum under different maps. The re-weighting x_i . y_j, of r numbers per token, tells attentions
apart by where tokens stand:

    none                   r = 0     linear attention
    cos(pi/2 (p_i - s_j))  r = 2     LeaPformer; cosFormer with p = s = position / length
    clocks                 r = 1+2m  places that are travelled, see `leap.ops.travel`

One call is answered by one of several versions, chosen by what it is given:

    reference   the formula, for the tests              step     one token more
    square      all scores at once, for short texts     chunked  causal, in O(t)
    gated       chunked, with a gate for each feature   whole    every query sees every key, in O(t)
    two_way     every query sees every key, and scores fade with distance, in O(t)
    at_once     causal, a few tokens without a loop, for graphs

These are of the backend torch; others, and how one is chosen, are in `leap.ops.backends`.

Axes: b batch, h heads, t tokens (n of the source), f features, e values, r rank.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from leap.errors import InputError
from leap.ops import backends
from leap.ops.checks import check_axes, check_floating, check_key_mask, check_same
from leap.ops.derivatives import transformed
from leap.ops.features import cosine
from leap.ops.fla import causal as fla
from leap.ops.linear import at_once, chunked, gated, square, step, two_way, whole
from leap.ops.linear.call import (
    CHUNK_SIZE,
    Call,
    all_gates,
    checked,
    checked_fade,
    for_kernels,
    gates,
    mapped_by,
    needs_grad,
    real_tokens,
    recorded,
    state_after,
    sums_before,
)
from leap.ops.linear.parts import (
    Tokens,
    mapped,
    precision,
    wide_keys,
    wide_queries,
    without_pads,
)
from leap.ops.linear.reference import (
    causal_linear_attention_reference,
    linear_attention_reference,
    staircase_linear_attention_reference,
)
from leap.ops.linear.state import LinearState, sums
from leap.ops.native import causal as native
from leap.ops.native import step as native_step
from leap.ops.native import whole as native_whole
from leap.ops.packing import run_packed
from leap.ops.state import as_given, count_tokens, mask_tokens
from leap.ops.travel import ClockState, clock, travelled, walked
from leap.ops.triton import causal as triton
from leap.ops.triton import step as triton_step
from leap.ops.triton import whole as triton_whole

__all__ = [
    "LinearState",
    "causal_linear_attention",
    "causal_linear_attention_reference",
    "causal_proportional_attention",
    "causal_travelled_attention",
    "linear_attention",
    "linear_attention_reference",
    "staircase_linear_attention_reference",
    "two_way_linear_attention",
]

KERNELS: dict[str, Any] = {"native": native, "triton": triton, "fla": fla}
"""Backends with kernels of causal attention, all of which are called alike."""
PACKING = ("triton", "fla")
"""Those that read packed rows as they lie; for others `run_packed` makes batches of them."""
STEPS: dict[str, Any] = {"native": native_step, "triton": triton_step}
"""The same for one token."""

Reweighting = tuple[Float[Tensor, "b h t r"], Float[Tensor, "b h _ r"]]
"""x of the queries and y of the keys: scores are multiplied by x_i . y_j."""


def linear_attention(
    q: Float[Tensor, "b h t f"],
    k: Float[Tensor, "b h n f"],
    v: Float[Tensor, "b h n e"],
    *,
    reweighting: Reweighting | None = None,
    key_mask: Bool[Tensor, "b n"] | None = None,
    feature: str | None = None,
    normalise: bool = True,
    eps: float = 1e-6,
    backend: str | None = None,
) -> Float[Tensor, "b h t e"]:
    """Attend from every query to every unmasked key, in O(t + n).

    Args:
        q, k: features of the queries and keys, non-negative for a weighted mean.
        v: values.
        reweighting: x `[b, h, t, r]` and y `[b, h, n, r]`, which multiply scores by x_i . y_j.
        key_mask: true at real keys; the rest count in neither numerator nor denominator.
        feature: a map in `leap.ops.features.FEATURES` that q and k are yet to go through; fused
            with the rest where the backend can. None where they are features already.
        normalise: divide by the sum of scores; without it, the weighted sum itself.
        eps: floor of the normaliser, reached where no key shares a feature with the query.
        backend: what is to compute it, by its name in `leap.ops.backends`; else what suits best.
    """
    return read_and_attend(
        q,
        k,
        v,
        reweighting=reweighting,
        key_mask=key_mask,
        feature=feature,
        normalise=normalise,
        eps=eps,
        backend=backend,
    )[0]


def read_and_attend(
    q: Float[Tensor, "b h t f"],
    k: Float[Tensor, "b h n f"],
    v: Float[Tensor, "b h n e"],
    *,
    reweighting: Reweighting | None = None,
    key_mask: Bool[Tensor, "b n"] | None = None,
    feature: str | None = None,
    normalise: bool = True,
    eps: float = 1e-6,
    backend: str | None = None,
) -> tuple[Float[Tensor, "b h t e"], LinearState]:
    """Attend as `linear_attention` does, and keep the state to read on from.

    The widened features, r times as wide, are never held whole.
    """
    tokens = check_inputs(q, k, v, key_mask, reweighting)
    is_named = backends.is_named(backend, "triton")
    refusals = {
        "native": native_whole.refusal(tokens, None),
        "triton": triton_whole.refusal(tokens, is_named=is_named),
    }
    chosen = backends.choose(backend, refusals | {"reference": None})
    if feature is not None and not (chosen == "native" and feature in native_whole.MAPS):
        tokens, feature = mapped(tokens, feature), None
    q, k, v, *weights = tokens
    x, y = (None if each is None else each.to(precision(tokens)) for each in weights)
    if chosen == "native":
        o, kv, k_sum, _ = native_whole.attend(q, k, v, x, y, key_mask, feature, normalise, eps)
        return o, LinearState(kv=kv, k=k_sum, length=_lengths(v, key_mask))
    if chosen == "triton":
        o, kv, k_sum, *_ = triton_whole.attend(q, k, v, x, y, key_mask, normalise, eps)
        return o, LinearState(kv=kv, k=k_sum, length=_lengths(v, key_mask))
    if chosen == "reference":
        tokens = without_pads(tokens, key_mask)
        fq, fk = wide_queries(tokens), wide_keys(tokens)
        o = linear_attention_reference(fq, fk, tokens.v, normalise=normalise, eps=eps)
        return o, _state_of(fk, tokens.v, key_mask)
    if chosen == "graph" or square.is_cheaper(q, k, v):
        tokens = without_pads(tokens, key_mask)
        o = square.attend(tokens, normalise=normalise, eps=eps)
        return o, _state_of(wide_keys(tokens), tokens.v, key_mask)
    mask = None if key_mask is None else key_mask[:, None, :, None]
    attend = whole.plain if transformed() else whole.attend
    o, kv, k_sum, *_ = attend(q, k, v, tokens.x, tokens.y, mask, precision(tokens), normalise, eps)
    return o, LinearState(kv=kv, k=k_sum, length=_lengths(v, key_mask))


def two_way_linear_attention(
    q: Float[Tensor, "b h t f"],
    k: Float[Tensor, "b h t f"],
    v: Float[Tensor, "b h t e"],
    *,
    log_gate: Float[Tensor, "b h t"] | None = None,
    fade: Sequence[float] | None = None,
    reweighting: Reweighting | None = None,
    key_mask: Bool[Tensor, "b t"] | None = None,
    normalise: bool = True,
    chunk_size: int | None = None,
    eps: float = 1e-6,
    backend: str | None = None,
) -> Float[Tensor, "b h t e"]:
    """Attend from every token to every token, by scores that fade with the distance between them.

    Args:
        q, k, v, reweighting, key_mask, normalise, eps, backend: as in `linear_attention`.
        log_gate: logs of gates, per head: what lies between two tokens fades both ways alike.
        fade: the same as a constant of each head.
        chunk_size: as in `causal_linear_attention`.
    """
    tokens = check_inputs(q, k, v, key_mask, reweighting)
    check_same("b h t", k=k, q=q, log_gate=log_gate)
    rate = None if fade is None else checked_fade(fade, q)
    both = gates(log_gate, rate, tokens, key_mask).squeeze(-1)

    def causally(tokens: Tokens, log_gate: Tensor) -> Tensor:
        options: dict[str, Any] = {"log_gate": log_gate, "chunk_size": chunk_size, "eps": eps}
        return _of_parts(**tokens._asdict(), normalise=False, backend=backend, **options)[0]

    tokens = without_pads(tokens, key_mask)
    o = two_way.attend(tokens, both, causally, normalise=normalise, eps=eps)
    return o.to(v.dtype)


def causal_linear_attention(
    q: Float[Tensor, "b h t f"],
    k: Float[Tensor, "b h t f"],
    v: Float[Tensor, "b h t e"],
    state: LinearState | None = None,
    *,
    reweighting: Reweighting | None = None,
    turn: Float[Tensor, "b h t m"] | None = None,
    key_mask: Bool[Tensor, "b t"] | None = None,
    cu_seqlens: Int[Tensor, " n"] | None = None,
    log_gate: Float[Tensor, "b h t"] | Float[Tensor, "b h t f"] | None = None,
    fade: Sequence[float] | None = None,
    feature: str | None = None,
    normalise: bool = True,
    chunk_size: int | None = None,
    eps: float = 1e-6,
    backend: str | None = None,
) -> tuple[Float[Tensor, "b h t e"], LinearState]:
    """Attend causally in O(t), carrying the past in a state of fixed size.

    Training, prefill and decoding are the same call: pass no state to begin a sequence, and the
    returned state, with as few as one new token, to go on with it.

    Args:
        q, k: features of the queries and keys, non-negative for a weighted mean.
        v: values.
        state: what an earlier call returned, of features r times as wide; None at the start.
        reweighting: x and y, both `[b, h, t, r]`, which multiply scores by x_i . y_j.
        turn: in place of x and y, how far each token turns each of m clocks on, in radians: the
            distance travelled between tokens re-weights their scores (`leap.ops.travel`).
        key_mask: true at real tokens. Pads, wherever they are, change nothing for the others.
        cu_seqlens: where packed sequences begin, and the last one ends, `[0, 3, 5]` for lengths
            3 and 2. The batch is then 1, and the state has a row for each sequence.
        log_gate: log of the forget factor, at most 0, that fades the past before each token is
            added: one per head, or, at a higher cost, one per feature.
        fade: the same as a constant of each head, as ALiBi has it.
        feature: a map in `leap.ops.features.FEATURES` that q and k are yet to go through; fused
            with the rest where the backend can. None where they are features already.
        normalise: divide by the sum of scores; without it, the weighted sum itself.
        chunk_size: tokens attended to at once: more of them make fewer steps, each of more work.
        eps: floor of the normaliser, reached where no key so far shares a feature with the query.
        backend: what is to compute it, by its name in `leap.ops.backends`; else what suits best.

    Returns:
        The attended values, and the state after the last token.
    """
    tokens = check_inputs(q, k, v, key_mask, reweighting)
    check_same("b h t", k=k, q=q, log_gate=log_gate)
    options: dict[str, Any] = {
        "fade": fade,
        "normalise": normalise,
        "chunk_size": chunk_size,
        "eps": eps,
    }
    if cu_seqlens is not None and not _reads_packed(tokens, state, log_gate, backend):
        x, y = reweighting or (None, None)
        packed = {"q": q, "k": k, "v": v, "x": x, "y": y, "turn": turn, "log_gate": log_gate}
        op = partial(_of_parts, feature=feature, backend=backend, **options)
        return run_packed(op, cu_seqlens, packed, state, key_mask)
    last = None
    if turn is not None:
        tokens, last = _travelled(tokens, turn, state, key_mask, cu_seqlens)
    call = checked(
        tokens, state, log_gate=log_gate, key_mask=key_mask, cu_seqlens=cu_seqlens, **options
    )
    if not q.shape[2]:
        return v, call.before if last is None else replace(call.before, angle=last)

    chosen = backends.choose(backend, _refusals(tokens, call.log_gate, state, backend))
    is_one = q.shape[2] == 1 and cu_seqlens is None
    kernel = None if is_one else KERNELS.get(chosen)
    if kernel is None:
        call = mapped_by(call, feature)
        o, after = _version(chosen, call, is_one)(call)
    else:
        if feature not in kernel.MAPS or call.before.trail is not None:
            call, feature = mapped_by(call, feature), None
        packed_at = () if cu_seqlens is None else (call.cu_seqlens,)
        o, _, kv, k_sum, *_ = kernel.attend(
            *for_kernels(call), call.rate, *sums_before(call), feature, normalise, eps, *packed_at
        )
        after = state_after(call, kv, k_sum)
    if call.before.trail is not None:
        after = recorded(call, after, turn)
    return o, after if last is None else replace(after, angle=last)


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
    feature: str | None = None,
    normalise: bool = True,
    chunk_size: int | None = None,
    eps: float = 1e-6,
    backend: str | None = None,
) -> tuple[Float[Tensor, "b h t e"], LinearState]:
    """LeaPformer's causal attention: scores re-weighted by cos(pi/2 (p_i - s_j)).

    Equal to `causal_linear_attention` over `proportional(q, p)` and `proportional(k, s)`, whose
    arguments it shares, but the widened features are never formed for the whole sequence.

    Args:
        q, k, v: as there, before the widening.
        p, s: proportions of the queries and of the keys, from 0 to 1.
        state: what an earlier call of either returned, with features of width 2f.
        key_mask, cu_seqlens, fade, feature, normalise, chunk_size, eps, backend: as there.
        log_gate: as there; a gate for each of the f features fades both of its halves.
    """
    check_inputs(q, k, v, key_mask)
    check_floating(p=p, s=s)
    check_axes("b h t", p=p, s=s)
    check_same("b h t", k=k, p=p, s=s)
    total = precision(Tokens(q, k, v))
    p, s = (mask_tokens(each.to(total), key_mask) for each in (p, s))
    return causal_linear_attention(
        q,
        k,
        v,
        state,
        reweighting=_turned(p, s),
        key_mask=key_mask,
        cu_seqlens=cu_seqlens,
        log_gate=log_gate,
        fade=fade,
        feature=feature,
        normalise=normalise,
        chunk_size=chunk_size,
        eps=eps,
        backend=backend,
    )


def _turned(p: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """The re-weighting by proportions, both of them in one go."""
    x, y = cosine(torch.stack([p, s])).unbind()
    return x, y


def causal_travelled_attention(
    q: Float[Tensor, "b h t f"],
    k: Float[Tensor, "b h t f"],
    v: Float[Tensor, "b h t e"],
    turn: Float[Tensor, "b h t m"],
    state: LinearState | None = None,
    *,
    key_mask: Bool[Tensor, "b t"] | None = None,
    cu_seqlens: Int[Tensor, " n"] | None = None,
    log_gate: Float[Tensor, "b h t"] | Float[Tensor, "b h t f"] | None = None,
    fade: Sequence[float] | None = None,
    feature: str | None = None,
    normalise: bool = True,
    chunk_size: int | None = None,
    eps: float = 1e-6,
    backend: str | None = None,
) -> tuple[Float[Tensor, "b h t e"], LinearState]:
    """Causal attention re-weighted by the distance travelled between tokens (`leap.ops.travel`).

    Args:
        q, k, v: as in `causal_linear_attention`.
        turn: how far each token turns each of m clocks on, in radians: the frequency of the clock
            times the token's step.
        state: what an earlier call returned, with features of width (1 + 2m) f and the clocks.
        key_mask, cu_seqlens, log_gate, fade, feature, normalise, chunk_size, eps, backend: as
            there.
    """
    return causal_linear_attention(
        q,
        k,
        v,
        state,
        turn=turn,
        key_mask=key_mask,
        cu_seqlens=cu_seqlens,
        log_gate=log_gate,
        fade=fade,
        feature=feature,
        normalise=normalise,
        chunk_size=chunk_size,
        eps=eps,
        backend=backend,
    )


def _travelled(
    tokens: Tokens,
    turn: Tensor,
    state: LinearState | None,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tokens, Tensor]:
    """The tokens, re-weighted by where their clocks stand, and where they stand after the last."""
    if tokens.x is not None:
        raise InputError("give either reweighting or turn; clocks are a re-weighting of their own")
    check_floating(turn=turn)
    check_axes("b h t m", turn=turn)
    check_same("b h t", k=tokens.k, turn=turn)
    before = None
    if state is not None:
        if not isinstance(state, LinearState) or state.angle is None:
            raise InputError(
                "the state has no clocks; travelled attention goes on from a state that it returned"
            )
        before = state.angle
    if cu_seqlens is None:
        angles, last = travelled(turn, before, key_mask)
    else:
        clocks = None
        if state is not None and before is not None:
            clocks = ClockState(before, length=state.length)
        angles, walk = walked(turn, clocks, key_mask=key_mask, cu_seqlens=cu_seqlens)
        last = walk.angle
    hands = clock(angles, precision(tokens))
    return tokens._replace(x=hands, y=hands), last


def _reads_packed(
    tokens: Tokens, state: LinearState | None, log_gate: Tensor | None, backend: str | None
) -> bool:
    """Whether the backend that answers reads packed rows as they lie."""
    if isinstance(state, LinearState) and state.trail is not None:
        return False  # What is recorded has a row for each sequence.
    if log_gate is not None and log_gate.ndim == 3:
        log_gate = log_gate.unsqueeze(-1)
    return backends.choose(backend, _refusals(tokens, log_gate, None, backend)) in PACKING


def _refusals(
    tokens: Tokens, log_gate: Tensor | None, state: LinearState | None, backend: str | None
) -> dict[str, str | None]:
    """Of a causal call, by backend."""
    no_state = None if state is None else "the formula begins a sequence, and a state was given"
    is_named = backends.is_named(backend, "triton")
    return {
        "native": native.refusal(tokens, log_gate),
        "triton": triton.refusal(tokens, is_named=is_named),
        "fla": fla.refusal(tokens) if backends.is_named(backend, "fla") else "it was not named",
        "reference": no_state,
    }


def _of_parts(
    x: Tensor | None = None, y: Tensor | None = None, **options: Any
) -> tuple[Tensor, LinearState]:
    """`causal_linear_attention` of what stands by its name, the re-weighting in two parts."""
    weights = None if x is None or y is None else (x, y)
    return causal_linear_attention(reweighting=weights, **options)


def _version(chosen: str, call: Call, is_one: bool) -> Callable[[Call], tuple[Tensor, LinearState]]:
    """Which of the versions in PyTorch answers, or which kernel for one token."""
    if chosen == "reference":
        return _by_the_formula
    if chosen == "graph":
        return at_once.attend
    if is_one and chosen in STEPS and not needs_grad(call):
        return partial(_step_by_a_kernel, STEPS[chosen])
    if is_one:
        return step.attend
    if call.log_gate is not None and call.log_gate.shape[-1] > 1:
        return _with_gates_of_features
    is_short = call.tokens.q.shape[2] <= min(call.chunk_size, CHUNK_SIZE)
    return _in_a_square if call.is_first and is_short else _in_chunks


def _step_by_a_kernel(kernel: Any, call: Call) -> tuple[Tensor, LinearState]:
    """One token, by a kernel."""
    call = call._replace(log_gate=all_gates(call), rate=None)
    o, kv, k_sum = kernel.attend(
        *for_kernels(call), call.before.kv, call.before.k, call.normalise, call.eps
    )
    return o, state_after(call, kv, k_sum)


def _by_the_formula(call: Call) -> tuple[Tensor, LinearState]:
    """A sequence from its beginning, in O(t^2)."""
    gate, tokens = all_gates(call), real_tokens(call)
    fq, fk = wide_queries(tokens), wide_keys(tokens)
    v = tokens.v.to(fk.dtype)
    with as_given(fk):
        o = causal_linear_attention_reference(
            fq, fk, v, log_gate=gate, normalise=call.normalise, eps=call.eps
        )
    after = replace(call.before, trail=None).advance(k=fk, v=v, log_gate=gate)
    return o.to(tokens.v.dtype), replace(after, length=call.before.length + call.n_real)


def _in_a_square(call: Call) -> tuple[Tensor, LinearState]:
    """A short sequence from its beginning: no state is attended to, so scores are all there is."""
    tokens, gate, left = real_tokens(call), call.log_gate, None
    keys, n = wide_keys(tokens), tokens.q.shape[2]
    if gate is not None:
        decay = gate.squeeze(-1).cumsum(2)
        left = square.left_between(decay)
    elif call.rate is not None:
        steps = torch.arange(1, n + 1, dtype=precision(tokens), device=tokens.q.device)
        left = square.left_between(torch.outer(steps.new_tensor(call.rate), steps).unsqueeze(0))
    if left is not None:
        keys = keys * left[..., -1, :, None]  # As the last token sees them.
    sees = square.causal(n, tokens.q.device)
    o = square.attend(tokens, sees=sees, left=left, normalise=call.normalise, eps=call.eps)
    return o, state_after(call, *sums(keys, tokens.v.to(keys.dtype)))


def _in_chunks(call: Call) -> tuple[Tensor, LinearState]:
    """Any tokens, from the beginning of a sequence or after the state of what was before."""
    gate = None if call.log_gate is None else call.log_gate.squeeze(-1)
    tokens = real_tokens(call)
    given = *tokens, gate, call.rate, *sums_before(call), call.chunk_size, call.normalise, call.eps
    if transformed():
        o, kv, k_sum = chunked.plain(*given)
    else:
        o, _, kv, k_sum, *_ = chunked.attend(*given)
    return o, state_after(call, kv, k_sum)


def _with_gates_of_features(call: Call) -> tuple[Tensor, LinearState]:
    """Any tokens, with a gate for each feature."""
    assert call.log_gate is not None
    o, kv, k_sum = gated.attend(
        real_tokens(call),
        call.log_gate,
        call.before.kv,
        call.before.k,
        normalise=call.normalise,
        chunk_size=call.chunk_size,
        eps=call.eps,
    )
    return o, state_after(call, kv, k_sum)


def _state_of(k: Tensor, v: Tensor, key_mask: Tensor | None) -> LinearState:
    """The state after all there is to a sequence so far, 0 at pads."""
    kv, k_sum = sums(k, v.to(k.dtype))
    return LinearState(kv=kv, k=k_sum, length=_lengths(v, key_mask))


def _lengths(v: Tensor, key_mask: Tensor | None) -> Tensor:
    """Real tokens of each row, `[b]`."""
    return torch.zeros(v.shape[0], dtype=torch.long, device=v.device) + count_tokens(v, key_mask)


def check_inputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    reweighting: tuple[Tensor, Tensor] | None = None,
) -> Tokens:
    """What every linear attention asks of its queries, keys, values, re-weighting and mask."""
    check_floating(q=q, k=k, v=v)
    check_axes("b h t width", q=q, k=k, v=v)
    check_same("b h * f", q=q, k=k)
    check_same("b h t", k=k, v=v)
    check_key_mask(key_mask, k)
    if reweighting is None:
        return Tokens(q, k, v)
    x, y = reweighting
    check_floating(x=x, y=y)
    check_axes("b h t r", x=x, y=y)
    check_same("b h t", q=q, x=x)
    check_same("b h t", k=k, y=y)
    check_same("b h * r", x=x, y=y)
    return Tokens(q, k, v, x, y)
