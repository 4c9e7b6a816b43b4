"""Additive attention: each token has one focus, and a token's output is a mean weighted by it.

    o_i = sum_j exp(focus_j) v_j  /  sum_j exp(focus_j)        j <= i, and j > i - window

The weight of a token does not depend on who looks at it, which makes the whole O(t) for any
window, and lets the weights be read off as importances. This is the sum at the heart of LEAP and of
Fastformer; where the focus and the values come from is up to the layers.

Axes: b batch, h heads, t tokens, p values.
"""

from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from leap.errors import InputError
from leap.ops import backends
from leap.ops.additive.blocked import attend, plain
from leap.ops.additive.reference import additive_attention_reference
from leap.ops.additive.state import FocusState, WindowState
from leap.ops.checks import check_axes, check_floating, check_key_mask, check_same, shape
from leap.ops.derivatives import transformed
from leap.ops.native import additive as native
from leap.ops.packing import check_cu_seqlens, run_packed
from leap.ops.state import Recurrent, accumulator, count_tokens, finest, mask_tokens
from leap.ops.triton import additive as triton
from leap.ops.triton import packed_additive as packed

__all__ = [
    "FocusState",
    "WindowState",
    "additive_attention",
    "additive_attention_reference",
    "additive_pool",
    "surrounding_attention",
]

NO_FOCUS = -1e30
"""Logit of a token that is there to be counted, and has no weight beside any other."""


def additive_attention(
    focus: Float[Tensor, "b h t"],
    v: Float[Tensor, "b h t p"],
    state: FocusState | WindowState | None = None,
    *,
    window: int | None = None,
    key_mask: Bool[Tensor, "b t"] | None = None,
    cu_seqlens: Int[Tensor, " n"] | None = None,
    backend: str | None = None,
) -> tuple[Float[Tensor, "b h t p"], FocusState | WindowState]:
    """Average the past by focus, in O(t) whatever the window.

    Training, prefill and decoding are the same call: pass no state to begin a sequence, and the
    returned state, with as few as one new token, to go on with it.

    Args:
        focus: logits, of any size: no weight over- or underflows.
        v: values.
        state: what an earlier call returned; None at the start.
        window: how many tokens each one sees, itself included; None for the whole past.
        key_mask: true at real tokens. Pads, wherever they are, change nothing for the others: a
            window counts real tokens alone. Their own output is 0.
        cu_seqlens: where packed sequences begin, and the last one ends, `[0, 3, 5]` for lengths
            3 and 2. The batch is then 1, and the state has a row for each sequence.
        backend: what is to compute it, by its name in `leap.ops.backends`; else what suits best.

    Returns:
        The means, and the state after the last token: a FocusState, or with a window a
        WindowState.
    """
    _check(focus, v, key_mask)
    if window is not None and window < 1:
        raise InputError(f"window={window} sees no token; give 1 or more, or None for all")
    if cu_seqlens is not None:
        if _reads_packed(focus, v, state, backend):
            return _attend_packed(focus, v, state, window, key_mask, cu_seqlens)
        op = partial(additive_attention, window=window, backend=backend)
        return run_packed(op, cu_seqlens, {"focus": focus, "v": v}, state, key_mask)
    before = _begin(focus, v, state, window, v.shape[0])
    if focus.shape[2] == 0:
        return v, before
    after: FocusState | WindowState
    chosen = backends.choose(backend, _refusals(focus, v, state, key_mask, backend))
    if chosen == "graph":
        o, after = _at_once(focus, v, before, window)
    elif chosen == "reference":
        o = additive_attention_reference(focus, v, window, key_mask)
        after = before.advance(focus=focus, v=v, key_mask=key_mask)
    elif focus.shape[2] == 1:
        o, after = _step(focus, v, before, key_mask)
    else:
        past: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None)
        if state is not None:
            past = before.elements()
        if chosen == "native":
            past = tuple(None if x is None else x.float() for x in past)  # type: ignore[assignment]
            o, _, peaks, _, sum, mass = native.attend(focus.float(), v, key_mask, *past, window)
            peak = peaks[..., -1]
        elif transformed():
            o, peak, sum, mass = plain(focus, v, key_mask, *past, window)
        else:
            by = triton.attend if chosen == "triton" else attend
            o, _, peaks, _, sum, mass = by(focus, v, key_mask, *past, window)
            peak = peaks[..., -1]
        if state is None and window is None:
            length = before.length + count_tokens(v, key_mask)
            after = FocusState.made_of(peak, mass, sum, length)
        else:
            after = before.advance(focus=focus, v=v, key_mask=key_mask)
    if before.trail is None:
        return o, after
    if key_mask is None:
        key_mask = torch.ones_like(focus[:, 0], dtype=torch.bool)
    return o, after.after(before, focus=focus, v=v, key_mask=key_mask.unsqueeze(1))


def additive_pool(
    focus: Float[Tensor, "b h t"],
    v: Float[Tensor, "b h t p"],
    *,
    key_mask: Bool[Tensor, "b t"] | None = None,
) -> Float[Tensor, "b h p"]:
    """Average the whole sequence by focus: one mean a head, as Fastformer's global vectors.

    Args:
        focus: logits.
        v: values.
        key_mask: true at real tokens; the mean of none is 0.
    """
    _check(focus, v, key_mask)
    return FocusState.of(focus, v, key_mask).mean().to(v.dtype)


def surrounding_attention(
    focus: Float[Tensor, "b h t"],
    v: Float[Tensor, "b h t p"],
    *,
    window: int | None = None,
    key_mask: Bool[Tensor, "b t"] | None = None,
    cu_seqlens: Int[Tensor, " n"] | None = None,
) -> Float[Tensor, "b h t p"]:
    """Average by focus what lies on both sides, in O(t) whatever the window.

        o_i = sum_j exp(focus_j) v_j  /  sum_j exp(focus_j)        |i - j| < window

    Args:
        focus: logits.
        v: values.
        window: how far each token sees to either side, itself counted; None for everything.
        key_mask: true at real tokens. Pads, wherever they are, change nothing for the others.
        cu_seqlens: where packed sequences begin, and the last one ends; the batch is then 1.
    """
    _check(focus, v, key_mask)
    if window is not None and window < 1:
        raise InputError(f"window={window} sees no token; give 1 or more, or None for all")
    if cu_seqlens is not None:

        def op(focus: Tensor, v: Tensor, state: None, key_mask: Tensor) -> tuple[Tensor, Recurrent]:
            o = surrounding_attention(focus, v, window=window, key_mask=key_mask)
            return o, Recurrent(length=key_mask.sum(dim=1))

        return run_packed(op, cu_seqlens, {"focus": focus, "v": v}, None, key_mask)[0]
    t = focus.shape[2]
    if window is None or window >= t:
        return additive_pool(focus, v, key_mask=key_mask).unsqueeze(2).expand_as(v)
    if key_mask is None:
        return _surrounding(focus, v, window)
    # With real tokens in front, pads behind them are no more than the end of the sequence.
    order = (~key_mask).int().argsort(dim=1, stable=True)[:, None]
    focus = focus.to(accumulator(focus)).masked_fill(~key_mask.unsqueeze(1), NO_FOCUS)
    v = mask_tokens(v, key_mask).take_along_dim(order.unsqueeze(-1), dim=2)
    o = _surrounding(focus.take_along_dim(order, dim=2), v, window)
    return o.take_along_dim(order.argsort(dim=-1).unsqueeze(-1), dim=2)


def _surrounding(focus: Tensor, v: Tensor, window: int) -> Tensor:
    """A window on both sides of a token is one up to the token at its end."""
    more = window - 1
    focus = F.pad(focus.to(accumulator(focus)), (0, more), value=NO_FOCUS)
    o, _ = additive_attention(focus, F.pad(v, (0, 0, 0, more)), window=window + more)
    return o[:, :, more:]


def _refusals(
    focus: Tensor,
    v: Tensor,
    state: FocusState | WindowState | None,
    key_mask: Tensor | None,
    backend: str | None,
) -> dict[str, str | None]:
    """Of a call, by backend."""
    no_state = None if state is None else "the formula begins a sequence, and a state was given"
    return {
        "native": native.refusal(focus, v),
        "triton": triton.refusal(focus, v, is_named=backends.is_named(backend, "triton")),
        "reference": no_state,
        "graph": None if key_mask is None else "it knows no pads",
    }


def _reads_packed(
    focus: Tensor, v: Tensor, state: FocusState | WindowState | None, backend: str | None
) -> bool:
    """Whether the backend that answers reads packed rows as they lie."""
    if focus.shape[2] == 0 or (state is not None and state.trail is not None):
        return False  # What is recorded has a row for each sequence.
    return backends.choose(backend, _refusals(focus, v, None, None, backend)) == "triton"


def _attend_packed(
    focus: Tensor,
    v: Tensor,
    state: FocusState | WindowState | None,
    window: int | None,
    key_mask: Tensor | None,
    cu_seqlens: Tensor,
) -> tuple[Tensor, FocusState | WindowState]:
    """Packed sequences as they lie; only a state that was given, or of a window, is padded."""
    n = len(check_cu_seqlens(cu_seqlens, focus)) - 1
    before = _begin(focus, v, state, window, n)
    past = None if state is None else before.elements()
    starts = cu_seqlens.to(device=v.device, dtype=torch.long)
    o, peak, sum, mass = packed.attend(focus, v, key_mask, past, starts, window)
    if state is None and window is None:
        real = torch.ones_like(focus[0, 0]) if key_mask is None else key_mask[0]
        n_before = F.pad(real.long().cumsum(0), (1, 0))
        length = n_before[starts].diff()
        return o, FocusState.made_of(peak, mass, sum, length)

    tokens, given = {"focus": focus, "v": v}, cast(FocusState, before)  # Or a WindowState.
    return o, run_packed(_advance, starts, tokens, given, key_mask)[1]


def _advance(
    focus: Tensor, v: Tensor, state: FocusState | WindowState, key_mask: Tensor
) -> tuple[Tensor, Any]:
    """The values, and the state after them."""
    return v, state.advance(focus=focus, v=v, key_mask=key_mask)


def _step(
    focus: Tensor, v: Tensor, before: FocusState | WindowState, key_mask: Tensor | None
) -> tuple[Tensor, FocusState | WindowState]:
    """One token, with no more work than there is to it."""
    if isinstance(before, FocusState):
        seen, after = before, None
    else:
        seen = FocusState.of(before.focus, before.v)
        after = before.advance(focus=focus, v=v, key_mask=key_mask)
    seen = seen.advance(focus=focus, v=v, key_mask=key_mask)
    return mask_tokens(seen.mean().unsqueeze(2), key_mask).to(v.dtype), after or seen


def _at_once(
    focus: Tensor, v: Tensor, before: FocusState | WindowState, window: int | None
) -> tuple[Tensor, FocusState | WindowState]:
    """A few tokens by all of their weights, without a loop: for graphs."""
    past = before.reserve()
    logit, values, mass = past.elements()
    exact = finest(v.device)
    n_past, t = logit.shape[2], focus.shape[2]
    logit = torch.cat([logit.to(exact), focus.to(exact)], dim=2)
    values = torch.cat([values.to(exact), v.to(exact)], dim=2)
    mass = torch.cat([mass.to(exact), torch.ones_like(focus, dtype=exact)], dim=2)
    row = torch.arange(n_past, n_past + t, device=v.device).unsqueeze(1)
    element = torch.arange(n_past + t, device=v.device)
    hidden = element > row
    if window is not None:
        hidden = hidden | (element <= row - window)
    seen = logit.unsqueeze(2).masked_fill(hidden, -torch.inf)
    weights = (seen - seen.amax(dim=-1, keepdim=True)).exp()
    o = (weights @ values) / (weights @ mass.unsqueeze(-1))
    if isinstance(past, FocusState):
        return o.to(v.dtype), past.advance(focus=focus, v=v)
    kept = (new[:, :, t:].to(old.dtype) for new, old in ((logit, past.focus), (values, past.v)))
    return o.to(v.dtype), WindowState(*kept, length=past.length + t)


def _begin(
    focus: Tensor,
    v: Tensor,
    state: FocusState | WindowState | None,
    window: int | None,
    b: int,
) -> FocusState | WindowState:
    """The state of b rows to go on from: the one given, if it fits the inputs, or an empty one."""
    _, h, _, p = v.shape
    kind = FocusState if window is None else WindowState
    sizes = (b, h, p) if window is None else (b, h, window, p)
    if state is None:
        if window is None:
            return FocusState.empty(b, h, p, device=v.device)
        return WindowState.empty(b, h, window, p, dtype=accumulator(focus, v), device=v.device)
    if not isinstance(state, kind):
        raise InputError(
            f"state is a {type(state).__name__}; "
            f"with window={window} attention goes on from a {kind.__name__}"
        )
    if state.sizes() != sizes:
        raise InputError(
            f"state is for batch, heads, {'' if window is None else 'window, '}values "
            f"{list(state.sizes())}; with window={window} and v {shape(v)} it must be {list(sizes)}"
        )
    return state


def _check(focus: Tensor, v: Tensor, key_mask: Tensor | None) -> None:
    check_floating(focus=focus, v=v)
    check_axes("b h t", focus=focus)
    check_axes("b h t p", v=v)
    check_same("b h t", focus=focus, v=v)
    check_key_mask(key_mask, focus, "focus")
