"""Reformer (Kitaev et al. 2020, arXiv 2001.04451).

Tokens attend to those that a hash puts next to them.

    bucket(x) = argmax [x R, -x R]                R random, so that near vectors share a bucket
    o_i = sum_{j in P_i} exp(q_i . k_j) v_j / z_i        k_j = q_j / |q_j|

Tokens are sorted by bucket, those of one in their order, and cut into chunks; P_i are the tokens of
i's chunk and of the one before, of which the first has none (elsewhere it is the last one, of
other buckets). A token attends to itself only if it sees no other. Several hashes
give several o_i, which are averaged by their z_i.

Queries and keys are one projection. Keys have length 1, so scores are not scaled down further; both
as in the Long Range Arena comparisons. A row of n tokens has 2 n / chunk buckets, so that a bucket
fills about half a chunk.

Axes: b batch, h heads, r hashes, t tokens, d hidden size, w width of a head, g chunks, c tokens
in each.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from leap.layers.attention import Hidden
from leap.layers.efficient.whole import Real, WholeSequenceAttention, at_least, row_lengths
from leap.ops.state import accumulator, as_given


class ReformerAttention(WholeSequenceAttention):
    """Reformer's attention, by locality-sensitive hashing.

    Args:
        hidden_size, n_head: width of all heads together, and their number.
        n_hash: r.
        chunk_size: c. A sequence as short as that is attended to as a whole.
        max_bucket: the most buckets that a long row has.
        bias: of the projections.
        dropout: share of the attended values to drop.
    """

    rotation: Float[Tensor, "h r w m"]

    def __init__(
        self,
        hidden_size: int,
        n_head: int,
        *,
        n_hash: int = 2,
        chunk_size: int = 64,
        max_bucket: int = 128,
        bias: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__(hidden_size, n_head)
        self.chunk_size = at_least("chunk_size", chunk_size)
        at_least("n_hash", n_hash)
        at_least("max_bucket", max_bucket, 2)
        self.qk_proj = nn.Linear(hidden_size, hidden_size, bias=bias)
        self.v_proj = nn.Linear(hidden_size, hidden_size, bias=bias)
        self.o_proj = nn.Linear(hidden_size, hidden_size, bias=bias)
        self.register_buffer(
            "rotation", torch.randn(n_head, n_hash, self.head_width, max_bucket // 2)
        )
        self.dropout = dropout

    def attend(self, x: Hidden, real: Real | None) -> Hidden:
        """Sort, attend within chunks, put back in order, and average over hashes."""
        t = x.shape[1]
        size = min(self.chunk_size, t)
        n = row_lengths(x, real)
        x = F.pad(x, (0, 0, 0, -t % size))
        q, v = (self.split(proj(x)) for proj in (self.qk_proj, self.v_proj))
        dtype, exact = v.dtype, accumulator(v)
        with as_given(v):
            q, v = q.to(exact), v.to(exact)
            order = self.buckets(q, n).argsort(dim=-1, stable=True)
            o, log_z = attend_in_chunks(q, F.normalize(q, dim=-1), v, order, n, size)
            back = order.argsort(dim=-1)
            o = at(o.flatten(0, 2), back.flatten(0, 2)).view_as(o)
            log_z = log_z.take_along_dim(back, dim=-1)
            o = (log_z.softmax(dim=2).unsqueeze(-1) * o).sum(dim=2)[:, :, :t]
        return self.o_proj(self.join(F.dropout(o.to(dtype), self.dropout, self.training)))

    @torch.no_grad()
    def buckets(self, q: Float[Tensor, "b h t w"], n: Int[Tensor, " b"]) -> Int[Tensor, "b h r t"]:
        """The bucket of each token under each hash, pads in one behind all others."""
        turned = q.unsqueeze(2) @ self.rotation.to(q.dtype)
        m = turned.shape[-1]
        used = (-(-n // self.chunk_size)).clamp(1, m).view(-1, 1, 1, 1, 1)
        unused = torch.arange(m, device=q.device) >= used
        both = torch.cat([turned, -turned], dim=-1)
        bucket = both.masked_fill(torch.cat([unused, unused], dim=-1), -torch.inf).argmax(dim=-1)
        pads = torch.arange(q.shape[2], device=q.device) >= n.view(-1, 1, 1, 1)
        return bucket.masked_fill(pads, 2 * m)


def attend_in_chunks(
    q: Float[Tensor, "b h t w"],
    k: Float[Tensor, "b h t w"],
    v: Float[Tensor, "b h t w"],
    order: Int[Tensor, "b h r t"],
    n: Int[Tensor, " b"],
    size: int,
) -> tuple[Float[Tensor, "b h r t w"], Float[Tensor, "b h r t"]]:
    """Softmax attention of each chunk to itself and the one before, in sorted order; o and log z.

    Args:
        q, k, v: queries, keys and values in the order of the sequence.
        order: which token comes where when sorted.
        n: real tokens of each row.
        size: c, which divides t.
    """
    place = order.unflatten(3, (-1, size))
    flat = order.flatten(0, 1).flatten(1)
    q, k, v = (at(x.flatten(0, 1), flat).view(*place.shape, -1) for x in (q, k, v))
    k, v = (torch.cat([before(x, 0), x], dim=4) for x in (k, v))
    key_place = torch.cat([before(place.unsqueeze(-1), -1).squeeze(-1), place], dim=4)

    lowest = torch.finfo(q.dtype).min
    scores = q @ k.mT
    own = place.unsqueeze(-1) == key_place.unsqueeze(-2)
    seen = (key_place >= 0) & (key_place < n.view(-1, 1, 1, 1, 1))
    scores = scores.masked_fill(own, lowest / 4).masked_fill(~seen.unsqueeze(-2), lowest)
    log_z = scores.logsumexp(dim=-1, keepdim=True)
    o = (scores - log_z).exp() @ v
    return o.flatten(3, 4), log_z.squeeze(-1).flatten(3, 4)


def at(x: Float[Tensor, "n t w"], order: Int[Tensor, "n s"]) -> Float[Tensor, "n s w"]:
    """The tokens of each row in the given order."""
    n, t, w = x.shape
    first = torch.arange(0, n * t, t, device=x.device).unsqueeze(1)
    return x.reshape(n * t, w).index_select(0, (order + first).flatten()).view(n, -1, w)


def before(x: Tensor, fill: int) -> Tensor:
    """Of each chunk `[b, h, r, g, c, w]` the one before; of the first, one of fillings."""
    return F.pad(x[:, :, :, :-1], (0, 0, 0, 0, 1, 0), value=fill)
