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

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from leap.errors import InputError
from leap.ops import backends
from leap.ops.checks import check_axes, check_floating, check_key_mask, check_same, shape
from leap.ops.derivatives import transformed
from leap.ops.features import cosine
from leap.ops.fla import causal as fla
from leap.ops.linear import at_once, chunked, gated, square, step, two_way, whole
from leap.ops.linear.gated import LOWEST
from leap.ops.linear.parts import (
    Tokens,
    mapped,
    precision,
    state_width,
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
from leap.ops.packing import check_cu_seqlens, run_packed
from leap.ops.state import as_given, count_tokens, finest, mask_tokens
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

CHUNK_SIZE = 64
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
    rate = None if fade is None else _checked_fade(fade, q)
    gates = _gates(log_gate, rate, tokens, key_mask).squeeze(-1)

    def causally(tokens: Tokens, log_gate: Tensor) -> Tensor:
        return _attend(
            tokens,
            None,
            key_mask=None,
            log_gate=log_gate,
            fade=None,
            feature=None,
            normalise=False,
            chunk_size=chunk_size,
            eps=eps,
            backend=backend,
        )[0]

    tokens = without_pads(tokens, key_mask)
    o = two_way.attend(tokens, gates, causally, normalise=normalise, eps=eps)
    return o.to(v.dtype)


def causal_linear_attention(
    q: Float[Tensor, "b h t f"],
    k: Float[Tensor, "b h t f"],
    v: Float[Tensor, "b h t e"],
    state: LinearState | None = None,
    *,
    reweighting: Reweighting | None = None,
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
    options: dict[str, Any] = {
        "fade": fade,
        "feature": feature,
        "normalise": normalise,
        "chunk_size": chunk_size,
        "eps": eps,
        "backend": backend,
    }
    if cu_seqlens is not None and not _reads_packed(tokens, state, log_gate, backend):
        x, y = reweighting or (None, None)
        packed = {"q": q, "k": k, "v": v, "x": x, "y": y, "log_gate": log_gate}
        return run_packed(partial(_packed, **options), cu_seqlens, packed, state, key_mask)
    options |= {"key_mask": key_mask, "log_gate": log_gate, "cu_seqlens": cu_seqlens}
    return _attend(tokens, state, **options)


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
    check_floating(turn=turn)
    check_axes("b h t m", turn=turn)
    tokens = check_inputs(q, k, v, key_mask)
    check_same("b h t", k=k, turn=turn)
    options: dict[str, Any] = {
        "fade": fade,
        "feature": feature,
        "normalise": normalise,
        "chunk_size": chunk_size,
        "eps": eps,
        "backend": backend,
    }
    before = _clocks_of(state)
    if cu_seqlens is None:
        angles, last = travelled(turn, before, key_mask)
    elif _reads_packed(tokens, state, log_gate, backend):
        clocks = None
        if state is not None and before is not None:
            clocks = ClockState(before, length=state.length)
        angles, walk = walked(turn, clocks, key_mask=key_mask, cu_seqlens=cu_seqlens)
        last = walk.angle
    else:
        packed = {"q": q, "k": k, "v": v, "turn": turn, "log_gate": log_gate}
        attend = partial(causal_travelled_attention, **options)
        return run_packed(attend, cu_seqlens, packed, state, key_mask)
    hands = clock(angles, precision(tokens))
    tokens = tokens._replace(x=hands, y=hands)
    options |= {"key_mask": key_mask, "log_gate": log_gate, "cu_seqlens": cu_seqlens}
    o, after = _attend(tokens, state, turn=turn, **options)
    return o, replace(after, angle=last)


def _clocks_of(state: LinearState | None) -> Tensor | None:
    if state is None:
        return None
    if not isinstance(state, LinearState) or state.angle is None:
        raise InputError(
            "the state has no clocks; travelled attention goes on from a state that it returned"
        )
    return state.angle


def _reads_packed(
    tokens: Tokens, state: LinearState | None, log_gate: Tensor | None, backend: str | None
) -> bool:
    """Whether the backend that answers reads packed rows as they lie."""
    if isinstance(state, LinearState) and state.trail is not None:
        return False  # What is recorded has a row for each sequence.
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


def _packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: LinearState | None,
    key_mask: Tensor | None,
    x: Tensor | None = None,
    y: Tensor | None = None,
    log_gate: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, LinearState]:
    """`_attend` for a batch that packed sequences were gathered into."""
    return _attend(Tokens(q, k, v, x, y), state, key_mask=key_mask, log_gate=log_gate, **options)


def _attend(
    tokens: Tokens,
    state: LinearState | None,
    *,
    key_mask: Tensor | None,
    log_gate: Tensor | None,
    fade: Sequence[float] | None,
    feature: str | None,
    normalise: bool,
    chunk_size: int | None,
    eps: float,
    backend: str | None,
    cu_seqlens: Tensor | None = None,
    turn: Tensor | None = None,
) -> tuple[Tensor, LinearState]:
    """Attend causally by the version that suits what is given; of `turn` a record is kept."""
    check_same("b h t", k=tokens.k, q=tokens.q, log_gate=log_gate)
    size = _chunk_size(chunk_size)
    starts = None if cu_seqlens is None else check_cu_seqlens(cu_seqlens, tokens.k)
    # Not len(), which is a fixed number where a graph is traced.
    before = _begin(tokens, state, tokens.k.shape[0] if starts is None else len(starts) - 1)
    rate = None if fade is None else _checked_fade(fade, tokens.q)
    if log_gate is not None or (rate and (key_mask is not None or before.trail is not None)):
        log_gate, rate = _gates(log_gate, rate, tokens, key_mask), None
    if before.log_decay is None and (log_gate is not None or rate):
        gates = 1 if log_gate is None else log_gate.shape[-1]
        before = replace(before, log_decay=before.k.new_zeros(*before.k.shape[:2], gates))
    if not tokens.q.shape[2]:
        return tokens.v, before
    chosen = backends.choose(backend, _refusals(tokens, log_gate, state, backend))
    is_one = tokens.q.shape[2] == 1 and cu_seqlens is None
    kernel = None if is_one else KERNELS.get(chosen)
    is_fused = kernel is not None and feature in kernel.MAPS
    if feature is not None and not (is_fused and before.trail is None):
        tokens, feature = mapped(tokens, feature), None
    if chosen not in KERNELS:
        tokens = without_pads(tokens, key_mask)
    n_real = count_tokens(tokens.k, key_mask)

    if chosen == "reference":
        o, after = _by_the_formula(tokens, before, log_gate, rate, n_real, normalise, eps)
    elif chosen == "graph":
        gate = _gates(None, rate, tokens, key_mask) if rate is not None else log_gate
        o, after = at_once.attend(tokens, before, gate, n_real=n_real, normalise=normalise, eps=eps)
    elif kernel is not None:
        o, after = _by_a_kernel(
            kernel,
            tokens,
            before,
            log_gate,
            rate,
            key_mask,
            feature,
            normalise,
            cu_seqlens=cu_seqlens,
            is_first=state is None,
            eps=eps,
        )
    elif chosen in STEPS and not _needs_grad(tokens, before, log_gate):
        o, after = _step_by_a_kernel(
            STEPS[chosen], tokens, before, log_gate, rate, key_mask, normalise, eps
        )
    elif is_one:
        tokens = without_pads(tokens, key_mask)
        gate = None if log_gate is None else log_gate.squeeze(2)
        if rate is not None:
            gate = tokens.k.new_tensor(rate, dtype=precision(tokens)).view(1, -1, 1)
        o, after = step.attend(tokens, before, gate, n_real=n_real, normalise=normalise, eps=eps)
    elif log_gate is not None and log_gate.shape[-1] > 1:
        o, after = _with_gates_of_features(tokens, before, log_gate, n_real, normalise, size, eps)
    else:
        gate = None if log_gate is None else log_gate.squeeze(-1)
        if state is None and _is_short(tokens.q, size):
            o, after = _in_a_square(tokens, before, gate, rate, n_real, normalise, eps)
        else:
            options: dict[str, Any] = {"is_first": state is None, "chunk_size": size, "eps": eps}
            o, after = _in_chunks(tokens, before, gate, rate, n_real, normalise, **options)
    if before.trail is None:
        return o, after
    tokens = without_pads(tokens, key_mask)
    if key_mask is None:
        key_mask = tokens.k.new_ones(tokens.k.shape[0], tokens.k.shape[2], dtype=torch.bool)
    read = {"k": wide_keys(tokens), "v": tokens.v, "key_mask": key_mask.unsqueeze(1)}
    noted = {"log_gate": log_gate, "turn": turn}
    return o, after.after(before, **read, **{n: x for n, x in noted.items() if x is not None})


def _by_a_kernel(
    kernel: Any,
    tokens: Tokens,
    before: LinearState,
    log_gate: Tensor | None,
    rate: list[float] | None,
    key_mask: Tensor | None,
    feature: str | None,
    normalise: bool,
    *,
    cu_seqlens: Tensor | None,
    is_first: bool,
    eps: float,
) -> tuple[Tensor, LinearState]:
    """Any tokens, by a kernel, which reads pads as 0 itself."""
    q, k, v, *weights = tokens
    x, y = (None if each is None else each.to(precision(tokens)) for each in weights)
    gate = _gate_of_kernels(log_gate, k)
    past = (None, None) if is_first else (before.kv, before.k)
    if cu_seqlens is not None:
        cu_seqlens = cu_seqlens.to(k.device)
    packed = () if cu_seqlens is None else (cu_seqlens,)
    o, _, kv, k_sum, *_ = kernel.attend(
        q, k, v, x, y, gate, key_mask, rate, *past, feature, normalise, eps, *packed
    )
    if cu_seqlens is None:
        return o, _moved_on(
            before, kv, k_sum, log_gate, rate, k.shape[2], count_tokens(k, key_mask)
        )
    if rate is not None:
        log_gate = _gates(None, rate, tokens, key_mask)
    return o, _moved_on_packed(before, kv, k_sum, log_gate, key_mask, cu_seqlens, k)


def _moved_on_packed(
    before: LinearState,
    kv: Tensor,
    k_sum: Tensor,
    log_gate: Tensor | None,
    key_mask: Tensor | None,
    cu_seqlens: Tensor,
    k: Tensor,
) -> LinearState:
    """`_moved_on` for each of packed sequences."""
    real = k.new_ones(1, k.shape[2], dtype=torch.long) if key_mask is None else key_mask.long()
    length = before.length + _sums_of_sequences(real, cu_seqlens, 1).squeeze(0)
    log_decay = before.log_decay
    if log_gate is not None and log_decay is not None:
        faded = _sums_of_sequences(log_gate.to(log_decay.dtype), cu_seqlens, 2)
        log_decay = log_decay + faded.squeeze(0).transpose(0, 1)
    return replace(before, kv=kv, k=k_sum, log_decay=log_decay, length=length, trail=None)


def _sums_of_sequences(x: Tensor, cu_seqlens: Tensor, axis: int) -> Tensor:
    """Sums over the tokens of each of packed sequences, which take the place of the tokens."""
    zero = torch.zeros_like(x.narrow(axis, 0, 1))
    return (
        torch.cat([zero, x.cumsum(axis)], axis).index_select(axis, cu_seqlens.long()).diff(dim=axis)
    )


def _gate_of_kernels(log_gate: Tensor | None, k: Tensor) -> Tensor | None:
    """Gates per head `[b, h, t]`, or per feature `[b, h, t, f]`, the same for each re-weighting."""
    if log_gate is None or log_gate.shape[-1] == 1:
        return None if log_gate is None else log_gate.squeeze(-1)
    return log_gate[..., : k.shape[-1]]


def _needs_grad(tokens: Tokens, before: LinearState, log_gate: Tensor | None) -> bool:
    """Whether someone may ask for a gradient."""
    given = (*tokens, before.kv, before.k, log_gate)
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in given)


def _step_by_a_kernel(
    kernel: Any,
    tokens: Tokens,
    before: LinearState,
    log_gate: Tensor | None,
    rate: list[float] | None,
    key_mask: Tensor | None,
    normalise: bool,
    eps: float,
) -> tuple[Tensor, LinearState]:
    """One token, by a kernel."""
    q, k, v, *weights = tokens
    x, y = (None if each is None else each.to(precision(tokens)) for each in weights)
    if rate is not None:
        rates = q.new_tensor(rate, dtype=precision(tokens))
        log_gate = rates.view(1, -1, 1, 1).expand(*q.shape[:3], 1)
    gate = _gate_of_kernels(log_gate, k)
    o, kv, k_sum = kernel.attend(q, k, v, x, y, gate, key_mask, before.kv, before.k, normalise, eps)
    return o, _moved_on(before, kv, k_sum, log_gate, None, 1, count_tokens(k, key_mask))


def _by_the_formula(
    tokens: Tokens,
    before: LinearState,
    log_gate: Tensor | None,
    rate: list[float] | None,
    n_real: Tensor | int,
    normalise: bool,
    eps: float,
) -> tuple[Tensor, LinearState]:
    """A sequence from its beginning, in O(t^2)."""
    if rate is not None:
        log_gate = _gates(None, rate, tokens, None)
    fq, fk = wide_queries(tokens), wide_keys(tokens)
    v = tokens.v.to(fk.dtype)
    with as_given(fk):
        o = causal_linear_attention_reference(
            fq, fk, v, log_gate=log_gate, normalise=normalise, eps=eps
        )
    after = replace(before, trail=None).advance(k=fk, v=v, log_gate=log_gate)
    return o.to(tokens.v.dtype), replace(after, length=before.length + n_real)


def _is_short(q: Tensor, chunk_size: int) -> bool:
    """Whether tokens are not more than a chunk."""
    return q.shape[2] <= min(chunk_size, CHUNK_SIZE)


def _in_a_square(
    tokens: Tokens,
    before: LinearState,
    log_gate: Tensor | None,
    rate: list[float] | None,
    n_real: Tensor | int,
    normalise: bool,
    eps: float,
) -> tuple[Tensor, LinearState]:
    """A short sequence from its beginning: no state is attended to, so scores are all there is."""
    n, left, log_decay = tokens.q.shape[2], None, before.log_decay
    keys = wide_keys(tokens)
    if log_gate is not None:
        decay = log_gate.cumsum(2)
    elif rate is not None:
        steps = torch.arange(1, n + 1, dtype=precision(tokens), device=tokens.q.device)
        decay = torch.outer(steps.new_tensor(rate), steps).unsqueeze(0)
    if log_decay is not None and (log_gate is not None or rate is not None):
        left = square.left_between(decay)
        keys = keys * left[..., -1, :, None]  # As the last token sees them.
        log_decay = log_decay + decay[..., -1:]
    sees = square.causal(n, tokens.q.device)
    o = square.attend(tokens, sees=sees, left=left, normalise=normalise, eps=eps)
    read = _state_of(keys, tokens.v, None)
    length = before.length + n_real
    return o, replace(before, kv=read.kv, k=read.k, log_decay=log_decay, length=length, trail=None)


def _in_chunks(
    tokens: Tokens,
    before: LinearState,
    log_gate: Tensor | None,
    rate: list[float] | None,
    n_real: Tensor | int,
    normalise: bool,
    *,
    is_first: bool,
    chunk_size: int,
    eps: float,
) -> tuple[Tensor, LinearState]:
    """Any tokens, from the beginning of a sequence or after the state of what was before."""
    past = (None, None) if is_first else (before.kv, before.k)
    given = *tokens, log_gate, rate, *past, chunk_size, normalise, eps
    if transformed():
        o, kv, k_sum = chunked.plain(*given)
    else:
        o, _, kv, k_sum, *_ = chunked.attend(*given)
    gate = None if log_gate is None else log_gate.unsqueeze(-1)
    return o, _moved_on(before, kv, k_sum, gate, rate, tokens.k.shape[2], n_real)


def _moved_on(
    before: LinearState,
    kv: Tensor,
    k_sum: Tensor,
    log_gate: Tensor | None,
    rate: list[float] | None,
    n_tokens: int,
    n_real: Tensor | int,
) -> LinearState:
    """The state after tokens, from its sums; gates have an axis of heads, 1, or of features."""
    log_decay = before.log_decay
    if log_decay is not None and log_gate is not None:
        log_decay = log_decay + log_gate.sum(2)
    elif log_decay is not None and rate is not None:
        log_decay = log_decay + n_tokens * log_decay.new_tensor(rate).unsqueeze(-1)
    length = before.length + n_real
    return replace(before, kv=kv, k=k_sum, log_decay=log_decay, length=length, trail=None)


def _with_gates_of_features(
    tokens: Tokens,
    before: LinearState,
    log_gate: Tensor,
    n_real: Tensor | int,
    normalise: bool,
    chunk_size: int,
    eps: float,
) -> tuple[Tensor, LinearState]:
    options: dict[str, Any] = {"normalise": normalise, "chunk_size": chunk_size, "eps": eps}
    o, kv, k_sum = gated.attend(tokens, log_gate, before.kv, before.k, **options)
    return o, _moved_on(before, kv, k_sum, log_gate, None, tokens.k.shape[2], n_real)


def _checked_fade(fade: Sequence[float], q: Tensor) -> list[float]:
    if len(fade) != q.shape[1] or not all(rate <= 0 for rate in fade):
        raise InputError(f"fade={tuple(fade)} must hold {q.shape[1]} rates of at most 0")
    return [max(rate, LOWEST) for rate in fade]


def _gates(
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


def _state_of(k: Tensor, v: Tensor, key_mask: Tensor | None) -> LinearState:
    """The state after all there is to a sequence so far, 0 at pads."""
    kv, k_sum = sums(k, v.to(k.dtype))
    return LinearState(kv=kv, k=k_sum, length=_lengths(v, key_mask))


def _lengths(v: Tensor, key_mask: Tensor | None) -> Tensor:
    """Real tokens of each row, `[b]`."""
    return torch.zeros(v.shape[0], dtype=torch.long, device=v.device) + count_tokens(v, key_mask)


def _begin(tokens: Tokens, state: LinearState | None, rows: int) -> LinearState:
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


def _chunk_size(chunk_size: int | None) -> int:
    if chunk_size is not None and chunk_size < 1:
        raise InputError(f"chunk_size={chunk_size} holds no token; give 1 or more, or None")
    return chunk_size or CHUNK_SIZE


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
