"""Causal linear attention by Triton: see kernels/linear.py.

Axes: b batch, h heads, t tokens, f features, e values, r rank; n packed sequences.
"""

from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from leap.ops.derivatives import differentiable_again, gradients, transformed
from leap.ops.features import feature_map
from leap.ops.linear import gated
from leap.ops.linear.parts import Tokens, mapped, without_pads
from leap.ops.native import causal as native
from leap.ops.native.library import like, side_by_side
from leap.ops.triton.device import Blocks, cut, launch, power_of_two, refuses, strides
from leap.ops.triton.packing import places

MAPS = {"relu": 1, "elu_plus_one": 2, "exp": 3}
"""Feature maps that are fused, by their numbers in the kernels."""
SCANNED = 256  # Elements of a state that one program carries along.


def refusal(tokens: Tokens, *, is_named: bool) -> str | None:
    """Why the kernels do not take a call, or None if they do."""
    if transformed():
        return "it has no transforms of torch.func and no forward mode"
    return refuses(tokens, is_named=is_named)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    x: Tensor | None,
    y: Tensor | None,
    log_gate: Tensor | None,
    key_mask: Tensor | None,
    rate: Sequence[float] | None,
    kv: Tensor | None,
    k_sum: Tensor | None,
    feature: str | None,
    normalise: bool,
    eps: float,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """As `native.causal.attend`; gates may also be per feature, `[b, h, t, f]`, and rows packed."""
    if feature == "exp":  # Of queries over their largest feature, which takes all of them.
        q = q - q.amax(dim=-1, keepdim=True)
    return attend_op(
        *(q, k, v, x, y, log_gate, key_mask, cu_seqlens, rate, kv, k_sum, feature, normalise, eps)
    )


@torch.library.custom_op("leap::triton_causal_linear_attention", mutates_args=())
def attend_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    x: Tensor | None,
    y: Tensor | None,
    log_gate: Tensor | None,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    rate: Sequence[float] | None,
    kv: Tensor | None,
    k_sum: Tensor | None,
    feature: str | None,
    normalise: bool,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Attended values `[b, h, t, e]`, denominators, the state after, and more for the backward.

    That is the scales of the queries, and what rounding took off the values, empty if nothing.
    x, y and `rate` are as in `native.causal`; states have a row for each of packed sequences.
    """
    o, den, kv_after, k_sum_after, scale, rest = results = _outputs(q, k, v, x, cu_seqlens)
    call = Call(q, k, v, x, y, _gates(q, log_gate, rate), key_mask, feature, cu_seqlens)
    states = call.states_before(kv, k_sum, kv_after, k_sum_after)
    call.run(
        "outputs",
        (call.rows * call.n_blocks, call.n_values),
        *(call.q, call.k, call.v, call.x, call.y, call.decay, call.mask),
        *(call.block_places, states, o, rest if rest.numel() else None, den, scale),
        *(call.t, call.n_blocks, call.n_slots, call.heads),
        *(n for each in (call.q, call.k, call.v, o) for n in strides(each)),
        CAUSAL=True,
        NORMALISE=normalise,
        EPS=eps,
    )
    return results


@torch.library.custom_op("leap::triton_causal_linear_attention_backward", mutates_args=())
def attend_backward(
    do: Tensor,
    dkv: Tensor | None,
    dk_sum: Tensor | None,
    kv: Tensor | None,
    k_sum: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    x: Tensor | None,
    y: Tensor | None,
    log_gate: Tensor | None,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    o: Tensor,
    den: Tensor,
    scale: Tensor,
    rest: Tensor,
    rate: Sequence[float] | None,
    feature: str | None,
    normalise: bool,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, x, y, log_gate and of the state before, empty where there is none."""
    dq, dk, dv, dx, dy, dgate, dkv_before, dk_sum_before = grads = _gradients(
        q, k, v, x, y, log_gate, kv
    )
    call = Call(q, k, v, x, y, _gates(q, log_gate, rate), key_mask, feature, cu_seqlens)
    do = side_by_side(do)
    states = call.states_before(kv, k_sum)  # Once more, rather than kept from the forward.
    inverse, h = call.divided(do, o, rest, den, scale, normalise, eps)
    per_feature = log_gate is not None and log_gate.ndim == 4
    inner = None if log_gate is None or per_feature else call.inner()
    dstates = call.gradients_after(
        do, scale, inverse, h, dkv, dk_sum, dkv_before, dk_sum_before, states, inner
    )
    qdq, kdk = (None if log_gate is None else call.shares(per_feature) for _ in range(2))
    call.query_gradients(do, scale, inverse, h, states, dq, dx, qdq)
    call.key_gradients(do, scale, inverse, h, dstates, dk, dy, kdk)
    call.value_gradients(do, scale, inverse, dstates, dv)
    if inner is not None:
        call.run(
            "gate_gradients",
            (call.rows * call.n_chunks,),
            *(qdq, kdk, inner, call.chunk_places, dgate, call.t, call.n_chunks, call.rows),
            *(call.n_features, call.n_scanned),
        )
    if per_feature:
        call.run(
            "feature_gate_gradients",
            (call.rows * call.n_chunks, call.n_features),
            *(qdq, kdk, states, dstates, call.chunk_places, dgate),
            *(call.t, call.n_chunks, call.n_slots),
        )
    return grads


class Call:
    """The kernels of one call, and what they all take."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        x: Tensor | None,
        y: Tensor | None,
        gate: Tensor | None,
        key_mask: Tensor | None,
        feature: str | None,
        cu_seqlens: Tensor | None = None,
        blocks: Blocks | None = None,
    ) -> None:
        self.q, self.k, self.v = map(side_by_side, (q, k, v))
        self.x, self.y, self.mask = (
            None if each is None else each.contiguous() for each in (x, y, key_mask)
        )
        (_, self.heads, self.t, f), e = k.shape, v.shape[-1]
        self.rows, self.rank = k.shape[0] * self.heads, 0 if x is None else x.shape[-1]
        kinds = 0 if gate is None else 1 if gate.ndim == 3 else 2
        self.blocks = blocks or Blocks.of((q, k, v), f, e, per_feature=kinds == 2)
        chunk, block = self.blocks.chunk, self.blocks.tokens
        self.n_chunks, self.n_blocks = cut(self.t, chunk), cut(self.t, block)
        self.n_sequences, self.n_slots = self.rows, self.n_chunks + 1
        self.chunk_places = self.block_places = self.bounds = None
        self.cu_seqlens = cu_seqlens
        if cu_seqlens is not None:
            chunks = places(cu_seqlens, self.t, chunk, chunk)
            pieces = places(cu_seqlens, self.t, block, chunk)
            self.chunk_places, self.bounds = chunks.table, chunks.bounds
            self.block_places = pieces.table
            self.n_chunks, self.n_blocks = len(chunks.table), len(pieces.table)
            n = len(cu_seqlens) - 1
            # And one that may be read after the last of the table's entries that are left over.
            self.n_sequences, self.n_slots = n * self.heads, self.n_chunks + n + 1
        self.n_features, self.n_values = cut(f, self.blocks.features), cut(e, self.blocks.values)
        self.n_kv = max(self.rank, 1) * f * e
        self.n_all = self.n_kv + max(self.rank, 1) * f
        self.n_scanned = cut(self.n_all, SCANNED)
        self.options: dict[str, Any] = {
            "F": f,
            "E": e,
            "RANK": self.rank,
            "MAP": 0 if feature is None else MAPS[feature],
            "GATED": kinds,
            "MASKED": key_mask is not None,
            "BR": power_of_two(max(self.rank, 1)),
            **self.blocks.options(),
        }
        self.decay = None
        if gate is not None:
            wide = (f,) if kinds == 2 else ()
            gate = side_by_side(gate) if wide else gate
            self.decay = q.new_empty(self.rows, self.t, *wide, dtype=torch.float64)
            self.run(
                "decays",
                (self.rows * self.n_chunks, self.n_features if wide else 1),
                *(gate, self.chunk_places, self.decay),
                *(self.t, self.n_chunks, self.heads, *strides(gate)),
            )

    @cached_property
    def gradient_blocks(self) -> tuple[int, Tensor | None]:
        """How many blocks gradients are computed in, and where those of packed sequences lie."""
        size = self.blocks.gradient_tokens
        if self.cu_seqlens is None:
            return cut(self.t, size), None
        table = places(self.cu_seqlens, self.t, size, self.blocks.chunk).table
        return len(table), table

    def run(self, name: str, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        """Launch a kernel with those options that it has."""
        from leap.ops.triton.kernels import linear

        kernel = getattr(linear, name)
        given = self.options | options
        launch(kernel, grid, *args, **{n: given[n] for n in kernel.arg_names if n in given})

    def empty(self, *size: int) -> Tensor:
        """Uninitialised memory of the precision of sums."""
        return self.q.new_empty(size, dtype=self.blocks.dtype)

    def shares(self, per_feature: bool) -> Tensor:
        """Room for what each block of features, or each feature, adds to a number per token."""
        if per_feature:
            return self.empty(self.rows, self.t, self.k.shape[-1])
        return self.empty(self.n_features, self.rows, self.t)

    def inner(self) -> Tensor:
        """Room for what each program of a scan adds to a number per chunk."""
        return self.q.new_empty(self.n_scanned, self.rows, self.n_chunks, dtype=torch.float64)

    def states_before(
        self,
        kv: Tensor | None,
        k_sum: Tensor | None,
        kv_after: Tensor | None = None,
        k_sum_after: Tensor | None = None,
    ) -> Tensor:
        """The state before each chunk and after the last; that one also in double precision."""
        states = self.empty(self.rows, self.n_slots, self.n_all)
        self.run(
            "chunk_states",
            (self.rows * self.n_chunks, max(self.rank, 1) * self.n_features, self.n_values),
            *(self.k, self.v, self.y, self.decay, self.mask, self.chunk_places),
            *(None, None, None, states, self.t, self.n_chunks, self.n_slots, self.heads),
            *(*strides(self.k), *strides(self.v)),
            BACKWARD=False,
        )
        self.scan(states, kv, k_sum, kv_after, k_sum_after, backward=False)
        return states

    def scan(
        self,
        states: Tensor,
        before: Tensor | None,
        sum_before: Tensor | None,
        after: Tensor | None,
        sum_after: Tensor | None,
        *,
        backward: bool,
        other: Tensor | None = None,
        inner: Tensor | None = None,
    ) -> None:
        """Replace the sums of each chunk by those of all before it; backward, after it."""
        if before is None and sum_before is not None:
            before = sum_before.new_zeros(self.n_sequences, self.n_kv)
        if sum_before is None and before is not None:
            sum_before = before.new_zeros(self.n_sequences, self.n_all - self.n_kv)
        before, sum_before = (
            None if each is None else each.contiguous() for each in (before, sum_before)
        )
        self.run(
            "scan",
            (self.n_sequences, self.n_scanned),
            *(states, self.decay, self.chunk_places, self.bounds),
            *(before, sum_before, after, sum_after, other, inner),
            *(self.t, self.n_chunks, self.n_slots, self.rows, self.heads),
            N_KV=self.n_kv,
            N_ALL=self.n_all,
            FROM_STATE=before is not None,
            KEPT=after is not None,
            BACKWARD=backward,
            INNER=inner is not None,
            BLOCK=SCANNED,
        )

    def divided(
        self,
        do: Tensor,
        o: Tensor,
        rest: Tensor,
        den: Tensor,
        scale: Tensor,
        normalise: bool,
        eps: float,
    ) -> tuple[Tensor, Tensor]:
        """What gradients of the output are multiplied by, and gradients of the denominators."""
        inverse, h = torch.empty_like(den), torch.empty_like(den)
        n_blocks = cut(self.t, self.blocks.tokens)  # Of the row: no token knows of another.
        self.run(
            "divide",
            (self.rows * n_blocks,),
            *(do, o, rest if rest.numel() else None, den, scale, inverse, h),
            *(self.t, n_blocks, self.heads, *strides(do), *strides(o)),
            NORMALISE=normalise,
            EPS=eps,
        )
        return inverse, h

    def gradients_after(
        self,
        do: Tensor,
        scale: Tensor,
        inverse: Tensor,
        h: Tensor,
        dkv: Tensor | None,
        dk_sum: Tensor | None,
        dkv_before: Tensor,
        dk_sum_before: Tensor,
        states: Tensor | None,
        inner: Tensor | None,
    ) -> Tensor:
        """The gradient of the state after each chunk; that of the first state also in double."""
        dstates = self.empty(self.rows, self.n_slots, self.n_all)
        self.run(
            "chunk_states",
            (self.rows * self.n_chunks, max(self.rank, 1) * self.n_features, self.n_values),
            *(self.q, do, self.x, self.decay, None, self.chunk_places, scale, inverse, h, dstates),
            *(self.t, self.n_chunks, self.n_slots, self.heads),
            *(*strides(self.q), *strides(do)),
            BACKWARD=True,
            MASKED=False,
        )
        has_state = dkv_before.numel() > 0
        self.scan(
            dstates,
            dkv,
            dk_sum,
            dkv_before if has_state else None,
            dk_sum_before if has_state else None,
            backward=True,
            other=states,
            inner=inner,
        )
        return dstates

    def query_gradients(
        self,
        do: Tensor,
        scale: Tensor,
        inverse: Tensor,
        h: Tensor,
        states: Tensor,
        dq: Tensor,
        dx: Tensor,
        qdq: Tensor | None,
        causal: bool = True,
    ) -> None:
        """Write gradients of the queries, of x, and q . dq."""
        shares = self.empty(self.n_features, *dx.shape) if self.rank else None
        n_blocks, table = self.gradient_blocks
        self.run(
            "query_gradients",
            (self.rows * n_blocks, self.n_features),
            *(self.q, self.k, self.v, self.x, self.y, self.decay, self.mask, table),
            *(do, scale, inverse, h, states, dq, shares, qdq),
            *(self.t, n_blocks, self.n_slots if causal else 1, self.rows, self.heads),
            *(n for each in (self.q, self.k, self.v, do, dq) for n in strides(each)),
            CAUSAL=causal,
            INNER=qdq is not None,
            BT=self.blocks.gradient_tokens,
        )
        if shares is not None:
            dx.copy_(shares.sum(0) if self.n_features > 1 else shares[0])

    def key_gradients(
        self,
        do: Tensor,
        scale: Tensor,
        inverse: Tensor,
        h: Tensor,
        dstates: Tensor,
        dk: Tensor,
        dy: Tensor,
        kdk: Tensor | None,
        causal: bool = True,
    ) -> None:
        """Write gradients of the keys, of y, and k . dk."""
        shares = self.empty(self.n_features, *dy.shape) if self.rank else None
        n_blocks, table = self.gradient_blocks
        self.run(
            "key_gradients",
            (self.rows * n_blocks, self.n_features),
            *(self.q, self.k, self.v, self.x, self.y, self.decay, self.mask, table),
            *(do, scale, inverse, h, dstates, dk, shares, kdk),
            *(self.t, n_blocks, self.n_slots if causal else 1, self.rows, self.heads),
            *(n for each in (self.q, self.k, self.v, do, dk) for n in strides(each)),
            CAUSAL=causal,
            INNER=kdk is not None,
            BT=self.blocks.gradient_tokens,
        )
        if shares is not None:
            dy.copy_(shares.sum(0) if self.n_features > 1 else shares[0])

    def value_gradients(
        self,
        do: Tensor,
        scale: Tensor,
        inverse: Tensor,
        dstates: Tensor,
        dv: Tensor,
        causal: bool = True,
    ) -> None:
        """Write gradients of the values."""
        self.run(
            "value_gradients",
            (self.rows * self.n_blocks, self.n_values),
            *(self.q, self.k, self.x, self.y, self.decay, self.mask, self.block_places),
            *(do, scale, inverse, dstates, dv),
            *(self.t, self.n_blocks, self.n_slots if causal else 1, self.heads),
            *(n for each in (self.q, self.k, do, dv) for n in strides(each)),
            CAUSAL=causal,
        )


def _gates(q: Tensor, log_gate: Tensor | None, rate: Sequence[float] | None) -> Tensor | None:
    """Gates `[b, h, t]`; those of a rate are the same everywhere, and take no memory."""
    if rate is None:
        return log_gate
    rates = torch.tensor(rate, dtype=torch.float64, device=q.device)
    return rates.view(1, -1, 1).expand(q.shape[:3])


def _outputs(
    q: Tensor, k: Tensor, v: Tensor, x: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    (b, h, t, f), e, r = k.shape, v.shape[-1], 1 if x is None else x.shape[-1]
    double = torch.float64 in (q.dtype, k.dtype, v.dtype)
    den = v.new_empty(b, h, t, dtype=torch.float64 if double else torch.float32)
    n = b if cu_seqlens is None else cu_seqlens.shape[0] - 1
    kv = v.new_empty(n, h, r * f, e, dtype=torch.float64)
    o = like(v, v)
    rest = torch.empty_like(o) if v.dtype in (torch.float16, torch.bfloat16) else v.new_empty(0)
    return o, den, kv, kv.new_empty(n, h, r * f), torch.empty_like(den), rest


def _gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    x: Tensor | None,
    y: Tensor | None,
    log_gate: Tensor | None,
    kv: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    k_sum = None if kv is None else kv[..., 0]
    dx, dy, dgate, dkv, dk_sum = (
        q.new_empty(0) if each is None else each.new_empty(each.shape)
        for each in (x, y, log_gate, kv, k_sum)
    )
    return like(q, q), like(k, q), like(v, q), dx, dy, dgate, dkv, dk_sum


@attend_op.register_fake
def _(q, k, v, x, y, log_gate, key_mask, cu_seqlens, *others):  # type: ignore[no-untyped-def]
    return _outputs(q, k, v, x, cu_seqlens)


@attend_backward.register_fake
def _(do, dkv, dk_sum, kv, k_sum, q, k, v, x, y, log_gate, *others):  # type: ignore[no-untyped-def]
    return _gradients(q, k, v, x, y, log_gate, kv)


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    *tensors, ctx.rate, kv, k_sum, ctx.feature, ctx.normalise, ctx.eps = inputs
    o, den, _, _, scale, rest = output
    ctx.save_for_backward(kv, k_sum, *tensors, o, den, scale, rest)
    ctx.mark_non_differentiable(den, scale, rest)
    ctx.set_materialize_grads(False)


def _differentiate(ctx, do, _dden, dkv, dk_sum, _dscale, _drest):  # type: ignore[no-untyped-def]
    kv, k_sum, *saved = ctx.saved_tensors  # Once: checkpointing computes them anew at each look.
    if differentiable_again():
        given = *saved[:-4], ctx.rate, kv, k_sum, ctx.feature, ctx.normalise, ctx.eps
        return gradients(plain, given, (do, dkv, dk_sum))
    do = torch.zeros_like(saved[2]) if do is None else do
    options = ctx.rate, ctx.feature, ctx.normalise, ctx.eps
    grads = attend_backward(do, dkv, dk_sum, kv, k_sum, *saved, *options)
    *inputs, dkv, dk_sum = (grad if grad.numel() else None for grad in grads)
    return *inputs, None, None, None, dkv, dk_sum, None, None, None


def plain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    x: Tensor | None,
    y: Tensor | None,
    log_gate: Tensor | None,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    rate: Sequence[float] | None,
    kv: Tensor | None,
    k_sum: Tensor | None,
    feature: str | None,
    normalise: bool,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The attended values and the state after, by operations of torch alone."""
    options = feature, normalise, eps
    rank = 1 if x is None else x.shape[-1]
    if cu_seqlens is not None:
        found = []
        for n, (begin, end) in enumerate(pairwise(cu_seqlens.tolist())):
            own: list[Any] = [
                None if each is None else each[:, :, begin:end]
                for each in (q, k, v, x, y, log_gate)
            ]
            mask = None if key_mask is None else key_mask[:, begin:end]
            past: list[Any] = [None if each is None else each[n : n + 1] for each in (kv, k_sum)]
            given: list[Any] = [*own, mask, None, rate, *past, *options]
            if begin < end:
                found.append(plain(*given))
            else:
                sums_of_none = _nothing(k, v, rank) if kv is None else past
                found.append((own[2], *sums_of_none))
        outputs, *sums = zip(*found, strict=True)
        return torch.cat(outputs, 2), torch.cat(sums[0]), torch.cat(sums[1])
    if feature == "exp":  # Queries came less their largest feature.
        q, k, feature = q.exp(), feature_map("exp").key(k), None
    if log_gate is None or log_gate.ndim == 3:
        return native.plain(  # type: ignore[no-untyped-call]
            q, k, v, x, y, log_gate, key_mask, rate, kv, k_sum, feature, normalise, eps
        )
    tokens = Tokens(q, k, v, x, y)
    tokens = without_pads(tokens if feature is None else mapped(tokens, feature), key_mask)
    if kv is None or k_sum is None:
        kv, k_sum = _nothing(k, v, rank)
    gates = log_gate.repeat(1, 1, 1, rank)
    return gated.attend(tokens, gates, kv, k_sum, normalise=normalise, chunk_size=64, eps=eps)


def _nothing(k: Tensor, v: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The sums before the first token."""
    kv = k.new_zeros(*k.shape[:2], rank * k.shape[-1], v.shape[-1], dtype=torch.float64)
    return kv, kv[..., 0]


attend_op.register_autograd(_differentiate, setup_context=_save)
