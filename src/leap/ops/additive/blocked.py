"""Focus-weighted sums over a causal window, in O(t) whatever the window, and their gradients.

Both passes are one sum. Row i has a ceiling, element j a logit, values of width p and a mass:

    S_i = sum_{j seen by i} exp(logit_j - ceiling_i) [values_j, mass_j]

where no logit a row sees is above its ceiling, so that no weight is above 1.

    forward     ceiling_i = M_i, the highest focus seen     logit_j = focus_j, values v_j, mass 1
                [N_i, Z_i] = S_i                            o_i = N_i / Z_i
    backward    ceiling_j = -focus_j, time runs backwards   logit_i = -M_i
                [dv_j, e_j] = S_j                           values do_i / Z_i, mass do_i . o_i / Z_i
                                                            dfocus_j = v_j . dv_j - e_j

Nothing is ever subtracted from a sum: running sums grow without bound, and the difference of two
keeps none of the digits of a small window. Instead the tokens are cut into blocks, and the rows of
a block see up to three pieces,

    [far end of the window] [whole blocks between, as one element] [the block itself up to the row]

the first and last by a matrix of weights each, the middle by this same sum over block totals.
A total is an element like any other: its logit is the highest in the block. M and Z are kept apart
rather than as M + log Z, whose rounding, at logits in the hundreds, costs four digits.

A row that sees nothing has the ceiling +inf, an element without weight the logit -inf: inf - inf
never meets.

Axes: b batch, h heads, t tokens, p values; n rows of b x h, and g blocks, are worked on at once.
"""

import math
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from leap.ops.derivatives import differentiable_again, gradients
from leap.ops.state import accumulator, as_given
from leap.ops.threads import on_one_thread

Gather = Callable[..., Iterator[tuple[slice, Tensor]]]
"""As `gather`, of which there is one on every device."""

ROWS = 64  # Tokens whose weights are formed at once where the kernel is not used.
BLOCK = 16  # Tokens a block: weights cost BLOCK a token, totals 1 / BLOCK.
CACHE = 8192  # Tokens worked on at once on a processor, so that what they need stays in its cache.


def ceiling_over(peak: Tensor) -> Tensor:
    """The ceiling of a row whose highest logit is `peak`: +inf for one that sees nothing."""
    return peak.masked_fill(peak == -math.inf, math.inf)


def sliding_max(x: Tensor, window: int | None, n_before: Tensor | None = None) -> Tensor:
    """The largest of the last `window` along the last axis of `x` `[n, t]`; of all for None.

    Of packed sequences `n_before` says how many tokens each one has before it, `[t]`.
    """
    if window is None or window >= x.shape[1]:
        if n_before is None:
            return x.cummax(1).values
        window = x.shape[1]
    span = 1
    while span < window:  # A maximum may count a token twice, so any window is a few doublings.
        step = min(span, window - span)
        higher = torch.maximum(x[:, step:], x[:, :-step])
        if n_before is not None:
            higher = torch.where(n_before[step:] >= step, higher, x[:, step:])
        x = torch.cat([x[:, :step], higher], dim=1)
        span += step
    return x


def gather(
    ceiling: Tensor,
    logit: Tensor,
    values: Tensor,
    mass: Tensor,
    window: int | None,
    *,
    skip: int = 0,
    backwards: bool = False,
    summed: Callable[..., Iterator[tuple[slice, Tensor]]] | None = None,
) -> Iterator[tuple[slice, Tensor]]:
    """The sums S `[n, rows, p + 1]`, a span of rows at a time, counted from `skip` on.

    NaN and infinity reach the rows that see them and no others.

    Args:
        ceiling, logit, mass: `[n, t]`.
        values: `[n, t, p]`.
        window: elements a row sees, its own the last, or None for all up to its own.
        skip: this number of rows at the start are elements to the others but get no sum themselves.
        backwards: time runs backwards: a row sees its own element and those after it.
        summed: what adds up finite numbers; None for operations of torch.
    """
    summed = summed or _gather
    # A sum is finite only if its terms are. (If it overflows, all terms are looked at in vain.)
    finite = (values.sum(dtype=logit.dtype) + mass.sum()).isfinite() & (logit.amax() < math.inf)
    if finite:
        yield from summed(ceiling, logit, values, mass, window, skip, backwards)
        return
    # 0 x NaN is NaN: in a product with the weights, a NaN would reach all rows of its block. So
    # the sum is over the rest, and which rows see one that was left out is a count of its own.
    broken = ~(logit < math.inf)
    holes, mass_holes = ~values.isfinite() | broken.unsqueeze(-1), ~mass.isfinite() | broken
    kept = (values.masked_fill(holes, 0), mass.masked_fill(mass_holes, 0))
    logit = logit.masked_fill(broken, -math.inf)
    sums = summed(ceiling, logit, *kept, window, skip, backwards)
    equal = torch.zeros_like(logit)
    lost = (holes.to(logit.dtype), mass_holes.to(logit.dtype))
    counts = summed(equal, equal, *lost, window, skip, backwards)
    for (rows, s), (_, count) in zip(sums, counts, strict=True):
        yield rows, s.masked_fill(count > 0, math.nan)


class _Piece(NamedTuple):
    """What the rows of a block see in one place: `length` elements from `start` on."""

    start: int
    """Counted from the first element of the block itself."""
    length: int
    bias: Tensor
    """0 where row i of the block sees element j of the piece, -inf elsewhere."""


@lru_cache(maxsize=256)
def _pieces(
    window: int | None, backwards: bool, dtype: torch.dtype, device: torch.device
) -> tuple[list[_Piece], int | None]:
    """The pieces that a block sees, and how many whole blocks lie between them (None for all)."""
    row = torch.arange(BLOCK, device=device).unsqueeze(1)
    element = torch.arange(3 * BLOCK, device=device)

    def piece(start: int, length: int, sees: Tensor) -> _Piece:
        bias = torch.zeros(BLOCK, length, dtype=dtype, device=device)
        bias.masked_fill_(~sees[:, :length], -math.inf)
        if backwards:
            return _Piece(BLOCK - start - length, length, bias.flip(0, 1))
        return _Piece(start, length, bias)

    own = piece(0, BLOCK, element <= row)
    if window is None:
        return [own], None
    if window < 2 * BLOCK:
        band = (element > row) & (element <= row + window)
        return [piece(-window, BLOCK + window, band)], 0
    far = piece(-window, BLOCK + window % BLOCK, element > row)
    return [far, own], window // BLOCK - 1


def _gather(
    ceiling: Tensor,
    logit: Tensor,
    values: Tensor,
    mass: Tensor,
    window: int | None,
    skip: int,
    backwards: bool,
) -> Iterator[tuple[slice, Tensor]]:
    """`gather` for finite values: all rows at once, or spans of a single sequence."""
    n, t = logit.shape
    if window is not None and window >= t:
        window = None
    pieces, n_between = _pieces(window, backwards, logit.dtype, logit.device)
    lead = max(-piece.start for piece in pieces)
    tail = max(piece.start + piece.length - BLOCK for piece in pieces)
    n_block = -(-t // BLOCK)
    pad = n_block * BLOCK - t

    logit = F.pad(logit, (0, pad), value=-math.inf)
    ceilings = F.pad(ceiling, (0, pad), value=math.inf).reshape(-1, BLOCK, 1)
    elements = _side_by_side(values, mass, lead, tail, pad)
    # Pieces of neighbouring blocks may overlap; unfold shows them without a copy. Past the ends of
    # a sequence it shows elements of the next one in memory, whose weight is 0.
    beyond = F.pad(logit, (lead, tail), value=-math.inf)
    seen = [
        (
            beyond[:, lead + start :].unfold(1, length, BLOCK)[:, :n_block].flatten(0, 1),
            bias,
            elements[lead + start :].unfold(0, length, BLOCK).mT,
        )
        for start, length, bias in pieces
    ]
    between = None
    if n_between != 0 and n_block > 1:
        own = elements[lead : lead + n * n_block * BLOCK].view(n * n_block, BLOCK, -1)
        between = _between(logit.reshape(n, n_block, BLOCK), own, n_between, backwards)

    for blocks, start in _spans(n, n_block, skip // BLOCK, logit.device):
        ceiling = ceilings[blocks]
        sums = elements.new_empty(len(ceiling), BLOCK, elements.shape[1])
        for i, (logits, bias, shown) in enumerate(seen):
            weights = _exp_((logits[blocks].unsqueeze(1) + bias).sub_(ceiling))
            sums.baddbmm_(weights, shown[blocks], beta=min(i, 1))  # 0: there is nothing yet.
        if between is not None:
            peak, total = between
            sums.addcmul_(_exp_(peak[blocks] - ceiling), total[blocks])
        sums = sums.view(n, -1, sums.shape[-1])[:, max(skip - start, 0) : t - start]
        start = max(start - skip, 0)
        yield slice(start, start + sums.shape[1]), sums


def _spans(
    n: int, n_block: int, first: int, device: torch.device
) -> Iterator[tuple[slice | Tensor, int]]:
    """Blocks to work on at once, of `n` sequences end to end, and the row they start with.

    The blocks before `first` are left out. A single sequence may be long, so it is taken in spans
    that fit the cache; of several, it is for the caller to give no more than do.
    """
    if n == 1:
        step = CACHE // BLOCK if device.type == "cpu" else n_block
        for i in range(first, n_block, step):
            yield slice(i, min(i + step, n_block)), i * BLOCK
    elif first == 0:
        yield slice(0, n * n_block), 0
    else:
        blocks = torch.arange(n * n_block, device=device).view(n, n_block)
        yield blocks[:, first:].flatten(), first * BLOCK


def _between(
    logit: Tensor, elements: Tensor, n_between: int | None, backwards: bool
) -> tuple[Tensor, Tensor]:
    """What each block sees of the whole blocks before it, as one element.

    Args:
        logit: `[n, g, BLOCK]`.
        elements: values and mass, `[n g, BLOCK, p + 1]`.
        n_between: how many blocks it sees, or None for all.
        backwards: it is the blocks after it that a block sees.

    Returns:
        Logits `[n g, 1, 1]` and sums `[n g, 1, p + 1]`.
    """
    n, g, _ = logit.shape
    peak = logit.amax(-1)
    weights = _exp_(logit - ceiling_over(peak).unsqueeze(-1))
    total = torch.bmm(weights.reshape(n * g, 1, BLOCK), elements).view(n, g, -1)
    if backwards:
        peak, total = peak.flip(1), total.flip(1)
    # What a block sees ends with the block before it: hence a shift by one.
    peak, total = peak[:, :-1], total[:, :-1]
    highest = sliding_max(peak, n_between)
    sums = _gather(
        ceiling_over(highest), peak, total[..., :-1], total[..., -1], n_between, 0, False
    )
    highest = F.pad(highest, (1, 0), value=-math.inf)
    total = F.pad(torch.cat([s for _, s in sums], dim=1), (0, 0, 1, 0))
    if backwards:
        highest, total = highest.flip(1), total.flip(1)
    return highest.view(n * g, 1, 1), total.view(n * g, 1, -1)


def _side_by_side(values: Tensor, mass: Tensor, lead: int, tail: int, pad: int) -> Tensor:
    """Values and mass of all sequences end to end, `[lead + n (t + pad) + tail, p + 1]`.

    Zeros come before the first, after the last and, if padded, after each. The mass rides along as
    one more value, so that a single product sums both.
    """
    n, t, p = values.shape
    flat = mass.new_empty(lead + n * (t + pad) + tail, p + 1)
    flat[:lead] = 0
    flat[len(flat) - tail :] = 0
    rows = flat[lead : len(flat) - tail].view(n, t + pad, p + 1)
    rows[:, :t, :p] = values
    rows[:, :t, p] = mass
    rows[:, t:] = 0
    return flat


def _exp_(x: Tensor) -> Tensor:
    """exp, in place. torch.exp on a processor slows down twentyfold where its result underflows."""
    return x.mul_(1 / math.log(2)).exp2_()


class _Group(NamedTuple):
    """Some rows of tensors `[b, h, t, ...]`, and the order in which their tokens are taken."""

    batch: slice
    heads: slice
    order: Tensor | None
    """Places `[n, t]`, or None for tokens as they stand."""

    def rows(self, x: Tensor) -> Tensor:
        """The rows of `x`, `[n, ...]`: a view if `x` is contiguous."""
        return x[self.batch, self.heads].flatten(0, 1)

    def take(self, x: Tensor) -> Tensor:
        """The tokens of `x`, `[n, t, ...]`, in order."""
        return self.rows(x) if self.order is None else self.rows(x)[self._row, self.order]

    def put(self, x: Tensor, span: slice, new: Tensor) -> None:
        """Write a span of the tokens, counted in order, to their places in a contiguous `x`."""
        if self.order is None:
            self.rows(x)[:, span] = new
        else:
            self.rows(x)[self._row, self.order[:, span]] = new.to(x.dtype)

    @property
    def _row(self) -> Tensor:
        assert self.order is not None
        return torch.arange(self.order.shape[0], device=self.order.device).unsqueeze(1)


def _groups(v: Tensor, n_past: int, order: Tensor | None) -> Iterator[_Group]:
    """All rows of `v` `[b, h, t, p]`, as many at a time as fit the cache."""
    b, h, t, _ = v.shape
    n = max(CACHE // (n_past + t), 1) if v.device.type == "cpu" else b * h
    n_batch, n_head = max(n // h, 1), min(n, h)
    for i in range(0, b, n_batch):
        for j in range(0, h, n_head):
            group = _Group(slice(i, i + n_batch), slice(j, j + n_head), None)
            if order is not None:
                group = group._replace(order=group.rows(order.unsqueeze(1).expand(b, h, t)))
            yield group


def _real_first(mask: Tensor | None, window: int | None) -> Tensor | None:
    """The order `[b, t]` in which a window counts real tokens alone; without one none is needed."""
    if mask is None or window is None:
        return None
    return mask.logical_not().to(torch.uint8).argsort(dim=-1, stable=True)


class _Past(NamedTuple):
    """Elements before the first token, `[b, h, k, ...]`: of mass 1, or the total of many tokens."""

    logit: Tensor
    values: Tensor
    mass: Tensor

    @classmethod
    def of(cls, logit: Tensor | None, values: Tensor | None, mass: Tensor | None) -> "_Past | None":
        if logit is None or values is None or mass is None:
            return None
        return cls(logit, values, mass)


class _Elements(NamedTuple):
    """The past and the tokens of a group in order, `[n, k + t, ...]`, as one sequence."""

    logit: Tensor
    values: Tensor
    mass: Tensor
    real: Tensor | None
    """False at pads, `[n, t]`."""

    @classmethod
    def of(
        cls, group: _Group, focus: Tensor, v: Tensor, mask: Tensor | None, past: _Past | None
    ) -> "_Elements":
        logit, values = group.take(focus).to(accumulator(focus, v)), group.take(v)
        real = None
        if mask is not None:
            real = group.take(mask.unsqueeze(1).expand(focus.shape))
            logit = logit.masked_fill(~real, -math.inf)
            values = values.masked_fill(~real.unsqueeze(-1), 0)
        ones = torch.ones_like(logit)
        if past is None:
            return cls(logit, values, ones, real)
        logit, values, ones = (
            torch.cat([group.rows(old).to(logit.dtype), new], dim=1)
            for old, new in zip(past, (logit, values, ones), strict=True)
        )
        return cls(logit, values, ones, real)


@torch.library.custom_op("leap::additive_attention", mutates_args=())
def attend(
    focus: Tensor,
    v: Tensor,
    mask: Tensor | None,
    past_focus: Tensor | None,
    past_v: Tensor | None,
    past_mass: Tensor | None,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Attend to the past and to the new tokens.

    A custom op, so that a compiler takes it as it is: what it does depends on the values, and it
    is cut to fit the cache.

    Args:
        focus, v: logits `[b, h, t]` and values `[b, h, t, p]`.
        mask: true at real tokens `[b, t]`. A window counts these alone; pads get 0.
        past_focus, past_v, past_mass: what was before the first token, `[b, h, k]`,
            `[b, h, k, p]` and `[b, h, k]`: single tokens, of mass 1, or the total of many.
        window: how many a token sees, its own the last, or None for all up to its own.

    Returns:
        The attended values `[b, h, t, p]`; the same before rounding, empty if there was none;
        M and 1 / Z (0 at pads) of the tokens in the order they were taken, `[b, h, t]`; and N
        `[b, h, p]` and Z `[b, h]` of the last.
    """
    return forward(gather, focus, v, mask, past_focus, past_v, past_mass, window)


@torch.library.custom_op("leap::additive_attention_backward", mutates_args=())
def attend_backward(
    do: Tensor,
    dn_last: Tensor | None,
    dz_last: Tensor | None,
    focus: Tensor,
    v: Tensor,
    mask: Tensor | None,
    past_focus: Tensor | None,
    past_v: Tensor | None,
    past_mass: Tensor | None,
    o: Tensor,
    peaks: Tensor,
    inverses: Tensor,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of focus, v and the past; those of the past are empty without one."""
    saved = focus, v, mask, past_focus, past_v, past_mass, o, peaks, inverses
    return backward(gather, do, dn_last, dz_last, *saved, window)


def forward(
    gather: Gather,
    focus: Tensor,
    v: Tensor,
    mask: Tensor | None,
    past_focus: Tensor | None,
    past_v: Tensor | None,
    past_mass: Tensor | None,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`attend`, by sums that `gather` adds up."""
    past = _Past.of(past_focus, past_v, past_mass)
    n_past = 0 if past is None else past.logit.shape[2]
    o, unrounded, peaks, inverses, n_last, z_last = _outputs(focus, v)
    with as_given(v), on_one_thread(v):
        for group in _groups(v, n_past, _real_first(mask, window)):
            logit, values, mass, real = _Elements.of(group, focus, v, mask, past)
            peak = sliding_max(logit, window)
            group.rows(peaks)[:] = peak[:, n_past:]
            for span, sums in gather(ceiling_over(peak), logit, values, mass, window, skip=n_past):
                group.rows(n_last)[:] = sums[:, -1, :-1]
                group.rows(z_last)[:] = sums[:, -1, -1]
                # The highest weight is 1, so only the mass of a row that sees nothing is below.
                inverse = sums[..., -1].clamp_min(1).reciprocal_()
                if real is not None:
                    inverse *= real[:, span]
                group.rows(inverses)[:, span] = inverse
                mean = sums[..., :-1].mul_(inverse.unsqueeze(-1))
                group.put(o, span, mean)
                if unrounded.numel():
                    group.put(unrounded, span, mean)
    return o, unrounded, peaks, inverses, n_last, z_last


def backward(
    gather: Gather,
    do: Tensor,
    dn_last: Tensor | None,
    dz_last: Tensor | None,
    focus: Tensor,
    v: Tensor,
    mask: Tensor | None,
    past_focus: Tensor | None,
    past_v: Tensor | None,
    past_mass: Tensor | None,
    o: Tensor,
    peaks: Tensor,
    inverses: Tensor,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`attend_backward`, by sums that `gather` adds up."""
    past = _Past.of(past_focus, past_v, past_mass)
    n_past = 0 if past is None else past.logit.shape[2]
    dfocus, dv, dpast = _gradients(focus, v, past)
    with as_given(v), on_one_thread(v):
        for group in _groups(v, n_past, _real_first(mask, window)):
            logit, values, mass, real = _Elements.of(group, focus, v, mask, past)
            dn = group.take(do) * group.rows(inverses).unsqueeze(-1)
            if real is not None:
                dn.masked_fill_(~real.unsqueeze(-1), 0)
            e = (dn * group.take(o)).sum(-1)
            if dn_last is not None:
                dn[:, -1] += group.rows(dn_last)
            if dz_last is not None:
                e[:, -1] -= group.rows(dz_last)
            height = -ceiling_over(group.rows(peaks))
            if n_past:  # The past is looked at, but does not look.
                height, e = F.pad(height, (n_past, 0), value=-math.inf), F.pad(e, (n_past, 0))
                dn = F.pad(dn, (0, 0, n_past, 0))
            for span, sums in gather(-logit, height, dn, e, window, backwards=True):
                dvalues, dmass = sums[..., :-1], -sums[..., -1]
                dlogit = (values[:, span] * dvalues).sum(-1) + mass[:, span] * dmass
                new = slice(max(span.start - n_past, 0), max(span.stop - n_past, 0))
                n_old = max(n_past - span.start, 0)
                group.put(dfocus, new, dlogit[:, n_old:])
                group.put(dv, new, dvalues[:, n_old:])
                if n_old:
                    old = slice(span.start, min(span.stop, n_past))
                    for out, x in zip(dpast, (dlogit, dvalues, dmass), strict=True):
                        group.rows(out)[:, old] = x[:, :n_old]
    return dfocus, dv, *dpast


def plain(
    focus: Tensor,
    v: Tensor,
    mask: Tensor | None,
    past_focus: Tensor | None,
    past_v: Tensor | None,
    past_mass: Tensor | None,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The attended values, and M, N and Z of the last token, by operations of torch alone.

    Weights of some tokens at a time, to what was kept of the past before them: one element for all
    of it, or as many as the window has. So the memory is O(t) for any window of a given size.
    """
    dtype, order = accumulator(focus, v), _real_first(mask, window)
    logit, values = focus.to(dtype), v.to(dtype)
    if mask is not None:
        logit = logit.masked_fill(~mask.unsqueeze(1), -math.inf)
        values = values.masked_fill(~mask[:, None, :, None], 0)
    if order is not None:
        logit = logit.take_along_dim(order[:, None], dim=2)
        values = values.take_along_dim(order[:, None, :, None], dim=2)
    past = _Past.of(past_focus, past_v, past_mass)
    past = past or _Past(logit[:, :, :0], values[:, :, :0], logit[:, :, :0])
    past = _Past(*(x.to(dtype) for x in past))
    outputs = []
    with as_given(v):
        for new in zip(logit.split(ROWS, 2), values.split(ROWS, 2), strict=True):
            n_past = past.logit.shape[2]
            row = torch.arange(new[0].shape[2], device=v.device).unsqueeze(1) + n_past
            element = torch.arange(n_past + new[0].shape[2], device=v.device)
            sees = element <= row if window is None else (element <= row) & (element > row - window)
            tokens = _Past(*new, torch.ones_like(new[0]))
            seen = _Past(*(torch.cat(both, 2) for both in zip(past, tokens, strict=True)))
            logits = seen.logit.unsqueeze(2).masked_fill(~sees, -math.inf)
            peak = logits.detach().amax(-1)
            weights = (logits - ceiling_over(peak).unsqueeze(-1)).exp()
            n, z = weights @ seen.values, (weights @ seen.mass.unsqueeze(-1)).squeeze(-1)
            outputs.append(n / z.clamp_min(1).unsqueeze(-1))
            last = peak[..., -1], n[:, :, -1], z[..., -1]
            if window is None:
                past = _Past(*(x.unsqueeze(2) for x in last))
            else:
                past = _Past(*(x[:, :, max(x.shape[2] - window + 1, 0) :] for x in seen))
    o = torch.cat(outputs, dim=2)
    if order is not None:
        o = o.take_along_dim(order.argsort(dim=-1)[:, None, :, None], dim=2)
    if mask is not None:
        o = o.masked_fill(~mask[:, None, :, None], 0)
    return o.to(v.dtype), *last


def _outputs(focus: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    b, h, t, p = v.shape
    peaks = v.new_empty(b, h, t, dtype=accumulator(focus, v))
    # dfocus is a difference of two like numbers, one of them do . o: half precision is too little.
    unrounded = peaks.new_empty((b, h, t, p) if v.dtype != peaks.dtype else 0)
    last = peaks.new_empty(b, h, p), peaks.new_empty(b, h)
    return _like(v), unrounded, peaks, torch.empty_like(peaks), *last


def _gradients(
    focus: Tensor, v: Tensor, past: _Past | None
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor, Tensor]]:
    logit, values, mass = past or [v.new_empty(0)] * 3
    return _like(focus), _like(v), (_like(logit), _like(values), _like(mass))


def _like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def register(attend: Any, attend_backward: Any) -> None:
    """Tell torch of the shapes and the derivative of an op and its backward."""

    @attend.register_fake
    def _(focus, v, mask, past_focus, past_v, past_mass, window):  # type: ignore[no-untyped-def]
        return _outputs(focus, v)

    @attend_backward.register_fake
    def _(do, dn, dz, focus, v, mask, past_focus, past_v, past_mass, o, m, z, window):  # type: ignore[no-untyped-def]
        dfocus, dv, dpast = _gradients(focus, v, _Past.of(past_focus, past_v, past_mass))
        return dfocus, dv, *dpast

    def differentiate(ctx, do, _dunrounded, _dpeaks, _dinverses, dn_last, dz_last):  # type: ignore[no-untyped-def]
        saved = ctx.saved_tensors  # Once: checkpointing computes them anew at each look.
        if differentiable_again():
            return gradients(_sums, (*saved[:-3], ctx.window), (do, dn_last, dz_last))
        do = torch.zeros_like(saved[1]) if do is None else do
        dfocus, dv, *dpast = attend_backward(do, dn_last, dz_last, *saved, ctx.window)
        return dfocus, dv, None, *(x if x.numel() else None for x in dpast), None

    attend.register_autograd(differentiate, setup_context=_save)


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    *tensors, ctx.window = inputs
    ctx.set_materialize_grads(False)  # Zeros for the outputs that no one uses cost as much as o.
    o, unrounded, peaks, inverses, *_ = output
    ctx.save_for_backward(*tensors, unrounded if unrounded.numel() else o, peaks, inverses)


def _sums(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    o, _, n_last, z_last = plain(*inputs)
    return o, n_last, z_last


register(attend, attend_backward)
