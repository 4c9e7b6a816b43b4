"""The block of a transformer, pre-norm, around any attention.

    x = x + attention(norm(x))
    x = x + W2 gelu(W1 norm(x))

Axes: b batch, t tokens, d hidden size.
"""

from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from leap.layers.attention import Attention
from leap.layers.dropout import Dropout
from leap.ops.state import State


class Block(nn.Module):
    """Norm, attention, norm, feed-forward, each pair with a residual.

    Args:
        attention: any attention; its width is the block's.
        feed_forward_size: hidden width of the feed-forward, by default 4 times the block's.
        dropout: share dropped of what attention gives, and twice in the feed-forward.
        bias: of the feed-forward.
        norm_eps: added to the variance in both norms.
    """

    def __init__(
        self,
        attention: Attention,
        *,
        feed_forward_size: int | None = None,
        dropout: float = 0.0,
        bias: bool = True,
        norm_eps: float = 1e-5,
    ) -> None:
        super().__init__()
        width = attention.hidden_size
        self.attention_norm = nn.LayerNorm(width, eps=norm_eps)
        self.attention = attention
        self.dropout = Dropout(dropout)
        self.feed_forward_norm = nn.LayerNorm(width, eps=norm_eps)
        self.feed_forward = FeedForward(width, feed_forward_size or 4 * width, dropout, bias=bias)

    def forward(
        self, x: Float[Tensor, "b t d"], state: State | None = None, **inputs: Any
    ) -> tuple[Float[Tensor, "b t d"], State | None]:
        """Pass tokens through; the state and further inputs are the attention's."""
        y, state = self.attention(self.attention_norm(x), state, **inputs)
        x = x + self.dropout(y)
        return x + self.feed_forward(self.feed_forward_norm(x)), state

    def step(
        self, x: Float[Tensor, "b d"], state: State | None, **inputs: Any
    ) -> tuple[Float[Tensor, "b d"], State | None]:
        """Pass one token of each row through: `forward`, less the axis of tokens."""
        y, state = self(x.unsqueeze(1), state, **inputs)
        return y.squeeze(1), state


class FeedForward(nn.Sequential):
    """W2 gelu(W1 x), with dropout after each."""

    def __init__(self, width: int, hidden: int, dropout: float = 0.0, *, bias: bool = True) -> None:
        super().__init__(
            nn.Linear(width, hidden, bias=bias),
            nn.GELU(),
            Dropout(dropout),
            nn.Linear(hidden, width, bias=bias),
            Dropout(dropout),
        )
