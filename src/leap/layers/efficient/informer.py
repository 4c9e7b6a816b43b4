"""Informer (Zhou et al. 2021, arXiv 2012.07436), "ProbSparse".

Only queries that pick and choose attend.

    M_i = max_j s_ij - mean_j s_ij        s_ij = q_i . k_j / sqrt(w), over a sample of the keys

The queries with the largest M attend to all keys by softmax; the others, whose weights would be
nearly even, take the mean of all values. In the original each query has a sample of its own, at
many times the memory; here a head's queries share one.

Axes: b batch, h heads, t tokens, w width of a head, u queries that attend.
"""

from typing import Unpack

import torch
from jaxtyping import Float
from torch import Tensor

from leap.layers.attention import Heads
from leap.layers.efficient.sampling import draw, pick
from leap.layers.efficient.whole import MatchingAttention, Projections, Real, at_least, row_lengths
from leap.ops.softmax import softmax_attention
from leap.ops.state import accumulator, as_given, mask_tokens


class InformerAttention(MatchingAttention):
    """Informer's attention.

    Args:
        hidden_size, n_head, projections: see `MatchingAttention`.
        n_query: u, of a sequence, however long.
        n_sample: keys by which to find them, drawn once.
    """

    drawn: Tensor

    def __init__(
        self,
        hidden_size: int,
        n_head: int,
        *,
        n_query: int = 128,
        n_sample: int = 128,
        **projections: Unpack[Projections],
    ) -> None:
        super().__init__(hidden_size, n_head, **projections)
        self.n_query = at_least("n_query", n_query)
        self.register_buffer("drawn", draw(at_least("n_sample", n_sample)))

    def match(self, q: Heads, k: Heads, v: Heads, real: Real | None) -> Heads:
        """Softmax attention of the queries that choose, and the mean for the others."""
        t = q.shape[2]
        n = row_lengths(q, real)
        if self.n_query >= t:
            return softmax_attention(q, k, v, key_mask=real)
        total = mask_tokens(v.to(accumulator(v)), real).sum(dim=2, keepdim=True)
        mean = total / n.clamp_min(1).view(-1, 1, 1, 1)
        choosing = self.choosiness(q, k, n).topk(self.n_query, dim=-1).indices.unsqueeze(-1)
        attended = softmax_attention(q.take_along_dim(choosing, dim=2), k, v, key_mask=real)
        return mean.to(v.dtype).expand_as(v).scatter(2, choosing.expand_as(attended), attended)

    @torch.no_grad()
    def choosiness(
        self, q: Float[Tensor, "b h t w"], k: Float[Tensor, "b h t w"], n: Tensor
    ) -> Float[Tensor, "b h t"]:
        """M, and -inf at pads."""
        place, counts = pick(self.drawn, n)
        exact = accumulator(q)
        with as_given(q):
            sample = k.take_along_dim(place[:, None, :, None], dim=2)
            scores = (q.to(exact) / self.head_width**0.5) @ sample.to(exact).mT
        counts = counts[:, None, None]
        mean = scores.masked_fill(~counts, 0).sum(-1) / counts.sum(-1).clamp_min(1)
        m = scores.masked_fill(~counts, -torch.inf).amax(-1) - mean
        pads = torch.arange(q.shape[2], device=q.device) >= n[:, None, None]
        return m.masked_fill(pads, -torch.inf)
