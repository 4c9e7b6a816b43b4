"""Additive attention of packed sequences by Triton, read as they lie: see kernels/additive.py.

The sum is over elements, as in `leap.ops.additive.blocked`: what was before a sequence, and then
its tokens. Elements of all sequences lie end to end.

Axes: h heads, t elements, k elements of the past, p values; n sequences.
"""

import math
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from leap.ops.additive import blocked
from leap.ops.additive.blocked import ceiling_over, sliding_max
from leap.ops.derivatives import differentiable_again, gradients
from leap.ops.state import accumulator, as_given
from leap.ops.triton.additive import summed


def attend(
    focus: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    past: tuple[Tensor, Tensor, Tensor] | None,
    cu_seqlens: Tensor,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Attend to the past of each sequence and to its tokens.

    Args:
        focus, v: logits `[1, h, t]` and values `[1, h, t, p]`.
        key_mask: true at real tokens `[1, t]`. A window counts these alone; pads get 0.
        past: logits `[n, h, k]`, values `[n, h, k, p]` and masses of what was before, or None.
        cu_seqlens: where sequences begin and the last one ends, `[n + 1]`.
        window: how many a token sees, its own the last, or None for all up to its own.

    Returns:
        The attended values `[1, h, t, p]`, and M `[n, h]`, N `[n, h, p]` and Z `[n, h]` of the last
        token of each sequence.
    """
    with as_given(v):
        logit, values = focus[0].to(accumulator(focus, v)), v[0]
        if key_mask is not None:
            logit = logit.masked_fill(~key_mask, -math.inf)
            values = values.masked_fill(~key_mask[0, :, None], 0)
        place = order = None
        if key_mask is not None and window is not None:  # Real tokens first, in each sequence.
            own = _sequence_of(cu_seqlens, logit.shape[1])
            order = (2 * own + ~key_mask[0]).argsort(stable=True)
            logit, values = logit[:, order], values[:, order]
        mass = torch.ones_like(logit)
        if past is not None:
            k = past[0].shape[2]
            place, joined = _joined(cu_seqlens, k, logit.shape[1])
            logit, values, mass = (
                torch.cat([old.transpose(0, 1).flatten(1, 2).to(logit.dtype), new], 1)[:, joined]
                for old, new in zip(past, (logit, values, mass), strict=True)
            )
            cu_seqlens = cu_seqlens + k * torch.arange(len(cu_seqlens), device=v.device)
        o, peak, _, sum_last, mass_last = attend_op(logit, values, mass, cu_seqlens, window)
        o = o.to(v.dtype)
        if place is not None:
            o = o[:, place]
        if order is not None:
            o = o[:, order.argsort()]
        if key_mask is not None:
            o = o.masked_fill(~key_mask[0, :, None], 0)
        last, is_empty = _last(cu_seqlens)
        peak_last = peak[:, last].masked_fill(is_empty, -math.inf).T
    return o.unsqueeze(0), peak_last, sum_last, mass_last


@torch.library.custom_op("leap::triton_packed_additive_attention", mutates_args=())
def attend_op(
    logit: Tensor, values: Tensor, mass: Tensor, cu_seqlens: Tensor, window: int | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Means `[h, t, p]`, M and 1 / Z `[h, t]`; N `[n, h, p]` and Z `[n, h]` of the last elements.

    Logits and masses are `[h, t]`, values `[h, t, p]`.
    """
    peak = sliding_max(logit, window, _n_before(cu_seqlens, logit.shape[1]))
    peak = peak.clone() if peak is logit else peak  # No output of an op is one of its inputs.
    sums = _sums(ceiling_over(peak), logit, values, mass, cu_seqlens, window, backwards=False)
    # The highest weight is 1, so only the mass of a row that sees nothing is below.
    inverse = sums[..., -1].clamp_min(1).reciprocal()
    last, is_empty = _last(cu_seqlens)
    ends = sums[:, last].masked_fill(is_empty[:, None], 0).transpose(0, 1)
    o = sums[..., :-1] * inverse.unsqueeze(-1)
    n_last, z_last = _copied(ends[..., :-1]), _copied(ends[..., -1])
    return o, peak, inverse, n_last, z_last


@torch.library.custom_op("leap::triton_packed_additive_attention_backward", mutates_args=())
def attend_backward(
    do: Tensor,
    dn_last: Tensor | None,
    dz_last: Tensor | None,
    logit: Tensor,
    values: Tensor,
    mass: Tensor,
    cu_seqlens: Tensor,
    o: Tensor,
    peak: Tensor,
    inverse: Tensor,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of logits, values and masses."""
    dn = do * inverse.unsqueeze(-1)
    e = (dn * o).sum(-1)
    last, is_empty = _last(cu_seqlens)
    last = last[~is_empty]  # No two sequences then have the same.
    if dn_last is not None:
        dn[:, last] += dn_last[~is_empty].transpose(0, 1)
    if dz_last is not None:
        e[:, last] -= dz_last[~is_empty].T
    sums = _sums(-logit, -ceiling_over(peak), dn, e, cu_seqlens, window, backwards=True)
    dvalues, dmass = sums[..., :-1], -sums[..., -1]
    dlogit = (values * dvalues).sum(-1) + mass * dmass
    return dlogit, values.new_empty(values.shape).copy_(dvalues), dmass


def _sums(
    ceiling: Tensor,
    logit: Tensor,
    values: Tensor,
    mass: Tensor,
    cu_seqlens: Tensor,
    window: int | None,
    *,
    backwards: bool,
) -> Tensor:
    by = partial(summed, cu_seqlens=cu_seqlens)
    [(_, sums)] = blocked.gather(
        ceiling, logit, values, mass, window, backwards=backwards, summed=by
    )
    return sums


def _copied(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def _sequence_of(cu_seqlens: Tensor, t: int) -> Tensor:
    """The sequence that each element is in, `[t]`."""
    place = torch.arange(t, device=cu_seqlens.device)
    return torch.searchsorted(cu_seqlens[1:], place, right=True)


def _n_before(cu_seqlens: Tensor, t: int) -> Tensor:
    """How many elements of its sequence each one has before it, `[t]`."""
    place = torch.arange(t, device=cu_seqlens.device)
    return place - cu_seqlens[_sequence_of(cu_seqlens, t)]


def _last(cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """The last element of each sequence, and which of them have none, `[n]`."""
    return (cu_seqlens[1:] - 1).clamp_min(0), cu_seqlens.diff() == 0


def _joined(cu_seqlens: Tensor, k: int, t: int) -> tuple[Tensor, Tensor]:
    """Where tokens `[t]` come to lie with k elements before each sequence, and what lies where.

    The latter counts the elements before all sequences and then the tokens, `[n k + t]`.
    """
    n = len(cu_seqlens) - 1
    device = cu_seqlens.device
    place = torch.arange(t, device=device) + (_sequence_of(cu_seqlens, t) + 1) * k
    before = cu_seqlens[:-1, None] + torch.arange(n * k, device=device).view(n, k)
    return place, torch.cat([before.flatten(), place]).argsort()


def _outputs(
    logit: Tensor, values: Tensor, cu_seqlens: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    (h, _, p), n = values.shape, cu_seqlens.shape[0] - 1
    o, last = logit.new_empty(values.shape), logit.new_empty(n, h, p)
    return o, torch.empty_like(logit), torch.empty_like(logit), last, last.new_empty(n, h)


@attend_op.register_fake
def _(logit, values, mass, cu_seqlens, window):  # type: ignore[no-untyped-def]
    return _outputs(logit, values, cu_seqlens)


@attend_backward.register_fake
def _(do, dn_last, dz_last, logit, values, mass, *others):  # type: ignore[no-untyped-def]
    return torch.empty_like(logit), values.new_empty(values.shape), torch.empty_like(mass)


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    *tensors, ctx.window = inputs
    o, peak, inverse, *_ = output
    ctx.save_for_backward(*tensors, o, peak, inverse)
    ctx.mark_non_differentiable(peak, inverse)
    ctx.set_materialize_grads(False)


def _differentiate(ctx, do, _dpeak, _dinverse, dn_last, dz_last):  # type: ignore[no-untyped-def]
    saved = ctx.saved_tensors  # Once: checkpointing computes them anew at each look.
    if differentiable_again():
        return gradients(plain, (*saved[:4], ctx.window), (do, dn_last, dz_last))
    do = torch.zeros_like(saved[4]) if do is None else do
    return *attend_backward(do, dn_last, dz_last, *saved, ctx.window), None, None


attend_op.register_autograd(_differentiate, setup_context=_save)


def plain(
    logit: Tensor, values: Tensor, mass: Tensor, cu_seqlens: Tensor, window: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Means, and N and Z of the last elements, by operations of torch alone."""
    # The mass goes along as one more value, and means of it are what the others are divided by.
    both = torch.cat([values.to(logit.dtype), mass.unsqueeze(-1)], -1)
    outputs, lasts = [both[:, :0]], []
    for begin, end in pairwise(cu_seqlens.tolist()):
        if begin == end:
            lasts.append(both.new_zeros(1, *both.shape[::2]))
            continue
        own = logit[None, :, begin:end], both[None, :, begin:end]
        means, _, sums, _ = blocked.plain(*own, None, None, None, None, window)
        outputs.append(means[0])
        lasts.append(sums)
    found, last = torch.cat(outputs, 1), torch.cat(lasts)
    share = found[..., -1:]
    o = found[..., :-1] / torch.where(share == 0, 1, share)
    return o, last[..., :-1], last[..., -1]
