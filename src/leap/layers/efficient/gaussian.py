"""The Gaussian kernel between two sets of vectors, exp(-|x_i - y_j|^2 / (2 sqrt(w))).

Axes: b batch, h heads, n and m vectors, w their width.
"""

from jaxtyping import Float
from torch import Tensor


def gaussian(x: Float[Tensor, "b h n w"], y: Float[Tensor, "b h m w"]) -> Float[Tensor, "b h n m"]:
    """The kernel of every pair, in (0, 1]."""
    squares = x.square().sum(-1, keepdim=True) + y.square().sum(-1).unsqueeze(-2)
    # As a difference of large numbers a small distance may come out below 0.
    distance = (squares - 2 * x @ y.mT).clamp_min(0)
    return (distance / (-2 * x.shape[-1] ** 0.5)).exp()
