"""Adaptive input and adaptive softmax (Baevski and Auli, 2019), with everything tied.

The vocabulary, sorted by frequency, is cut into bands. Rarer bands have narrower embeddings, each
with a projection to the model's width:

    input     x = P_b E_b[token]                                     b the band of the token
    output    p(token) = softmax([E_0 P_0^T x, C P_0^T x])[token]    in the first band
              p(token) = p(band b) softmax(E_b P_b^T x)[token]       in the others, p(band) from C

A word of the long tail costs a sixteenth of a frequent one in memory, and its band is scored only
where it is the answer.

Axes: n tokens, d width.
"""

from itertools import pairwise
from typing import cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from leap.errors import ConfigError, InputError
from leap.models.loss import IGNORED, is_plain, linear_cross_entropy
from leap.ops.backends import traces


class AdaptiveEmbedding(nn.Module):
    """Embeddings of a vocabulary in bands, and the softmax over them.

    Args:
        vocab_size: number of tokens, the frequent ones first.
        hidden_size: width of the model, and of the first band.
        cutoffs: where the second and later bands begin.
        factor: how much narrower each band is than the one before.
    """

    def __init__(
        self, vocab_size: int, hidden_size: int, cutoffs: list[int], factor: int = 4
    ) -> None:
        super().__init__()
        self.bounds = [0, *cutoffs, vocab_size]
        if sorted(set(self.bounds)) != self.bounds:
            raise ConfigError(
                f"adaptive_cutoffs={cutoffs} must rise, between 0 and vocab_size={vocab_size}"
            )
        if hidden_size % factor ** len(cutoffs):
            raise ConfigError(
                f"hidden_size={hidden_size} cannot be divided by adaptive_factor={factor} "
                f"{len(cutoffs)} times"
            )
        self.widths = widths = [hidden_size // factor**i for i in range(len(cutoffs) + 1)]
        self.bands = nn.ModuleList(
            nn.Embedding(end - start, width)
            for (start, end), width in zip(pairwise(self.bounds), widths, strict=True)
        )
        self.projections = nn.ModuleList(
            nn.Linear(width, hidden_size, bias=False) for width in widths
        )
        self.clusters = nn.Linear(hidden_size, len(cutoffs), bias=False)

    def forward(self, ids: Int[Tensor, "*axes"]) -> Float[Tensor, "*axes d"]:
        """Embed tokens."""
        if ids.device.type == "cpu" and not torch.compiler.is_compiling():
            self._check_tokens(ids)
        x: Tensor | None = None
        for band, projection, (start, end) in self._bands():
            inside = (ids >= start) & (ids < end)
            if traces():  # Whose shapes must not depend on values.
                found = projection(band((ids - start).clamp(0, end - start - 1)))
                x = found if x is None else torch.where(inside.unsqueeze(-1), found, x)
                continue
            found = projection(band(ids[inside] - start))
            if x is None:
                x = found.new_zeros(*ids.shape, found.shape[-1])
            x = x.masked_scatter(inside.unsqueeze(-1), found.to(x.dtype))
        assert x is not None  # as there is a band at least
        return x

    def log_probabilities(self, x: Float[Tensor, "*axes d"]) -> Float[Tensor, "*axes w"]:
        """Log-probabilities of every token: the logits of generation."""
        head = nn.functional.linear(self._query(x, 0), self._head_weight(x)).log_softmax(-1)
        first, clusters = head.split([self.bounds[1], len(self.bands) - 1], dim=-1)
        parts = [first]
        for i in range(1, len(self.bands)):
            within = nn.functional.linear(self._query(x, i), self._weight(i, x)).log_softmax(-1)
            parts.append(within + clusters[..., i - 1 : i])
        return torch.cat(parts, dim=-1)

    def cross_entropy(
        self, x: Float[Tensor, "n d"], labels: Int[Tensor, " n"]
    ) -> Float[Tensor, ""]:
        """The summed cross-entropy, scoring a rare band only where it holds the answer."""
        targets = labels.clone()
        total = x.new_zeros((), dtype=torch.promote_types(x.dtype, torch.float32))
        for i, (start, end) in enumerate(pairwise(self.bounds)):
            if i == 0:
                continue
            inside = (labels >= start) & (labels < end)
            targets[inside] = self.bounds[1] + i - 1
            total = total + linear_cross_entropy(
                self._query(x[inside], i), self._weight(i, x), labels[inside] - start
            )
        assert IGNORED < 0  # so that it lies in no band
        return total + linear_cross_entropy(self._query(x, 0), self._head_weight(x), targets)

    def _check_tokens(self, ids: Tensor) -> None:
        n = self.bounds[-1]
        outside = ids[(ids < 0) | (ids >= n)]
        if outside.numel():
            raise InputError(
                f"token {int(outside[0])} is not among the {n} of the vocabulary, 0 to {n - 1}; "
                "use the tokenizer that the model was trained with"
            )

    def _bands(self) -> zip:  # type: ignore[type-arg]
        return zip(self.bands, self.projections, pairwise(self.bounds), strict=True)

    def _query(self, x: Tensor, i: int) -> Tensor:
        """x as band i's embeddings see it: through the projection, backwards."""
        return x @ _matrix(self.projections[i], self.widths[i], x)

    def _weight(self, i: int, x: Tensor) -> Tensor:
        band = self.bands[i]
        if is_plain(band, nn.Embedding):
            return cast(Tensor, band.weight)  # Under `functional_call` any tensor.
        start, end = self.bounds[i : i + 2]
        return cast(Tensor, band(torch.arange(end - start, device=x.device)))

    def _head_weight(self, x: Tensor) -> Tensor:
        return torch.cat([self._weight(0, x), _matrix(self.clusters, self.widths[0], x)])


def _matrix(linear: nn.Module, width: int, x: Tensor) -> Tensor:
    """The weight by which a module maps features of some width, `[out, width]`.

    Adapters and quantised weights are more than a weight: what comes of single features tells.
    """
    if is_plain(linear, nn.Linear):
        return cast(Tensor, linear.weight)  # Under `functional_call` any tensor.
    return cast(Tensor, linear(torch.eye(width, dtype=x.dtype, device=x.device))).mT
