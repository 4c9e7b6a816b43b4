"""Softmax attention between blocks of tokens: each block of queries sees a few blocks of keys.

    o_i = sum_j exp(q_i . k_j / sqrt(f)) v_j  /  sum_j exp(q_i . k_j / sqrt(f))

over the j in the blocks listed for i's block. A query that sees no key gets 0.

The fast version works through a few blocks of queries at a time, so few that their scores stay in
the cache, and forms scores again in the backward pass: what is kept for it is inputs, outputs and
one number a query. Nothing of the size of queries times keys, seen or not, is ever in memory.

Axes: b batch, h heads, t tokens, f features, v values, g blocks, s blocks seen, n b x h x g.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from leap.errors import InputError
from leap.ops.checks import check_axes, check_floating, check_key_mask, check_same, shape
from leap.ops.derivatives import differentiable_again, gradients, transformed
from leap.ops.state import accumulator, as_given

SCORES_AT_ONCE = {"cpu": 2**19}
SCORES_AT_ONCE_ELSEWHERE = 2**26


def block_sparse_attention_reference(
    q: Float[Tensor, "b h t f"],
    k: Float[Tensor, "b h t f"],
    v: Float[Tensor, "b h t v"],
    blocks: Int[Tensor, "b h g s"],
    *,
    key_mask: Bool[Tensor, "b t"] | None = None,
) -> Float[Tensor, "b h t v"]:
    """The formula, by a matrix of all pairs."""
    t, n_block = q.shape[2], blocks.shape[2]
    size = t // n_block
    sees = (blocks.unsqueeze(-1) == torch.arange(n_block, device=q.device)).any(dim=3)
    sees = sees.repeat_interleave(size, dim=2).repeat_interleave(size, dim=3)
    if key_mask is not None:
        sees = sees & key_mask[:, None, None]
    scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(~sees, torch.finfo(q.dtype).min)
    return scores.softmax(-1).masked_fill(~sees, 0) @ v


def block_sparse_attention(
    q: Float[Tensor, "b h t f"],
    k: Float[Tensor, "b h t f"],
    v: Float[Tensor, "b h t v"],
    blocks: Int[Tensor, "b h g s"],
    *,
    key_mask: Bool[Tensor, "b t"] | None = None,
    recompute: bool = True,
) -> Float[Tensor, "b h t v"]:
    """Attend from each block of queries to the blocks of keys listed for it, in O(t s).

    Args:
        q, k, v: queries, keys and values. Their g blocks are of t / g tokens.
        blocks: which blocks each one sees, none twice.
        key_mask: true at real keys; others are not attended to.
        recompute: form scores again in the backward pass. Without it scores, and the keys and
            values gathered for each block, are kept from the forward pass, as is usual: it is
            slower, and of several times the memory.
    """
    check_floating(q=q, k=k, v=v)
    check_axes("b h t f", q=q, k=k, v=v)
    check_axes("b h g s", blocks=blocks)
    check_same("b h t f", q=q, k=k)
    check_same("b h t *", k=k, v=v)
    check_same("b h", q=q, blocks=blocks)
    check_key_mask(key_mask, k)
    if blocks.shape[2] == 0 or q.shape[2] % blocks.shape[2]:
        raise InputError(
            f"q {shape(q)} does not divide into the {blocks.shape[2]} blocks of blocks "
            f"{shape(blocks)}; pad it until it does"
        )
    if recompute and not transformed():
        return BlockSparse.apply(q, k, v, blocks, key_mask)  # type: ignore[no-untyped-call]
    return plain(q, k, v, blocks, key_mask)[0]


def plain(
    q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, key_mask: Tensor | None
) -> tuple[Tensor]:
    """Attended values by operations of torch alone, all blocks at once."""
    with as_given(q):
        rows = Rows(q, k, v, blocks, key_mask)
        weights = rows.scores(slice(None), rows.seen(rows.k, slice(None))).softmax(-1)
        if rows.hidden is not None:
            weights = weights.masked_fill(rows.hidden, 0)
        return ((weights @ rows.seen(rows.v, slice(None))).view_as(v).to(v.dtype),)


class Rows:
    """The blocks of all sequences and heads in one row, `[n, size, width]`, and who sees whom."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, key_mask: Tensor | None
    ) -> None:
        b, h, g, self.n_seen = blocks.shape
        self.dtype = accumulator(q, k, v)
        self.scale = 1 / math.sqrt(q.shape[-1])
        self.lowest = torch.finfo(self.dtype).min
        self.q, self.k, self.v = (x.reshape(b * h * g, -1, x.shape[-1]) for x in (q, k, v))
        first = torch.arange(0, b * h * g, g, device=q.device).view(b, h, 1, 1)
        self.blocks = (blocks + first).reshape(-1, self.n_seen)
        self.hidden: Tensor | None = None
        if key_mask is not None:
            pads = ~key_mask.reshape(b, g, -1)
            batch = torch.arange(b, device=q.device).view(b, 1, 1, 1)
            self.hidden = pads[batch, blocks].reshape(b * h * g, 1, -1)

    def spans(self) -> Iterator[slice]:
        """Blocks to work on at once."""
        n, size = self.q.shape[:2]
        at_once = SCORES_AT_ONCE.get(self.q.device.type, SCORES_AT_ONCE_ELSEWHERE)
        step = max(1, at_once // (size * size * self.n_seen))
        return (slice(i, i + step) for i in range(0, n, step))

    def seen(self, x: Tensor, span: slice) -> Tensor:
        """Of keys or values those that some blocks of queries see, `[n, s * size, width]`."""
        blocks = self.blocks[span]
        rows = x.flatten(1).index_select(0, blocks.flatten())
        return rows.view(len(blocks), -1, x.shape[-1]).to(self.dtype)

    def scores(self, span: slice, k_seen: Tensor, less: Tensor | None = None) -> Tensor:
        """Scores of some blocks of queries, the lowest there is where a key is not seen.

        Args:
            span: which blocks.
            k_seen: the keys they see.
            less: to take off each query's scores, `[n, size, 1]`.
        """
        q = self.q[span].to(self.dtype)
        start, beta = (q.new_zeros(()), 0) if less is None else (less, -1)
        scores = torch.baddbmm(start, q, k_seen.mT, beta=beta, alpha=self.scale)
        return (
            scores if self.hidden is None else scores.masked_fill_(self.hidden[span], self.lowest)
        )


class BlockSparse(torch.autograd.Function):
    """A few blocks at a time, and the gradient likewise."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, key_mask: Tensor | None
    ) -> Tensor:
        """Attend; keep the log of each denominator."""
        with as_given(q):
            rows = Rows(q, k, v, blocks, key_mask)
            o = torch.empty_like(rows.v)
            log_z = q.new_empty(*rows.q.shape[:2], 1, dtype=rows.dtype)
            for span in rows.spans():
                scores = rows.scores(span, rows.seen(rows.k, span))
                top = scores.amax(dim=-1, keepdim=True)
                weights = scores.sub_(top).exp_()
                z = weights.sum(dim=-1, keepdim=True)
                o[span] = (weights @ rows.seen(rows.v, span)).div_(z).to(o.dtype)
                log_z[span] = top + z.log_()
            # A query that sees nothing had the lowest score of all everywhere.
            o.masked_fill_(log_z < rows.lowest / 2, 0)
        o = o.view_as(v)
        ctx.save_for_backward(q, k, v, blocks, key_mask, o, log_z)
        return o

    @staticmethod
    def backward(ctx: Any, d_o: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient of softmax, dS = P (dP - sum P dP), from weights formed again."""
        q, k, v, blocks, key_mask, o, log_z = ctx.saved_tensors
        if differentiable_again():
            return gradients(plain, (q, k, v, blocks, key_mask), (d_o,))
        with as_given(q):
            rows = Rows(q, k, v, blocks, key_mask)
            d_o = d_o.reshape(rows.v.shape).to(rows.dtype)
            mean = (d_o * o.view(rows.v.shape)).sum(dim=-1, keepdim=True)
            d_q, d_k, d_v = (
                torch.zeros_like(x, dtype=rows.dtype) for x in (rows.q, rows.k, rows.v)
            )
            for span in rows.spans():
                k_seen, v_seen = rows.seen(rows.k, span), rows.seen(rows.v, span)
                weights = rows.scores(span, k_seen, less=log_z[span]).exp_()
                d_scores = torch.baddbmm(mean[span], d_o[span], v_seen.mT, beta=-1).mul_(weights)
                d_scores.mul_(rows.scale)
                d_q[span] = d_scores @ k_seen
                for total, left, right in (
                    (d_v, weights, d_o[span]),
                    (d_k, d_scores, rows.q[span].to(rows.dtype)),
                ):
                    part = (left.mT @ right).view(-1, *total.shape[1:])
                    total.index_add_(0, rows.blocks[span].flatten(), part)
        return *(d.view_as(x).to(x.dtype) for d, x in ((d_q, q), (d_k, k), (d_v, v))), None, None
