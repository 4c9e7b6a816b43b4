"""Linear attention to a whole sequence by Triton: see kernels/linear.py.

Keys and queries, of which there may be more or fewer, are cut into chunks of their own.

Axes: b batch, h heads, t queries, n keys, f features, e values, r rank.
"""

import torch
from torch import Tensor

from leap.ops.derivatives import differentiable_again, gradients, transformed
from leap.ops.linear import whole
from leap.ops.linear.parts import Tokens
from leap.ops.native.library import like, side_by_side
from leap.ops.state import accumulator
from leap.ops.triton.causal import Call
from leap.ops.triton.device import Blocks, refuses, strides


def refusal(tokens: Tokens, *, is_named: bool) -> str | None:
    """Why the kernels do not take a call, or None if they do."""
    if transformed():
        return "it has no transforms of torch.func and no forward mode"
    if not tokens.q.shape[2] or not tokens.k.shape[2]:
        return "it needs a query and a key"
    return refuses(tokens, is_named=is_named)


@torch.library.custom_op("leap::triton_linear_attention", mutates_args=())
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    x: Tensor | None,
    y: Tensor | None,
    key_mask: Tensor | None,
    normalise: bool,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Attended values `[b, h, t, e]`, and the state, kv and k_sum; then what the backward takes.

    That is denominators, scales of the queries and what rounding took off. The mask is `[b, n]`.
    """
    o, kv, k_sum, den, scale, rest = results = _outputs(q, v, x)
    queries, keys = _both(q, k, v, x, y, key_mask)
    total = keys.states_before(None, None, kv, k_sum)[:, -1:].contiguous()
    queries.run(
        "outputs",
        (queries.rows * queries.n_blocks, queries.n_values),
        *(queries.q, keys.k, keys.v, queries.x, keys.y, None, None, None, total),
        *(o, rest if rest.numel() else None, den, scale),
        *(queries.t, queries.n_blocks, 1, queries.heads),
        *(n for each in (queries.q, keys.k, keys.v, o) for n in strides(each)),
        CAUSAL=False,
        NORMALISE=normalise,
        EPS=eps,
    )
    return results


@torch.library.custom_op("leap::triton_linear_attention_backward", mutates_args=())
def attend_backward(
    do: Tensor,
    dkv: Tensor | None,
    dk_sum: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    x: Tensor | None,
    y: Tensor | None,
    key_mask: Tensor | None,
    o: Tensor,
    den: Tensor,
    scale: Tensor,
    rest: Tensor,
    normalise: bool,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, x and y, the last two empty without re-weighting."""
    dq, dk, dv, dx, dy = grads = _gradients(q, k, v, x, y)
    queries, keys = _both(q, k, v, x, y, key_mask)
    do = side_by_side(do)
    total = keys.states_before(None, None)[:, -1:].contiguous()
    inverse, h = queries.divided(do, o, rest, den, scale, normalise, eps)
    none = do.new_empty(0)
    dstates = queries.gradients_after(do, scale, inverse, h, dkv, dk_sum, none, none, None, None)
    dtotal = dstates[:, -1:].contiguous()
    queries.query_gradients(do, scale, inverse, h, total, dq, dx, None, causal=False)
    keys.key_gradients(do, scale, inverse, h, dtotal, dk, dy, None, causal=False)
    keys.value_gradients(do, scale, inverse, dtotal, dv, causal=False)
    return grads


def _both(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    x: Tensor | None,
    y: Tensor | None,
    key_mask: Tensor | None,
) -> tuple[Call, Call]:
    """The kernels of queries, and those of keys."""
    blocks = Blocks.of((q, k, v), q.shape[-1], v.shape[-1])
    return (
        Call(q, q, v, x, x, None, None, None, blocks=blocks),
        Call(k, k, v, y, y, None, key_mask, None, blocks=blocks),
    )


def _outputs(
    q: Tensor, v: Tensor, x: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    (b, h, t, f), e, r = q.shape, v.shape[-1], 1 if x is None else x.shape[-1]
    o = v.new_empty(b, t, h, e).transpose(1, 2)  # So that joining the heads copies nothing.
    kv = v.new_empty(b, h, r * f, e, dtype=torch.float64)
    den = v.new_empty(b, h, t, dtype=accumulator(q, v))
    rest = torch.empty_like(o) if v.dtype in (torch.float16, torch.bfloat16) else v.new_empty(0)
    return o, kv, kv.new_empty(b, h, r * f), den, torch.empty_like(den), rest


def _gradients(
    q: Tensor, k: Tensor, v: Tensor, x: Tensor | None, y: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    dx, dy = (q.new_empty(0) if each is None else each.new_empty(each.shape) for each in (x, y))
    return like(q, q), like(k, q), like(v, q), dx, dy


@attend.register_fake
def _(q, k, v, x, y, key_mask, normalise, eps):  # type: ignore[no-untyped-def]
    return _outputs(q, v, x)


@attend_backward.register_fake
def _(do, dkv, dk_sum, q, k, v, x, y, *others):  # type: ignore[no-untyped-def]
    return _gradients(q, k, v, x, y)


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    *tensors, ctx.normalise, ctx.eps = inputs
    o, _, _, *kept = output
    ctx.save_for_backward(*tensors, o, *kept)
    ctx.mark_non_differentiable(*kept)
    ctx.set_materialize_grads(False)


def _differentiate(ctx, do, dkv, dk_sum, *_none):  # type: ignore[no-untyped-def]
    saved = ctx.saved_tensors  # Once: checkpointing computes them anew at each look.
    if differentiable_again():
        q, k, v, x, y, mask = saved[:6]
        mask = None if mask is None else mask[:, None, :, None]
        given = q, k, v, x, y, mask, accumulator(q, k, v), ctx.normalise, ctx.eps
        return *gradients(whole.plain, given, (do, dkv, dk_sum))[:6], None, None
    do = torch.zeros_like(saved[6]) if do is None else do
    grads = attend_backward(do, dkv, dk_sum, *saved, ctx.normalise, ctx.eps)
    return *(grad if grad.numel() else None for grad in grads), None, None, None


attend.register_autograd(_differentiate, setup_context=_save)
