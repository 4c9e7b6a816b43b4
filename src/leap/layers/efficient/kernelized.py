"""Kernelized attention (Chen et al. 2021, arXiv 2111.00035).

Softmax's exponential gives way to a Gaussian kernel.

    o_i = sum_j exp(-|q_i - k_j|^2 / (2 sqrt(w))) v_j

Nothing is divided by: a query far from all keys gets little. Quadratic; `skyformer` is its
approximation in O(t).

Axes: b batch, h heads, t tokens, w width of a head.
"""

from leap.layers.attention import Heads
from leap.layers.efficient.gaussian import gaussian
from leap.layers.efficient.whole import MatchingAttention, Real
from leap.ops.state import accumulator, as_given, mask_tokens


class KernelizedAttention(MatchingAttention):
    """Attention by a Gaussian kernel.

    Args:
        hidden_size, n_head, projections: see `MatchingAttention`.
    """

    looks_at_order = False

    def match(self, q: Heads, k: Heads, v: Heads, real: Real | None) -> Heads:
        """The sum of all values, each by the kernel of its key with the query."""
        exact = accumulator(v)
        with as_given(v):
            return gaussian(q.to(exact), k.to(exact)) @ mask_tokens(v.to(exact), real)
