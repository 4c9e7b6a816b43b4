"""Causal linear attention a chunk at a time, in O(t), with a backward pass that recomputes.

Tokens of one chunk attend to each other through a small square of scores; all earlier tokens
stand in the state, `kv = sum_j fk_j v_j^T` and `k_sum = sum_j fk_j`:

    a_ij  = (q_i . k_j) (x_i . y_j) exp(c_i - c_j)      j <= i, both in the chunk
    num_i = sum_j a_ij v_j + exp(c_i) fq_i kv           fq_i = [q_i x_i1, ... q_i x_ir], fk_j alike
    den_i = sum_j a_ij     + exp(c_i) fq_i . k_sum      o_i = num_i / max(den_i, eps)
    kv    = exp(c_n) kv + sum_j exp(c_n - c_j) fk_j v_j^T              n: the chunk's last token

x_i . y_j re-weights scores (LeaPformer: r = 2), so that they need features of width f where the
state needs r f. c_i = l_1 + ... + l_i adds up the logs of the gates of the chunk's tokens, one per
head, at most 0. No exponent is ever positive, so nothing overflows however much is forgotten. A
gate that is the same at every token (ALiBi) has factors that are the same in every chunk.
Without re-weighting or gates x, y and c drop out.

Backward, with g = do / den and h = -(do . o) / den (0 where the floor eps holds):

    da_ij = g_i . v_j + h_i                            j <= i
    dv_j  = sum_i a_ij g_i + fk_j dkv                  dkv and dk_sum gather from later chunks:
    dfq_i = kv g_i + k_sum h_i                         dkv    = exp(c_n) dkv    + fq^T g
    dfk_j = dkv v_j + dk_sum                           dk_sum = exp(c_n) dk_sum + fq^T h

and the product rule on a, fq and fk (here with their fading multiplied in). A gate fades all that
lies before it for all that comes after, so that its gradient is, over the rest of the chunk,

    dl_i = sum_{m >= i} (q_m . dq_m - k_m . dk_m) + kv . dkv + k_sum . dk_sum       after the chunk

Kept for the backward are inputs, output, `den`, and the state at regular intervals, from which
those between are computed again. The loop takes one chunk after the other rather than all at once,
because the dozen small matrices of a chunk then stay in the processor's cache.

Axes: b batch, h heads, t tokens, f features, e values, r rank; n = b h rows, c tokens of a chunk.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from leap.ops.derivatives import differentiable_again, gradients
from leap.ops.features import widen
from leap.ops.linear import gated
from leap.ops.linear.parts import (
    Tokens,
    like,
    normalised,
    part,
    precision,
    put,
    spans,
    state_width,
    through_the_division,
    unit_scale,
    widen_backward,
)
from leap.ops.state import accumulator, as_given, finest
from leap.ops.threads import on_one_thread

Inputs = tuple[Tensor | None, ...]  # q, k, v, x, y and log_gate, `[b, h, t, ...]`.

ROWS_AT_ONCE = 32  # With more rows a chunk's matrices outgrow the cache.
STRETCHES_AT_ONCE = 8  # Added up before they are added, in double precision, to what was before.
TOKENS_AT_ONCE = 1024  # Brought to full precision and scaled at once: a copy that fits the cache.


@dataclass(frozen=True)
class _Fading:
    """What is left of scores within a chunk, and of what passes in and out of it."""

    between: Tensor
    """exp(c_i - c_j) where j <= i, `[n, c, c]`."""
    since: Tensor
    """exp(c_i): of the state before the chunk, for each query, `[n, c, 1]`."""
    until: Tensor
    """exp(c_n - c_j): of each key, in the state after the chunk, `[n, c, 1]`."""
    across: Tensor
    """exp(c_n): of the state before the chunk, in the one after, `[n, 1, 1]`."""

    @classmethod
    def of(cls, log_gate: Tensor) -> "_Fading":
        """Of gates `[n, c]`."""
        # In double precision, as sums of many that forget would swallow those that do not.
        c = log_gate.to(finest(log_gate.device)).cumsum(1).unsqueeze(-1)
        last = c[:, -1:]
        exponents = (c - c.mT).clamp_max_(0), c, last - c, last
        return cls(*(each.to(log_gate.dtype).exp() for each in exponents))


class _Constant:
    """The fading of gates that are the same at every token, made once for each length of chunk."""

    def __init__(self, rate: Sequence[float], kv: Tensor) -> None:
        self.rate = kv.new_tensor(rate).repeat(kv.shape[0] // len(rate)).view(-1, 1)
        self.made: dict[int, _Fading] = {}

    def over(self, n: int) -> _Fading:
        if n not in self.made:
            self.made[n] = _Fading.of(self.rate.expand(-1, n))
        return self.made[n]


@dataclass(frozen=True)
class _Rows:
    """A stretch of some rows, `[n, t, ...]`, in the accumulator's precision, queries scaled."""

    q: Tensor
    k: Tensor
    v: Tensor
    x: Tensor | None
    y: Tensor | None
    gate: Tensor | None
    scale: Tensor

    @classmethod
    def of(cls, inputs: Inputs, rows: slice, stretch: slice, dtype: torch.dtype) -> "_Rows":
        q, k, v, x, y, gate = (
            None if each is None else part(each, rows, stretch).to(dtype) for each in inputs
        )
        assert q is not None and k is not None and v is not None
        scale = unit_scale(q)
        return cls(q * scale, k, v, x, y, gate, scale)

    def chunk(self, span: slice, constant: _Constant | None) -> "_Chunk":
        q, k, v, scale = (each[:, span] for each in (self.q, self.k, self.v, self.scale))
        x, y = (None if each is None else each[:, span] for each in (self.x, self.y))
        fading = None
        if self.gate is not None:
            fading = _Fading.of(self.gate[:, span])
        elif constant is not None:
            fading = constant.over(q.shape[1])
        return _Chunk(q, k, v, x, y, scale, fading)


class _Chunk:
    """A stretch of tokens short enough to attend to each other in a square of scores."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        x: Tensor | None,
        y: Tensor | None,
        scale: Tensor,
        fading: _Fading | None,
    ) -> None:
        self.q, self.k, self.v, self.x, self.y = q, k, v, x, y
        self.scale, self.fading = scale, fading
        # What re-weights the state's queries and keys: with fading there is something always.
        self.x_state, self.y_state = x, y
        if fading is not None:
            self.x_state = fading.since if x is None else x * fading.since
            self.y_state = fading.until if y is None else y * fading.until

    def scores(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """The causal scores `[n, c, c]`, and their factors: products, and all that weighs them."""
        dots = torch.bmm(self.q, self.k.mT)
        weights = None if self.fading is None else self.fading.between
        if self.x is not None and self.y is not None:
            turned = torch.bmm(self.x, self.y.mT)
            weights = turned if weights is None else turned.mul_(weights)
        if weights is None:
            return dots.tril_(), dots, None
        return torch.mul(dots, weights).tril_(), dots, weights

    def attend(self, kv: Tensor, k_sum: Tensor) -> tuple[Tensor, Tensor]:
        """Numerators and denominators, given the state before the chunk."""
        scores, fq = self.scores()[0], widen(self.q, self.x_state)
        num = torch.bmm(scores, self.v).baddbmm_(fq, kv)
        return num, (scores.sum(-1) + torch.linalg.vecdot(fq, k_sum)).unsqueeze(-1)

    def advance_(self, kv: Tensor, k_sum: Tensor) -> None:
        """Move the state past the chunk, in place."""
        fk = widen(self.k, self.y_state)
        if self.fading is not None:
            kv *= self.fading.across
            k_sum *= self.fading.across
        kv.baddbmm_(fk.mT, self.v)
        k_sum += fk.sum(1, keepdim=True)

    def backward_(
        self, g: Tensor, h: Tensor, kv: Tensor, k_sum: Tensor, dkv: Tensor, dk_sum: Tensor
    ) -> tuple[Tensor, ...]:
        """Gradients of q, k, v, x, y, and of gates but for what they fade for later chunks.

        Those of x and y are empty without re-weighting, and those of gates without gates. Moves
        dkv and dk_sum back past the chunk, in place.
        """
        scores, dots, weights = self.scores()
        fq, fk = widen(self.q, self.x_state), widen(self.k, self.y_state)
        dv = torch.bmm(scores.mT, g).baddbmm_(fk, dkv)
        dfq = torch.bmm(g, kv.mT).addcmul_(h, k_sum)
        dfk = torch.bmm(self.v, dkv.mT).add_(dk_sum)
        dscores = torch.baddbmm(h, g, self.v.mT).tril_()
        dx = dy = dgate = g.new_empty(0)
        if self.x is not None and self.y is not None:
            dq, dx_state = widen_backward(dfq, self.q, self.x_state)
            dk, dy_state = widen_backward(dfk, self.k, self.y_state)
            assert dx_state is not None and dy_state is not None
            dweights = dots.mul_(dscores)
            if self.fading is not None:
                dweights.mul_(self.fading.between)
                dx_state.mul_(self.fading.since)
                dy_state.mul_(self.fading.until)
            dx, dy = dx_state.baddbmm_(dweights, self.y), dy_state.baddbmm_(dweights.mT, self.x)
        elif self.fading is not None:
            dq, dk = dfq.mul_(self.fading.since), dfk.mul_(self.fading.until)
        else:
            dq, dk = dfq, dfk
        if weights is not None:
            dscores.mul_(weights)
        dq.baddbmm_(dscores, self.k)
        dk.baddbmm_(dscores.mT, self.q)
        if self.fading is not None:
            dgate = torch.linalg.vecdot(self.q, dq) - torch.linalg.vecdot(self.k, dk)
            dgate = dgate.flip(1).cumsum(1).flip(1)
            dkv *= self.fading.across
            dk_sum *= self.fading.across
        dkv.baddbmm_(fq.mT, g)
        dk_sum.baddbmm_(h.mT, fq)
        return dq.mul_(self.scale), dk, dv, dx, dy, dgate


class _Sums:
    """The state of some rows as it moves on: what lies far back, and what was added since.

    To add each chunk to all that was before would round the sum of the whole past each time, and
    tokens that are alike round it the same way. So the far past is of double precision, and is
    added to only now and then. Queries see the two as one.
    """

    def __init__(self, far: tuple[Tensor, Tensor], dtype: torch.dtype, *, is_empty: bool) -> None:
        self.far, self.is_empty = far, is_empty
        self.rounded = tuple(x.to(dtype, copy=True) for x in far)
        self.near = tuple(torch.zeros_like(x) for x in self.rounded)
        self.left: Tensor | None = None  # Of the far past, since it was last added to.

    def now(self) -> tuple[Tensor, ...]:
        """kv and k_sum."""
        if self.is_empty:
            return self.near
        pairs = zip(self.near, self.rounded, strict=True)
        if self.left is None:
            return tuple(near + far for near, far in pairs)
        return tuple(torch.addcmul(near, far, self.left) for near, far in pairs)

    def read(self, c: _Chunk) -> None:
        """Move past a chunk."""
        c.advance_(*self.near)
        if c.fading is not None:
            self.left = c.fading.across if self.left is None else self.left * c.fading.across

    def settle(self) -> None:
        """Add to the far past what was read since."""
        for far, near, rounded in zip(self.far, self.near, self.rounded, strict=True):
            if self.left is not None:
                far *= self.left
            rounded.copy_(far.add_(near))
            near.zero_()
        self.left, self.is_empty = None, False


def row_spans(x: Tensor) -> list[slice]:
    """The batch of `[b, h, ...]` cut into parts of as many rows as are computed at once."""
    return spans(x.shape[0], max(1, ROWS_AT_ONCE // max(1, x.shape[1])))


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
    x: Tensor | None,
    y: Tensor | None,
    log_gate: Tensor | None,
    rate: Sequence[float] | None,
    kv: Tensor | None,
    k_sum: Tensor | None,
    chunk_size: int,
    normalise: bool,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Attended values `[b, h, t, e]`, denominators `[b, h, t, 1]`, the state after, and marks.

    Scores fade by gates `[b, h, t]`, or by a `rate` of each head. At the start of a sequence no
    state is given, as to add to zeros would take its time. Marks are the states at the start
    of each stretch, `[stretches, b, h, ...]`, for the backward. A custom op, so that a compiler
    takes it as it is: unrolling the loop would gain nothing.
    """
    o, den, kv_after, k_sum_after, kv_marks, k_sum_marks = _outputs(q, k, v, x, chunk_size)
    inputs = q, k, v, x, y, log_gate
    with as_given(q), on_one_thread(q):
        for after, before in ((kv_after, kv), (k_sum_after, k_sum)):
            after.zero_() if before is None else after.copy_(before)
        for rows in row_spans(q):
            far = part(kv_after, rows), part(k_sum_after, rows).unsqueeze(1)
            sums = _Sums(far, den.dtype, is_empty=kv is None)
            constant = None if rate is None else _Constant(rate, sums.near[0])
            for i, stretch in enumerate(_stretches(q.shape[2], chunk_size)):
                if i and i % STRETCHES_AT_ONCE == 0:
                    sums.settle()
                for marks, each in zip((kv_marks, k_sum_marks), sums.now(), strict=True):
                    part(marks[i], rows).copy_(each)
                tokens = _Rows.of(inputs, rows, stretch, den.dtype)
                for span in spans(tokens.q.shape[1], chunk_size):
                    c = tokens.chunk(span, constant)
                    num, den_c = c.attend(*sums.now())
                    o_c = normalised(num, den_c, eps * c.scale) if normalise else num / c.scale
                    put(o_c, o[:, :, stretch], rows, span)
                    put(den_c, den[:, :, stretch], rows, span)
                    sums.read(c)
            sums.settle()
    return o, den, kv_after, k_sum_after, kv_marks, k_sum_marks


def _outputs(
    q: Tensor, k: Tensor, v: Tensor, x: Tensor | None, chunk_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    size = _stretch_size(chunk_size)
    n = (q.shape[2] + size - 1) // size  # Not by a loop, so that a compiler may leave t open.
    (b, h, _, f), e = k.shape, v.shape[-1]
    f = f if x is None else f * x.shape[-1]
    kv = v.new_empty(b, h, f, e, dtype=finest(v.device))
    den = v.new_empty(*v.shape[:3], 1, dtype=accumulator(q, k, v))
    marks = den.new_empty(n, b, h, f, e), den.new_empty(n, b, h, 1, f)
    return like(v), den, kv, kv.new_empty(b, h, f), *marks


@torch.library.custom_op("leap::causal_linear_attention_backward", mutates_args=())
def attend_backward(
    do: Tensor,
    dkv: Tensor,
    dk_sum: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    x: Tensor | None,
    y: Tensor | None,
    log_gate: Tensor | None,
    o: Tensor,
    den: Tensor,
    kv_after: Tensor,
    k_sum_after: Tensor,
    kv_marks: Tensor,
    k_sum_marks: Tensor,
    rate: Sequence[float] | None,
    chunk_size: int,
    normalise: bool,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, x, y, log_gate (empty where there is none) and of the state before."""
    inputs = q, k, v, x, y, log_gate
    outputs = tuple(like(each, q) for each in inputs)
    with as_given(q), on_one_thread(q):
        # Contiguous, as views of their rows are what the loop adds to.
        dkv_before, dk_sum_before = (
            each.to(den.dtype, copy=True, memory_format=torch.contiguous_format)
            for each in (dkv, dk_sum)
        )
        for rows in row_spans(q):
            dkv_, dk_sum_ = part(dkv_before, rows), part(dk_sum_before, rows).unsqueeze(1)
            after = (
                part(kv_after, rows).to(den.dtype),
                part(k_sum_after, rows).unsqueeze(1).to(den.dtype),
            )
            constant = None if rate is None else _Constant(rate, dkv_)
            for i, stretch in reversed(list(enumerate(_stretches(q.shape[2], chunk_size)))):
                tokens = _Rows.of(inputs, rows, stretch, den.dtype)
                do_, o_, den_ = (part(each, rows, stretch) for each in (do, o, den))
                g, h = through_the_division(do_, o_, den_, tokens.scale, normalise, eps)
                cuts = spans(tokens.q.shape[1], chunk_size)
                chunks = [tokens.chunk(span, constant) for span in cuts]
                states = _states_before(chunks, part(kv_marks[i], rows), part(k_sum_marks[i], rows))
                for span, c, before in reversed(list(zip(cuts, chunks, states, strict=True))):
                    later = None
                    if log_gate is not None:  # Before dkv moves on: see the formula of dl.
                        later = _inner(after[0], dkv_) + _inner(after[1], dk_sum_)
                    grads = c.backward_(g[:, span], h[:, span], *before, dkv_, dk_sum_)
                    if later is not None:
                        grads[-1].add_(later)
                    for out, grad in zip(outputs, grads, strict=True):
                        if out.numel():
                            put(grad, out[:, :, stretch], rows, span)
                    after = before
        before = [each.to(dkv.dtype) for each in (dkv_before, dk_sum_before)]
    return *outputs, *before


def _inner(a: Tensor, b: Tensor) -> Tensor:
    """The inner product of the matrices of each row, `[n, 1]`."""
    return (a * b).sum((-2, -1)).unsqueeze(-1)


def _states_before(chunks: list[_Chunk], kv: Tensor, k_sum: Tensor) -> list[tuple[Tensor, Tensor]]:
    """The state before each of some chunks, from the one before the first."""
    states = [(kv, k_sum)]
    for c in chunks[:-1]:
        kv, k_sum = kv.clone(), k_sum.clone()
        c.advance_(kv, k_sum)
        states.append((kv, k_sum))
    return states


def plain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    x: Tensor | None,
    y: Tensor | None,
    log_gate: Tensor | None,
    rate: Sequence[float] | None,
    kv: Tensor | None,
    k_sum: Tensor | None,
    chunk_size: int,
    normalise: bool,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attended values and the state after as `attend` has them, by operations of torch alone."""
    tokens = Tokens(q, k, v, x, y)
    if kv is None or k_sum is None:
        size = (*k.shape[:2], state_width(tokens))
        kv, k_sum = (v.new_zeros(*size, *e, dtype=finest(v.device)) for e in (v.shape[-1:], ()))
    if log_gate is None:
        rates = [0.0] * q.shape[1] if rate is None else list(rate)
        log_gate = q.new_tensor(rates, dtype=precision(tokens)).unsqueeze(-1).expand(q.shape[:3])
    gates = log_gate.unsqueeze(-1)
    return gated.attend(
        tokens, gates, kv, k_sum, normalise=normalise, chunk_size=chunk_size, eps=eps
    )


@attend.register_fake
def _(q, k, v, x, y, log_gate, rate, kv, k_sum, chunk_size, normalise, eps):  # type: ignore[no-untyped-def]
    return _outputs(q, k, v, x, chunk_size)


@attend_backward.register_fake
def _(do, dkv, dk_sum, q, k, v, x, y, log_gate, *others):  # type: ignore[no-untyped-def]
    inputs = (like(each, q) for each in (q, k, v, x, y, log_gate))
    return *inputs, dkv.new_empty(dkv.shape), dk_sum.new_empty(dk_sum.shape)


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    *tensors, ctx.rate, kv, k_sum, ctx.chunk_size, ctx.normalise, ctx.eps = inputs
    o, den, kv_after, k_sum_after, *marks = output
    ctx.has_state = kv is not None
    ctx.save_for_backward(kv, k_sum, *tensors, o, den, kv_after, k_sum_after, *marks)
    ctx.mark_non_differentiable(den, *marks)
    ctx.set_materialize_grads(False)  # Zeros for the marks would be as large as they are.


def _differentiate(ctx, do, _dden, dkv, dk_sum, *_dmarks):  # type: ignore[no-untyped-def]
    kv, k_sum, *saved = ctx.saved_tensors  # Once: checkpointing computes them anew at each look.
    if differentiable_again():
        given = *saved[:-6], ctx.rate, kv, k_sum, ctx.chunk_size, ctx.normalise, ctx.eps
        return gradients(plain, given, (do, dkv, dk_sum))
    o, _, kv_after, k_sum_after, *_ = saved[-6:]
    options = ctx.rate, ctx.chunk_size, ctx.normalise, ctx.eps
    with on_one_thread(o):
        do = torch.zeros_like(o) if do is None else do
        dkv = torch.zeros_like(kv_after) if dkv is None else dkv
        dk_sum = torch.zeros_like(k_sum_after) if dk_sum is None else dk_sum
        grads = attend_backward(do, dkv, dk_sum, *saved, *options)
    *inputs, dkv, dk_sum = (grad if grad.numel() else None for grad in grads)
    before = (dkv, dk_sum) if ctx.has_state else (None, None)
    return *inputs, None, *before, None, None, None


attend.register_autograd(_differentiate, setup_context=_save)
