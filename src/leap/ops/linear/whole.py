"""Linear attention to a whole sequence, in O(t + n), with a backward pass that recomputes.

    kv  = sum_j fk_j v_j^T        k_sum = sum_j fk_j              over the real keys
    o_i = fq_i kv / max(fq_i . k_sum, eps)

fq and fk are the features with their re-weighting multiplied in, [q x_1, ... q x_r] (see `parts`).
r times as wide as the features, they are the largest tensors of the computation, and so are formed
a piece at a time, where they fit the cache, and once more in the backward:

    dfq_i  = kv g_i + k_sum h_i               g and h: gradients of numerator and denominator
    dkv    = sum_i fq_i g_i^T                 dk_sum = sum_i fq_i h_i
    dfk_j  = dkv v_j + dk_sum                 dv_j   = fk_j dkv

Axes: b batch, h heads, t queries, n keys, f features, e values, r rank of the re-weighting.
"""

import torch
from torch import Tensor

from leap.ops.derivatives import differentiable_again, gradients
from leap.ops.features import widen
from leap.ops.linear.parts import (
    Tokens,
    like,
    normalised,
    part,
    put,
    spans,
    through_the_division,
    unit_scale,
    wide_keys,
    wide_queries,
    widen_backward,
    without_pads,
)
from leap.ops.linear.state import sums
from leap.ops.state import as_given, finest
from leap.ops.threads import on_one_thread

TOKENS_AT_ONCE = {"cpu": 2**12}  # Of all heads together: what is formed of them fits the cache.
TOKENS_AT_ONCE_ELSEWHERE = 2**20


@torch.library.custom_op("leap::linear_attention", mutates_args=())
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    x: Tensor | None,
    y: Tensor | None,
    key_mask: Tensor | None,
    total: torch.dtype,
    normalise: bool,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Attended values `[b, h, t, e]`, and the state, kv and k_sum; then what the backward takes.

    That is denominators and scales of queries, `[b, h, t, 1]`. The mask is `[b, 1, n, 1]`; `total`
    is the precision to compute in.
    """
    o, kv, k_sum, den, scale = outputs = _outputs(q, k, v, x, total)
    with as_given(q), on_one_thread(q):
        for rows in _row_spans(q, k):
            kv_, k_sum_ = part(kv, rows).zero_(), part(k_sum, rows).unsqueeze(1).zero_()
            for stretch in _stretches(k):
                k_, v_, y_, _ = _keys(k, v, y, key_mask, rows, stretch, total)
                fk = widen(k_, y_)
                kv_ += torch.bmm(fk.mT, v_)
                k_sum_ += fk.sum(1, keepdim=True)
            kv_, k_sum_ = kv_.to(total), k_sum_.to(total)
            for stretch in _stretches(q):
                fq, _, _, scale_ = _queries(q, x, rows, stretch, total)
                num, den_ = torch.bmm(fq, kv_), torch.linalg.vecdot(fq, k_sum_).unsqueeze(-1)
                o_ = normalised(num, den_, eps * scale_) if normalise else num / scale_
                for part_, out in ((o_, o), (den_, den), (scale_, scale)):
                    put(part_, out, rows, stretch)
    return outputs


@torch.library.custom_op("leap::linear_attention_backward", mutates_args=())
def attend_backward(
    do: Tensor,
    dkv: Tensor,
    dk_sum: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    x: Tensor | None,
    y: Tensor | None,
    key_mask: Tensor | None,
    o: Tensor,
    kv: Tensor,
    k_sum: Tensor,
    den: Tensor,
    scale: Tensor,
    normalise: bool,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, x and y, the last two empty without re-weighting."""
    dq, dk, dv, dx, dy = like(q), like(k), like(v), like(x, q), like(y, q)
    total = den.dtype
    with as_given(q), on_one_thread(q):
        for rows in _row_spans(q, k):
            kv_, dkv_ = (part(each, rows).to(total, copy=True) for each in (kv, dkv))
            k_sum_, dk_sum_ = (
                part(each, rows).unsqueeze(1).to(total, copy=True) for each in (k_sum, dk_sum)
            )
            for stretch in _stretches(q):
                do_, o_, den_ = (part(each, rows, stretch) for each in (do, o, den))
                fq, q_, x_, scale_ = _queries(q, x, rows, stretch, total)
                g, h = through_the_division(do_, o_, den_, scale_, normalise, eps)
                dfq = torch.bmm(g, kv_.mT).addcmul_(h, k_sum_)
                grad, dx_ = widen_backward(dfq, q_, x_)
                put(grad, dq, rows, stretch)
                if x is not None and dx_ is not None:
                    put(dx_.mul_(scale_), dx, rows, stretch)
                dkv_.baddbmm_(fq.mT, g)
                dk_sum_.baddbmm_(h.mT, fq)
            for stretch in _stretches(k):
                k_, v_, y_, real = _keys(k, v, y, key_mask, rows, stretch, total)
                dfk = torch.bmm(v_, dkv_.mT).add_(dk_sum_)
                dvalues = torch.bmm(widen(k_, y_), dkv_)
                grad, dy_ = widen_backward(dfk, k_, y_)
                if real is not None:
                    grad, dvalues = (torch.where(real, each, 0) for each in (grad, dvalues))
                put(grad, dk, rows, stretch)
                put(dvalues, dv, rows, stretch)
                if dy_ is not None:
                    put(dy_, dy, rows, stretch)
    return dq, dk, dv, dx, dy


def _row_spans(q: Tensor, k: Tensor) -> list[slice]:
    """The batch cut into as many sequences as are computed at once, or one if they are long.

    Of one sequence every head can be read where a projection leaves it, of several they are copied.
    """
    longest = max(1, q.shape[2], k.shape[2])
    return spans(q.shape[0], max(1, _tokens_at_once(q) // longest))


def _stretches(x: Tensor) -> list[slice]:
    """The tokens cut into as many as are computed at once."""
    return spans(x.shape[2], _tokens_at_once(x))


def _tokens_at_once(x: Tensor) -> int:
    """How many tokens, with all their heads, are computed at once."""
    of_all_heads = TOKENS_AT_ONCE.get(x.device.type, TOKENS_AT_ONCE_ELSEWHERE)
    return max(1, of_all_heads // max(1, x.shape[1]))


def _queries(
    q: Tensor, x: Tensor | None, rows: slice, stretch: slice, total: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A stretch of queries: fq, its factors q and x, and their scale, which x has in it."""
    q_ = part(q, rows, stretch).to(total)
    scale = unit_scale(q_)
    x_ = scale if x is None else part(x, rows, stretch).to(total) * scale
    return widen(q_, x_), q_, x_, scale


def _keys(
    k: Tensor,
    v: Tensor,
    y: Tensor | None,
    key_mask: Tensor | None,
    rows: slice,
    stretch: slice,
    total: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """A stretch of keys, values and y, 0 at pads; and true where there is none, None if nowhere."""
    k_, v_ = (part(each, rows, stretch).to(total) for each in (k, v))
    y_ = None if y is None else part(y, rows, stretch).to(total)
    if key_mask is None:
        return k_, v_, y_, None
    real = part(key_mask.expand(-1, k.shape[1], -1, -1), rows, stretch)
    if real.device.type == "cpu" and bool(real.all()):  # Elsewhere to look is to wait.
        return k_, v_, y_, None
    k_, v_ = torch.where(real, k_, 0), torch.where(real, v_, 0)
    return k_, v_, None if y_ is None else torch.where(real, y_, 0), real


def _outputs(
    q: Tensor, k: Tensor, v: Tensor, x: Tensor | None, total: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    (b, h, t, f), e = q.shape, v.shape[-1]
    f = f if x is None else f * x.shape[-1]
    kv, k_sum = (q.new_empty(b, h, *size, dtype=finest(q.device)) for size in ((f, e), (f,)))
    den, scale = (q.new_empty(b, h, t, 1, dtype=total) for _ in range(2))
    o = v.new_empty(b, t, h, e).transpose(1, 2)  # So that joining the heads copies nothing.
    return o, kv, k_sum, den, scale


def plain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    x: Tensor | None,
    y: Tensor | None,
    key_mask: Tensor | None,
    total: torch.dtype,
    normalise: bool,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attended values, kv and k_sum as `attend` has them, by operations of torch alone."""
    mask = None if key_mask is None else key_mask.flatten(1)
    tokens = without_pads(Tokens(q, k, v, x, y), mask)
    fq, fk = wide_queries(tokens).to(total), wide_keys(tokens).to(total)
    scale = unit_scale(fq)
    with as_given(q):
        kv, k_sum = sums(fk, tokens.v.to(total))
        num, den = (fq * scale) @ kv.to(total), (fq * scale) @ k_sum.to(total).unsqueeze(-1)
    o = normalised(num, den, eps * scale) if normalise else num / scale
    return o.to(v.dtype), kv, k_sum


@attend.register_fake
def _(q, k, v, x, y, key_mask, total, normalise, eps):  # type: ignore[no-untyped-def]
    return _outputs(q, k, v, x, total)


@attend_backward.register_fake
def _(do, dkv, dk_sum, q, k, v, x, y, *others):  # type: ignore[no-untyped-def]
    return like(q), like(k), like(v), like(x, q), like(y, q)


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    *tensors, ctx.total, ctx.normalise, ctx.eps = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(*output[3:])
    ctx.set_materialize_grads(False)


def _differentiate(ctx, do, dkv, dk_sum, *_none):  # type: ignore[no-untyped-def]
    saved = ctx.saved_tensors  # Once: checkpointing computes them anew at each look.
    if differentiable_again():
        given = *saved[:-5], ctx.total, ctx.normalise, ctx.eps
        return gradients(plain, given, (do, dkv, dk_sum))
    o, kv, k_sum = saved[-5:-2]
    grads = attend_backward(
        torch.zeros_like(o) if do is None else do,
        torch.zeros_like(kv) if dkv is None else dkv,
        torch.zeros_like(k_sum) if dk_sum is None else dk_sum,
        *saved,
        ctx.normalise,
        ctx.eps,
    )
    return *(grad if grad.numel() else None for grad in grads), None, None, None, None


attend.register_autograd(_differentiate, setup_context=_save)
