"""What the versions of linear attention share: tokens, scales, re-weighting, and pieces of tensors.

Axes: b batch, h heads, t tokens, f features, e values, r rank of the re-weighting.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from leap.ops.features import feature_map, widen
from leap.ops.state import accumulator, mask_tokens


class Tokens(NamedTuple):
    """What one call attends with: q, k and v, and the re-weighting x_i . y_j of their scores.

        a_ij = (q_i . k_j) (x_i . y_j)

    The numbers x and y are few, `[b, h, t, r]`. Equal to them are the features
    fq_i = [q_i x_i1, ... q_i x_ir] and fk_j likewise, of which a state is made: r times as wide.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    x: Tensor | None = None
    y: Tensor | None = None


def precision(tokens: Tokens) -> torch.dtype:
    """The precision to sum in."""
    return accumulator(tokens.q, tokens.k, tokens.v)


def state_width(tokens: Tokens) -> int:
    """Width of the features that states are made of."""
    return tokens.k.shape[-1] * (1 if tokens.y is None else tokens.y.shape[-1])


def without_pads(tokens: Tokens, key_mask: Tensor | None) -> Tokens:
    """The same with 0 for what is read at pads, whatever stood there."""
    if key_mask is None:
        return tokens
    k, v = mask_tokens(tokens.k, key_mask), mask_tokens(tokens.v, key_mask)
    y = None if tokens.y is None else mask_tokens(tokens.y, key_mask)
    return tokens._replace(k=k, v=v, y=y)


def mapped(tokens: Tokens, feature: str) -> Tokens:
    """The same with queries and keys gone through the feature map of this name."""
    phi = feature_map(feature)
    return tokens._replace(q=phi.query(tokens.q), k=phi.key(tokens.k))


def wide_queries(tokens: Tokens) -> Tensor:
    """fq in the accumulator's precision."""
    total = precision(tokens)
    return widen(tokens.q.to(total), None if tokens.x is None else tokens.x.to(total))


def wide_keys(tokens: Tokens) -> Tensor:
    """fk in the accumulator's precision."""
    total = precision(tokens)
    return widen(tokens.k.to(total), None if tokens.y is None else tokens.y.to(total))


def unit_scale(q: Tensor) -> Tensor:
    """For each query, the power of two that brings its largest feature near 1, `[..., 1]`.

    A query's scale cancels between numerator and denominator, but products of three numbers of
    1e15 would overflow on the way there. A power of two changes no digit.
    """
    largest = q.detach().abs().amax(dim=-1, keepdim=True)
    exponent = (largest.log2().floor() + 1).masked_fill(largest == 0, 0)  # As frexp has it.
    return torch.exp2(-exponent.clamp(-120, 120))


def normalised(num: Tensor, den: Tensor, floor: Tensor | float) -> Tensor:
    """num / max(den, floor), and 0 where den is.

    A query that matches no key at all has no gradient either: that of 0 / floor is a million
    times its input at the usual floor, more than half precision can hold.
    """
    return num / den.clamp_min(floor).masked_fill_(den == 0, torch.inf)


def through_the_division(
    do: Tensor, o: Tensor, den: Tensor, scale: Tensor, normalise: bool, eps: float
) -> tuple[Tensor, Tensor]:
    """Gradients of the numerators, g, and of the denominators, h."""
    if not normalise:
        return do.to(den.dtype) / scale, torch.zeros_like(den)
    floor = eps * scale
    g = normalised(do.to(den.dtype), den, floor)
    return g, (g * o).sum(-1, keepdim=True).neg_().masked_fill_(den < floor, 0)


def widen_backward(dfq: Tensor, q: Tensor, x: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Gradients of q and x."""
    if x is None:
        return dfq, None
    parts, hands = dfq.chunk(x.shape[-1], dim=-1), x.split(1, dim=-1)
    dx = torch.cat([(part * q).sum(-1, keepdim=True) for part in parts], dim=-1)
    dq = parts[0] * hands[0]
    for part, x_ in zip(parts[1:], hands[1:], strict=True):
        dq.addcmul_(part, x_)
    return dq, dx


def part(x: Tensor, rows: slice, stretch: slice = slice(None)) -> Tensor:
    """Some tokens of some rows, batch and heads as one axis.

    A projection leaves the heads of a token side by side, and then this is a copy; but of a
    stretch, which fits the cache.
    """
    return x[rows, :, stretch].flatten(0, 1)


def put(x: Tensor, out: Tensor, rows: slice, stretch: slice) -> None:
    """Write what was computed of some tokens of some rows."""
    out[rows, :, stretch] = x.unflatten(0, (-1, out.shape[1]))


def spans(length: int, size: int) -> list[slice]:
    """A length cut into pieces of a size, the last of which may be shorter."""
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


def like(x: Tensor | None, other: Tensor | None = None) -> Tensor:
    """An empty tensor laid out as x; of no elements, on the device of `other`, for None."""
    if x is None:
        assert other is not None
        return other.new_empty(0)
    return torch.empty_like(x)
