"""Nystromformer (Xiong et al. 2021, arXiv 2102.03902): softmax attention through landmarks.

    O = S(Q, K~) S(Q~, K~)^+ S(Q~, K) V        S(X, Y) = softmax(X Y^T / sqrt(w))

The landmarks Q~ and K~ are means of equal stretches of queries and keys. The pseudo-inverse of A
comes of a few iterations, Z <- Z (13 I - A Z (15 I - A Z (7 I - A Z))) / 4, from a multiple of A^T.
That multiple is each matrix's own: the original's is the same for a batch, whose rows then depend
on each other.

Axes: b batch, h heads, t tokens, d hidden size, w width of a head, m landmarks.
"""

from typing import Unpack

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from leap.errors import ConfigError
from leap.layers.attention import Heads
from leap.layers.efficient.whole import MatchingAttention, Projections, Real, at_least, row_lengths
from leap.ops.softmax import softmax_attention
from leap.ops.state import accumulator, as_given, mask_tokens


class NystromformerAttention(MatchingAttention):
    """Nystromformer's attention.

    Args:
        hidden_size, n_head, projections: see `MatchingAttention`.
        n_landmark: m. In a sequence as short as that, each token is one.
        n_iteration: steps towards the pseudo-inverse.
        conv_kernel: width of a convolution of the values, learned for each head and added to what
            is attended to; odd. The comparison of the LeaPformer paper has none.
    """

    def __init__(
        self,
        hidden_size: int,
        n_head: int,
        *,
        n_landmark: int = 128,
        n_iteration: int = 6,
        conv_kernel: int | None = None,
        **projections: Unpack[Projections],
    ) -> None:
        super().__init__(hidden_size, n_head, **projections)
        self.n_landmark = at_least("n_landmark", n_landmark)
        self.n_iteration = at_least("n_iteration", n_iteration)
        self.conv = None
        if conv_kernel is not None:
            if conv_kernel < 1 or conv_kernel % 2 == 0:
                raise ConfigError(f"conv_kernel={conv_kernel} has no middle; give 1, 3, 5, ...")
            self.conv = nn.Conv2d(
                n_head,
                n_head,
                (conv_kernel, 1),
                padding=(conv_kernel // 2, 0),
                groups=n_head,
                bias=False,
            )

    def match(self, q: Heads, k: Heads, v: Heads, real: Real | None) -> Heads:
        """The three matrices, multiplied from the right."""
        n = row_lengths(q, real)
        counts = torch.arange(self.n_landmark, device=q.device) < n.unsqueeze(1)
        q_mark, k_mark = (
            self.split(stretch_means(self.join(x), n, self.n_landmark)) for x in (q, k)
        )
        exact = accumulator(v)
        with as_given(v):
            scores = q_mark.to(exact) / self.head_width**0.5 @ k_mark.to(exact).mT
            # Landmarks that a short row does not have stay among themselves: their part is I.
            seen = counts[:, None, None] & counts[:, None, :, None]
            eye = torch.eye(self.n_landmark, dtype=exact, device=v.device)
            lowest = torch.finfo(exact).min
            a = scores.masked_fill(~seen, lowest).softmax(-1).where(seen, eye)
            marked = softmax_attention(q_mark, k, v, key_mask=real).to(exact)
            inner = pseudo_inverse(a, self.n_iteration) @ marked
        o = softmax_attention(q.to(exact), k_mark.to(exact), inner, key_mask=counts)
        return o if self.conv is None else o + self.conv(mask_tokens(v, real))


def stretch_means(
    x: Float[Tensor, "b t d"], n: Int[Tensor, " b"], m: int
) -> Float[Tensor, "b m d"]:
    """Means of m equal stretches of the first n tokens of each row; where n < m, those tokens."""
    (b, t, d), n = x.shape, n.unsqueeze(1)
    edges = torch.arange(m + 1, device=x.device) * n // n.clamp(1, m)
    starts, sizes = edges[:, :-1], edges.diff(dim=1)
    step = torch.arange(-(-t // m), device=x.device)
    within = (step < sizes.unsqueeze(-1)).unsqueeze(-1)
    place = (starts.unsqueeze(-1) + step).clamp_max(t - 1)
    place = place + t * torch.arange(b, device=x.device).view(-1, 1, 1)
    tokens = x.reshape(b * t, d).index_select(0, place.flatten()).view(*place.shape, d)
    total = (tokens * within).sum(dim=2, dtype=accumulator(x))
    return (total / sizes.clamp_min(1).unsqueeze(-1)).to(x.dtype)


def pseudo_inverse(a: Float[Tensor, "b h m m"], n_iteration: int) -> Float[Tensor, "b h m m"]:
    """A^+ by iteration, of order three, for matrices that are not negative anywhere."""
    eye = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    rows, columns = (a.sum(dim).amax(-1)[..., None, None] for dim in (-1, -2))
    z = a.mT / (rows * columns)
    for _ in range(n_iteration):
        az = a @ z
        z = z @ (13 * eye - az @ (15 * eye - az @ (7 * eye - az))) / 4
    return z
