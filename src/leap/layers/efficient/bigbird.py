"""BigBird (Zaheer et al. 2020, arXiv 2007.14062).

Blocks of tokens see a window, random blocks, and both ends.

    o_i = sum_j softmax_j(q_i . k_j / sqrt(w)) v_j        over the blocks that i's block sees

A block sees itself, its neighbours, the first and the last block, and random ones; the first and
the last see everything. Where these coincide, further random blocks take their place, so that
every block sees as many. A sequence of no more blocks than that is attended to as a whole.

Which blocks are random is a hash of the head and the two blocks, and so the same for a sequence in
any batch, of any length.

Axes: b batch, h heads, t tokens, w width of a head, g blocks, s blocks seen.
"""

from typing import Unpack

import torch
import torch.nn.functional as F
from jaxtyping import Int
from torch import Tensor

from leap.errors import ConfigError
from leap.layers.attention import Heads
from leap.layers.efficient.whole import MatchingAttention, Projections, Real, at_least, row_lengths
from leap.ops.block_sparse import block_sparse_attention
from leap.ops.softmax import softmax_attention

HASH = 2**31


class BigBirdAttention(MatchingAttention):
    """BigBird's attention.

    Args:
        hidden_size, n_head, projections: see `MatchingAttention`.
        block_size: tokens in a block.
        n_random: random blocks that a block sees.
        window: blocks of its own neighbourhood that a block sees, itself included; odd.
        recompute: see `block_sparse_attention`.
    """

    seed: Int[Tensor, " h"]

    def __init__(
        self,
        hidden_size: int,
        n_head: int,
        *,
        block_size: int = 64,
        n_random: int = 3,
        window: int = 3,
        recompute: bool = True,
        **projections: Unpack[Projections],
    ) -> None:
        super().__init__(hidden_size, n_head, **projections)
        self.block_size = at_least("block_size", block_size)
        self.n_random = at_least("n_random", n_random, 0)
        if window < 1 or window % 2 == 0:
            raise ConfigError(f"window={window} has no middle block; give 1, 3, 5, ...")
        self.window = window
        self.recompute = recompute
        self.register_buffer("seed", torch.randint(HASH, (n_head,)))

    def match(self, q: Heads, k: Heads, v: Heads, real: Real | None) -> Heads:
        """Attend between blocks, and from the ends to everything."""
        t, size = q.shape[2], self.block_size
        n_block = -(-t // size)
        if n_block <= 2 + self.window + self.n_random:
            return softmax_attention(q, k, v, key_mask=real)
        n = row_lengths(q, real)
        if t % size:
            q, k, v = (F.pad(x, (0, 0, 0, -t % size)) for x in (q, k, v))
            real = torch.arange(q.shape[2], device=q.device) < n.unsqueeze(1)
        blocks = self.blocks(-(-n // size), n_block)
        o = block_sparse_attention(q, k, v, blocks, key_mask=real, recompute=self.recompute)

        token = torch.arange(size, device=q.device)
        # A row of one block has the second, all of pads, for its last: none stands there twice.
        last = token + size * (-(-n // size) - 1).clamp_min(1).unsqueeze(1)
        ends = torch.cat([token.expand_as(last), last], dim=1)[:, None, :, None]
        at_ends = softmax_attention(q.take_along_dim(ends, dim=2), k, v, key_mask=real)
        return o.scatter(2, ends.expand_as(at_ends), at_ends)[:, :, :t]

    @torch.no_grad()
    def blocks(self, n: Int[Tensor, " b"], n_block: int) -> Int[Tensor, "b h g s"]:
        """Which blocks each one sees in rows of n blocks, and pads if there are too few."""
        block = torch.arange(n_block, device=n.device)
        apart = (block.unsqueeze(1) - block).abs()
        last = n.view(-1, 1, 1, 1) - 1
        must = (apart <= self.window // 2) | (block == 0) | (block == last)
        priority = (self.hash(block) + HASH * must).masked_fill(block > last, -1)
        return priority.topk(2 + self.window + self.n_random, dim=-1).indices

    def hash(self, block: Int[Tensor, " g"]) -> Int[Tensor, "h g g"]:
        """A number below HASH for each head and pair of blocks, as if at random."""
        mixed = self.seed.view(-1, 1, 1) + 73_856_093 * block.unsqueeze(1) + 19_349_663 * block
        for multiplier, shift in ((1_540_483_477, 15), (461_845_907, 13), (1_818_371_886, 16)):
            mixed = mixed % HASH
            mixed = (mixed ^ (mixed >> shift)) * multiplier
        return mixed % HASH
