"""The gated delta rule a chunk at a time, in O(t), with its own backward pass.

Written by what each token changes, u_t, a chunk that begins with the state S is

    S_t = a_t S_{t-1} + k_t u_t^T       u_t = b_t (v_t - a_t S_{t-1}^T k_t)
    (I + M) U = b V - b e^L K S         M_ij = b_i e^(L_i - L_j) k_i . k_j     for j < i
    O = e^L Q S + A U                   A_ij = e^(L_i - L_j) q_i . k_j         for j <= i
    S_end = e^L_end S + K'^T U          K'_j = e^(L_end - L_j) k_j             L_i = l_1 + ... + l_i

The triangular system is solved for b V and for -b e^L K before S is known, U = V' + W S. So all is
done for all chunks at once,

    O = A V' + (e^L Q + A W) S          S_end = e^L_end S + K'^T V' + K'^T W S

but the latter, which goes from chunk to chunk. An exponent is the sum of the gates between two
tokens, so never positive.

Backward is the same in reverse: dS goes from chunk to chunk, the transposed system is solved for
all of them. The gates need no more than what is there: to scale a_i is to scale all that is read
from token i on and to scale back all that is written from there on, and so within a chunk

    dl_i = sum_{j >= i} (do_j . o_j - dv_j . v_j) + <dS_end, S_end>

Axes: b batch, h heads, t tokens, f features, e values; r = b h rows, n chunks, c tokens of a chunk.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.linalg import solve_triangular

from leap.ops.derivatives import differentiable_again, gradients, transformed
from leap.ops.threads import on_one_thread


def attend(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_gate: Tensor | None, s: Tensor, size: int
) -> tuple[Tensor, Tensor]:
    """Attended values `[b, h, t, e]`, and S after the last token."""
    if log_gate is None:
        log_gate = torch.zeros_like(beta)
    given = (q, k, v, beta.unsqueeze(-1), log_gate.unsqueeze(-1))
    run: Callable[..., tuple[Tensor, ...]] = plain if transformed() else attend_chunks
    o, after, *_ = run(*(_cut(x, size) for x in given), s.flatten(0, 1))
    return o.reshape(*q.shape[:2], -1, v.shape[-1])[:, :, : q.shape[2]], after.view_as(s)


def _cut(x: Tensor, size: int) -> Tensor:
    """`[b, h, t, width]` in chunks `[r, n, c, width]`, filled up by zeros, which change nothing."""
    x = torch.nn.functional.pad(x, (0, 0, 0, -x.shape[2] % size))
    return x.reshape(x.shape[0] * x.shape[1], -1, size, x.shape[-1])


def plain(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_gate: Tensor, s: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """All chunks of all rows, q, k, v, beta and log_gate `[r, n, c, ...]`, after the state s.

    Returns outputs, the state after, and for the backward the states from first to last, what is
    left between tokens, A, M, [V', W], K'^T [V', W] and e^L Q + A W.
    """
    e = v.shape[-1]
    left, since, written = _left_between(log_gate), log_gate.cumsum(2).exp(), k * beta
    scores = (q @ k.mT).mul_(left)
    system = (written @ k.mT).mul_(left)  # Its diagonal is taken to be 1.
    given = torch.cat([v * beta, written * -since], dim=-1)
    solved = solve_triangular(system, given, upper=False, unitriangular=True)

    change = (k * left[:, :, -1].unsqueeze(-1)).mT @ solved
    states = [s]
    with on_one_thread(q):
        for added, turned, end in zip(
            change[..., :e].unbind(1),
            change[..., e:].unbind(1),
            since[:, :, -1:].unbind(1),
            strict=True,
        ):
            moved = torch.baddbmm(added, turned, states[-1])
            states.append(torch.addcmul(moved, states[-1], end))
    marks = torch.stack(states, dim=1)

    through = scores @ solved
    seen = through[..., e:].addcmul(q, since)
    o = (seen @ marks[:, :-1]).add_(through[..., :e])
    return o, states[-1].clone(), marks, left, scores, system, solved, change, seen


attend_chunks = torch.library.custom_op("leap::causal_delta_attention", plain, mutates_args=())


@torch.library.custom_op("leap::causal_delta_attention_backward", mutates_args=())
def attend_chunks_backward(
    do: Tensor,
    ds: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_gate: Tensor,
    o: Tensor,
    marks: Tensor,
    left: Tensor,
    scores: Tensor,
    system: Tensor,
    solved: Tensor,
    change: Tensor,
    seen: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, beta, log_gate and of the state before."""
    e, before, since = v.shape[-1], marks[:, :-1], log_gate.cumsum(2).exp()
    dstates = [ds]
    with on_one_thread(q):
        for added, turned, end in zip(
            *(x.flip(1).unbind(1) for x in (seen.mT @ do, change[..., e:].mT, since[:, :, -1:])),
            strict=True,
        ):
            dstates.append(torch.baddbmm(added, turned, dstates[-1]).addcmul_(dstates[-1], end))
    dafter = torch.stack(dstates[-2::-1], dim=1)

    dseen = do @ before.mT
    dthrough = torch.cat([do, dseen], dim=-1)
    dchange = torch.cat([dafter, dafter @ before.mT], dim=-1)
    kept, written = left[:, :, -1].unsqueeze(-1), k * beta
    dsolved = (scores.mT @ dthrough).add_((k * kept) @ dchange)
    dgiven = solve_triangular(system.mT, dsolved, upper=True, unitriangular=True)
    dscores = (dthrough @ solved.mT).mul_(left)
    minus_dsystem = (dgiven @ solved.mT).mul_(left).tril_(-1)

    dq = (dscores @ k).addcmul_(dseen, since)
    dwritten = (minus_dsystem @ k).addcmul_(dgiven[..., e:], since).neg_()
    dk = (dscores.mT @ q).sub_(minus_dsystem.mT @ written)
    dk.addcmul_(solved @ dchange.mT, kept).addcmul_(dwritten, beta)
    dv = (dgiven[..., :e] * beta).contiguous()
    dbeta = _dot(dgiven[..., :e], v).add_(_dot(dwritten, k))

    dlog_gate = _dot(do, o).sub_(_dot(dv, v))
    dlog_gate[:, :, -1] += (dafter * marks[:, 1:]).sum((-2, -1)).unsqueeze(-1)
    dlog_gate = dlog_gate.flip(2).cumsum(2).flip(2)
    return dq, dk, dv, dbeta, dlog_gate, dstates[-1].clone()


def _dot(x: Tensor, y: Tensor) -> Tensor:
    """Products of the vectors of each token, `[..., 1]`."""
    return torch.linalg.vecdot(x, y).unsqueeze(-1)


@attend_chunks.register_fake
def _(q, k, v, beta, log_gate, s):  # type: ignore[no-untyped-def]
    (r, n, c, f), e = k.shape, v.shape[-1]
    o, after, marks = v.new_empty(v.shape), s.new_empty(s.shape), s.new_empty(r, n + 1, f, e)
    left, scores, system = (k.new_empty(r, n, c, c) for _ in range(3))
    solved = k.new_empty(r, n, e + f, c).mT  # As the solver leaves it.
    change, seen = k.new_empty(r, n, f, e + f), k.new_empty(k.shape)
    return o, after, marks, left, scores, system, solved, change, seen


@attend_chunks_backward.register_fake
def _(do, ds, q, k, v, beta, log_gate, *saved):  # type: ignore[no-untyped-def]
    return tuple(x.new_empty(x.shape) for x in (q, k, v, beta, log_gate, ds))


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    *tokens, s = inputs
    o, _after, *saved = output
    ctx.save_for_backward(s, *tokens, o, *saved)
    ctx.mark_non_differentiable(*saved)
    ctx.set_materialize_grads(False)  # Zeros for what is saved would be as large as it is.


def _differentiate(ctx, do, ds, *_dsaved):  # type: ignore[no-untyped-def]
    s, *saved = ctx.saved_tensors  # Once: checkpointing computes them anew at each look.
    if differentiable_again():
        return gradients(lambda *inputs: plain(*inputs)[:2], (*saved[:5], s), (do, ds))
    o, marks = saved[5:7]
    do = torch.zeros_like(o) if do is None else do
    ds = torch.zeros_like(marks[:, 0]) if ds is None else ds
    return attend_chunks_backward(do, ds, *saved)


attend_chunks.register_autograd(_differentiate, setup_context=_save)


def _left_between(log_gate: Tensor) -> Tensor:
    """What is left of token j at token i of a chunk, e^(l_{j+1} + ... + l_i), 0 for j > i.

    Sums of the gates between them, by a product with ones: the difference of two sums from the
    chunk's beginning would lose its digits behind a gate that forgets all.
    """
    c = log_gate.shape[2]
    ones = log_gate.new_ones(c, c).tril()
    unseen = torch.full_like(ones, -torch.inf).triu(1)
    gates = log_gate * ones.tril(-1)
    return (ones.expand_as(gates) @ gates).add_(unseen).exp_()
