"""Causal linear attention a chunk at a time, in O(t), with a backward pass that recomputes.

Tokens of one chunk attend to each other through a small square of scores; all earlier tokens
stand in the state, `kv = sum_j fk_j v_j^T` and `k_sum = sum_j fk_j`:

    a_ij  = (q_i . k_j) (x_i . y_j)                    j <= i, both in the chunk
    num_i = sum_j a_ij v_j + fq_i kv                   fq_i = [q_i x_i1, q_i x_i2], fk_j likewise
    den_i = sum_j a_ij     + fq_i . k_sum              o_i = num_i / max(den_i, eps)

x_i = [sin, cos](pi/2 p_i) and y_j = [sin, cos](pi/2 s_j) are LeaPformer's re-weighting,
cos(pi/2 (p_i - s_j)), as a dot product of two numbers: scores need features of width f, only the
state needs 2f. Without proportions x and y drop out.

Scores that fade with distance, a_ij exp(l (i - j)) with a rate l <= 0 of each head, are the same
with x_i exp(l (i - m)) and y_j exp(l (m - j)) for x and y, m the middle of the chunk, and a state
that fades from chunk to chunk (see `_Fade`).

Backward, with g = do / den and h = -(do . o) / den (0 where the floor eps holds):

    da_ij = g_i . v_j + h_i                            j <= i
    dv_j  = sum_i a_ij g_i + fk_j dkv                  dkv and dk_sum gather from later chunks:
    dfq_i = kv g_i + k_sum h_i                         dkv    += fq^T g
    dfk_j = dkv v_j + dk_sum                           dk_sum += fq^T h

and the product rule on a, fq and fk. Kept for it are inputs, output, `den`, and the state at
every so many tokens, from which those between are computed again. The loop takes one chunk after
the other rather than all at once, because the dozen small matrices of a chunk then stay in the
processor's cache.

Axes: b batch, h heads, t tokens, f features (2f with proportions), e values; r = b h rows,
c tokens of a chunk.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from leap.ops.state import as_given

Inputs = tuple[Tensor | None, ...]  # q, k, v, and p and s if there are any, `[b, h, t, ...]`.

ROWS_AT_ONCE = 32  # With more rows a chunk's matrices outgrow the cache.
TOKENS_AT_ONCE = 1024  # Brought to full precision and scaled at once: a copy that fits the cache.


def unit_scale(q: Tensor) -> Tensor:
    """For each query, the power of two that brings its largest feature near 1, `[..., 1]`.

    A query's scale cancels between numerator and denominator, but products of three numbers of
    1e15 would overflow on the way there. A power of two changes no digit.
    """
    _, exponent = torch.frexp(q.abs().amax(dim=-1, keepdim=True))
    return torch.ldexp(torch.ones_like(exponent, dtype=q.dtype), -exponent.clamp(-120, 120))


def normalised(num: Tensor, den: Tensor, floor: Tensor) -> Tensor:
    """num / max(den, floor), and 0 where den is.

    A query that matches no key at all has no gradient either: that of 0 / floor is a million
    times its input at the usual floor, more than half precision can hold.
    """
    return num / den.maximum(floor).masked_fill_(den == 0, torch.inf)


@dataclass(frozen=True)
class _Fade:
    """Fading with distance, as factors of queries, keys and states.

    A state is kept as the middle of the next chunk sees it. Counted from there, no factor of a
    rate from -1 to 0 is more than single precision can hold.
    """

    rate: Tensor
    """Log of what is left after one token, of each row, `[r, 1, 1]`."""
    size: int
    """Tokens of a chunk."""

    def of_queries(self, n: int) -> Tensor:
        """exp(l (i - m)) for n tokens, the first of which begins a chunk, `[r, n, 1]`."""
        i = torch.arange(n, dtype=self.rate.dtype, device=self.rate.device) % self.size
        return torch.exp(self.rate * (i - (self.size - 1) / 2).unsqueeze(-1))

    def past(self, n: float | int, *states: Tensor) -> None:
        """Let states fade by so many tokens, in place; negative takes it back."""
        factor = torch.exp(self.rate * n)
        for state in states:
            state *= factor

    def enter(self, *states: Tensor) -> None:
        """From before the first token of a chunk to how its middle sees it."""
        self.past((self.size + 1) / 2, *states)

    def leave(self, *states: Tensor) -> None:
        """The way back."""
        self.past(-(self.size + 1) / 2, *states)


@dataclass(frozen=True)
class _Rows:
    """A stretch of some rows, `[r, t, ...]`, in the accumulator's precision, queries scaled."""

    q: Tensor
    k: Tensor
    v: Tensor
    x: Tensor | None
    y: Tensor | None
    scale: Tensor

    @classmethod
    def of(
        cls,
        inputs: Inputs,
        rows: slice,
        stretch: slice,
        dtype: torch.dtype,
        fade: _Fade | None,
    ) -> "_Rows":
        q, k, v, p, s = (None if x is None else part(x, rows, stretch).to(dtype) for x in inputs)
        assert q is not None and k is not None and v is not None
        scale, x, y = unit_scale(q), turn(p), turn(s)
        if fade is not None:
            since = fade.of_queries(q.shape[1])
            x, y = (since if x is None else x * since), (1 / since if y is None else y / since)
        return cls(q * scale, k, v, x, y, scale)

    def chunk(self, span: slice) -> "_Chunk":
        x, y = (None if x is None else x[:, span] for x in (self.x, self.y))
        return _Chunk(self.q[:, span], self.k[:, span], self.v[:, span], x, y, self.scale[:, span])


@dataclass(frozen=True)
class _Chunk(_Rows):
    """A stretch of tokens short enough to attend to each other in a square of scores."""

    @cached_property
    def fq(self) -> Tensor:
        """Queries with their re-weighting multiplied in."""
        return widen(self.q, self.x)

    @cached_property
    def fk(self) -> Tensor:
        """Keys likewise."""
        return widen(self.k, self.y)

    def scores(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """The causal scores `[r, c, c]`, and their two factors: products and re-weighting."""
        dots = torch.bmm(self.q, self.k.mT)
        if self.x is None or self.y is None:
            return dots.tril_(), dots, None
        weights = torch.bmm(self.x, self.y.mT)
        return torch.mul(dots, weights).tril_(), dots, weights

    def attend(self, kv: Tensor, k_sum: Tensor) -> tuple[Tensor, Tensor]:
        """Numerators and denominators, given the state before the chunk."""
        scores, fq = self.scores()[0], self.fq
        num = torch.bmm(scores, self.v).baddbmm_(fq, kv)
        return num, (scores.sum(-1) + torch.linalg.vecdot(fq, k_sum)).unsqueeze(-1)

    def advance_(self, kv: Tensor, k_sum: Tensor) -> None:
        """Move the state past the chunk, in place."""
        kv.baddbmm_(self.fk.mT, self.v)
        k_sum += self.fk.sum(1, keepdim=True)

    def backward_(
        self, g: Tensor, h: Tensor, kv: Tensor, k_sum: Tensor, dkv: Tensor, dk_sum: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
        """Gradients of q, k, v, x, y; moves dkv and dk_sum back past the chunk, in place."""
        scores, dots, weights = self.scores()
        fq, fk = self.fq, self.fk
        dv = torch.bmm(scores.mT, g).baddbmm_(fk, dkv)
        dq, dx = widen_backward(torch.bmm(g, kv.mT).addcmul_(h, k_sum), self.q, self.x)
        dk, dy = widen_backward(torch.bmm(self.v, dkv.mT).add_(dk_sum), self.k, self.y)

        dscores = torch.baddbmm(h, g, self.v.mT).tril_()
        if weights is not None:
            assert dx is not None and dy is not None and self.x is not None and self.y is not None
            dweights = dots.mul_(dscores)
            dx.baddbmm_(dweights, self.y)
            dy.baddbmm_(dweights.mT, self.x)
            dscores.mul_(weights)
        dq.baddbmm_(dscores, self.k).mul_(self.scale)
        dk.baddbmm_(dscores.mT, self.q)

        dkv.baddbmm_(fq.mT, g)
        dk_sum.baddbmm_(h.mT, fq)
        return dq, dk, dv, dx, dy


def turn(p: Tensor | None) -> Tensor | None:
    """[sin, cos](pi/2 p), `[r, c, 2]`."""
    if p is None:
        return None
    angle = p * (math.pi / 2)
    # The cosine of what rounds to more than pi/2 is negative, and so would a score be.
    return torch.stack([angle.sin(), angle.cos().clamp_min(0)], dim=-1)


def turn_backward(dx: Tensor, x: Tensor) -> Tensor:
    """Gradient of p."""
    return (math.pi / 2) * (dx[..., 0] * x[..., 1] - dx[..., 1] * x[..., 0])


def widen(q: Tensor, x: Tensor | None) -> Tensor:
    """[q x_1, q x_2], or q x_1 alone: a query or key with its re-weighting multiplied in."""
    if x is None:
        return q
    wide = q.new_empty(*q.shape[:-1], x.shape[-1] * q.shape[-1])
    for part, x_ in zip(wide.chunk(x.shape[-1], dim=-1), x.split(1, dim=-1), strict=True):
        torch.mul(q, x_, out=part)
    return wide


def widen_backward(dfq: Tensor, q: Tensor, x: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Gradients of q and x."""
    if x is None:
        return dfq, None
    if x.shape[-1] == 1:  # What fades is given, not learned.
        return dfq * x, torch.zeros_like(x)
    by_sin, by_cos = dfq.chunk(2, dim=-1)
    dx = torch.cat([(half * q).sum(-1, keepdim=True) for half in (by_sin, by_cos)], dim=-1)
    return (by_sin * x[..., :1]).addcmul_(by_cos, x[..., 1:]), dx


def row_spans(x: Tensor) -> list[slice]:
    """The batch of `[b, h, ...]` cut into pieces of so many rows as are computed at once."""
    return spans(x.shape[0], max(1, ROWS_AT_ONCE // max(1, x.shape[1])))


def part(x: Tensor, rows: slice, stretch: slice = slice(None)) -> Tensor:
    """Some tokens of some rows, batch and heads as one axis.

    A projection leaves the heads of a token side by side, and then this is a copy; but of a
    stretch, which fits the cache.
    """
    return x[rows, :, stretch].flatten(0, 1)


def put(x: Tensor, out: Tensor, rows: slice, stretch: slice) -> None:
    """Write what was computed of some tokens of some rows."""
    out[rows, :, stretch] = x.unflatten(0, (-1, out.shape[1]))


def spans(length: int, size: int) -> list[slice]:
    """A length cut into pieces of a size, the last of which may be shorter."""
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


def _stretches(length: int, chunk_size: int) -> list[slice]:
    """Runs of chunks that are brought to full precision together."""
    return spans(length, _stretch_size(chunk_size))


def _stretch_size(chunk_size: int) -> int:
    return max(chunk_size, TOKENS_AT_ONCE // chunk_size * chunk_size)


@torch.library.custom_op("leap::causal_linear_attention", mutates_args=())
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    p: Tensor | None,
    s: Tensor | None,
    rate: Sequence[float] | None,
    kv: Tensor,
    k_sum: Tensor,
    chunk_size: int,
    normalise: bool,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Attended values `[b, h, t, e]`, denominators `[b, h, t, 1]`, the state after, and marks.

    Scores fade by a `rate` of each head. Marks are the states at the start of each stretch,
    `[stretches, b, h, ...]`, for the backward. A custom op, so that a compiler takes it as it is:
    unrolling the loop would gain nothing.
    """
    o, den, kv_after, k_sum_after, kv_marks, k_sum_marks = _outputs(q, v, kv, k_sum, chunk_size)
    kv_after.copy_(kv)
    k_sum_after.copy_(k_sum)
    inputs = q, k, v, p, s
    with as_given(q):
        for rows in row_spans(q):
            kv_, k_sum_ = part(kv_after, rows), part(k_sum_after, rows).unsqueeze(1)
            fade = _fading(rate, kv_, chunk_size)
            if fade is not None:
                fade.enter(kv_, k_sum_)
            for i, stretch in enumerate(_stretches(q.shape[2], chunk_size)):
                part(kv_marks[i], rows).copy_(kv_)
                part(k_sum_marks[i], rows).copy_(k_sum_)
                tokens = _Rows.of(inputs, rows, stretch, kv.dtype, fade)
                for span in spans(tokens.q.shape[1], chunk_size):
                    c = tokens.chunk(span)
                    num, den_c = c.attend(kv_, k_sum_)
                    o_c = normalised(num, den_c, eps * c.scale) if normalise else num / c.scale
                    put(o_c, o[:, :, stretch], rows, span)
                    put(den_c, den[:, :, stretch], rows, span)
                    c.advance_(kv_, k_sum_)
                    if fade is not None:
                        fade.past(c.q.shape[1], kv_, k_sum_)
            if fade is not None:
                fade.leave(kv_, k_sum_)
    return o, den, kv_after, k_sum_after, kv_marks, k_sum_marks


def _fading(rate: Sequence[float] | None, kv: Tensor, chunk_size: int) -> _Fade | None:
    """How the rows of a state fade, given the rate of each head."""
    if rate is None:
        return None
    rates = kv.new_tensor(rate).repeat(kv.shape[0] // len(rate))
    return _Fade(rates.reshape(-1, 1, 1), chunk_size)


def _outputs(
    q: Tensor, v: Tensor, kv: Tensor, k_sum: Tensor, chunk_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    size = _stretch_size(chunk_size)
    n = (q.shape[2] + size - 1) // size  # Not by a loop, so that a compiler may leave t open.
    b, h, f, e = kv.shape
    after = kv.new_empty(kv.shape), k_sum.new_empty(k_sum.shape)
    marks = kv.new_empty(n, b, h, f, e), k_sum.new_empty(n, b, h, 1, f)
    return like(v), kv.new_empty(*v.shape[:3], 1), *after, *marks


@torch.library.custom_op("leap::causal_linear_attention_backward", mutates_args=())
def attend_backward(
    do: Tensor,
    dkv: Tensor,
    dk_sum: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    p: Tensor | None,
    s: Tensor | None,
    o: Tensor,
    den: Tensor,
    kv_marks: Tensor,
    k_sum_marks: Tensor,
    rate: Sequence[float] | None,
    chunk_size: int,
    normalise: bool,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, p, s (empty without proportions) and of the state before."""
    dq, dk, dv, dp, ds = like(q), like(k), like(v), like(p, q), like(s, q)
    # Contiguous, as views of their rows are what the loop adds to.
    dkv_before = dkv.clone(memory_format=torch.contiguous_format)
    dk_sum_before = dk_sum.clone(memory_format=torch.contiguous_format)
    inputs, outputs = (q, k, v, p, s), (dq, dk, dv, dp, ds)
    with as_given(q):
        for rows in row_spans(q):
            dkv_, dk_sum_ = part(dkv_before, rows), part(dk_sum_before, rows).unsqueeze(1)
            fade = _fading(rate, dkv_, chunk_size)
            if fade is not None:
                fade.leave(dkv_, dk_sum_)
            for i, stretch in reversed(list(enumerate(_stretches(q.shape[2], chunk_size)))):
                tokens = _Rows.of(inputs, rows, stretch, dkv.dtype, fade)
                do_, o_, den_ = (part(x, rows, stretch) for x in (do, o, den))
                g, h = through_the_division(do_, o_, den_, tokens.scale, normalise, eps)
                cuts = spans(tokens.q.shape[1], chunk_size)
                chunks = [tokens.chunk(span) for span in cuts]
                marks = part(kv_marks[i], rows), part(k_sum_marks[i], rows)
                states = _states_before(chunks, *marks, fade)
                turns: list[tuple[Tensor | None, Tensor | None]] = []
                for span, c, state in reversed(list(zip(cuts, chunks, states, strict=True))):
                    if fade is not None:
                        fade.past(c.q.shape[1], dkv_, dk_sum_)
                    *grads, dx, dy = c.backward_(g[:, span], h[:, span], *state, dkv_, dk_sum_)
                    for out, grad in zip(outputs, grads, strict=False):
                        put(grad, out[:, :, stretch], rows, span)
                    turns.append((dx, dy))
                for out, dturn, turn in zip(
                    outputs[3:],
                    zip(*reversed(turns), strict=True),
                    (tokens.x, tokens.y),
                    strict=True,
                ):
                    if out.numel() and turn is not None:
                        dp_ = turn_backward(torch.cat(dturn, dim=1), turn)
                        put(dp_, out, rows, stretch)
            if fade is not None:
                fade.enter(dkv_, dk_sum_)
    return dq, dk, dv, dp, ds, dkv_before, dk_sum_before


def through_the_division(
    do: Tensor, o: Tensor, den: Tensor, scale: Tensor, normalise: bool, eps: float
) -> tuple[Tensor, Tensor]:
    """Gradients of the numerators, g, and of the denominators, h."""
    if not normalise:
        return do.to(den.dtype) / scale, torch.zeros_like(den)
    floor = eps * scale
    g = normalised(do.to(den.dtype), den, floor)
    return g, (g * o).sum(-1, keepdim=True).neg_().masked_fill_(den < floor, 0)


def _states_before(
    chunks: list[_Chunk], kv: Tensor, k_sum: Tensor, fade: _Fade | None
) -> list[tuple[Tensor, Tensor]]:
    """The state before each of some chunks, from the one before the first."""
    states = [(kv, k_sum)]
    for c in chunks[:-1]:
        kv, k_sum = kv.clone(), k_sum.clone()
        c.advance_(kv, k_sum)
        if fade is not None:
            fade.past(c.q.shape[1], kv, k_sum)
        states.append((kv, k_sum))
    return states


def like(x: Tensor | None, other: Tensor | None = None) -> Tensor:
    """An empty tensor laid out as x; of no elements, on the device of `other`, for None."""
    if x is None:
        assert other is not None
        return other.new_empty(0)
    return torch.empty_like(x)


@attend.register_fake
def _(q, k, v, p, s, rate, kv, k_sum, chunk_size, normalise, eps):  # type: ignore[no-untyped-def]
    return _outputs(q, v, kv, k_sum, chunk_size)


@attend_backward.register_fake
def _(do, dkv, dk_sum, q, k, v, p, s, o, den, kv_m, k_m, rate, chunk_size, normalise, eps):  # type: ignore[no-untyped-def]
    inputs = (like(q), like(k), like(v), like(p, q), like(s, q))
    return *inputs, dkv.new_empty(dkv.shape), dk_sum.new_empty(dk_sum.shape)


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    *tensors, ctx.rate, _kv, _k_sum, ctx.chunk_size, ctx.normalise, ctx.eps = inputs
    o, den, _kv_after, _k_sum_after, *marks = output
    ctx.save_for_backward(*tensors, o, den, *marks)
    ctx.mark_non_differentiable(den, *marks)
    ctx.set_materialize_grads(False)  # Zeros for the marks would be as large as they are.


def _differentiate(ctx, do, _dden, dkv, dk_sum, *_dmarks):  # type: ignore[no-untyped-def]
    saved = ctx.saved_tensors  # Once: checkpointing computes them anew at each look.
    o, _, kv_marks, k_sum_marks = saved[-4:]
    do = torch.zeros_like(o) if do is None else do
    dkv = kv_marks.new_zeros(kv_marks.shape[1:]) if dkv is None else dkv
    if dk_sum is None:
        dk_sum = k_sum_marks.new_zeros(k_sum_marks.shape[1:]).squeeze(-2)
    options = ctx.rate, ctx.chunk_size, ctx.normalise, ctx.eps
    grads = attend_backward(do, dkv, dk_sum, *saved, *options)
    *inputs, dkv, dk_sum = (grad if grad.numel() else None for grad in grads)
    return *inputs, None, dkv, dk_sum, None, None, None


attend.register_autograd(_differentiate, setup_context=_save)
