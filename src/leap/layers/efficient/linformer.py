"""Linformer (Wang et al. 2020, arXiv 2006.04768).

Attend to k mixtures of the tokens in place of the tokens.

    O = softmax(Q (E K)^T / sqrt(w)) E V        E learned, [k, length], one for each head

Keys and values share E ("key-value sharing"), as in the Long Range Arena comparisons. A column of E
belongs to a position, so there are no sequences longer than `length`; of shorter ones the further
columns meet nothing.

Axes: b batch, h heads, t tokens, w width of a head, k mixtures.
"""

from typing import Unpack

import torch
from torch import nn

from leap.errors import InputError
from leap.layers.attention import Heads
from leap.layers.efficient.whole import MatchingAttention, Projections, Real, at_least
from leap.ops.softmax import softmax_attention
from leap.ops.state import mask_tokens


class LinformerAttention(MatchingAttention):
    """Linformer's attention.

    Args:
        hidden_size, n_head, projections: see `MatchingAttention`.
        length: the longest sequence.
        n_mixture: k.
    """

    needs_length = True

    def __init__(
        self,
        hidden_size: int,
        n_head: int,
        *,
        length: int,
        n_mixture: int = 128,
        **projections: Unpack[Projections],
    ) -> None:
        super().__init__(hidden_size, n_head, **projections)
        self.length = at_least("length", length)
        self.mixtures = nn.Parameter(torch.empty(n_head, at_least("n_mixture", n_mixture), length))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Begin with mixtures as large as their tokens are."""
        nn.init.normal_(self.mixtures, std=self.length**-0.5)

    def match(self, q: Heads, k: Heads, v: Heads, real: Real | None) -> Heads:
        """Softmax attention over the mixtures."""
        t = q.shape[2]
        if t > self.length:
            raise InputError(
                f"a sequence of {t} tokens is longer than the length={self.length} that Linformer "
                "was made for; give a larger length"
            )
        mixtures = self.mixtures[..., :t].to(q.dtype)
        return softmax_attention(
            q, mixtures @ mask_tokens(k, real), mixtures @ mask_tokens(v, real)
        )
