"""Feature maps: linear attention scores a query against a key by phi(q) . phi(k).

Elementwise maps, named in the list `FEATURES`:

    relu           max(x, 0)            LeaPformer, cosFormer
    elu_plus_one   elu(x) + 1           the linear transformer
    square         max(x, 0)^2
    power          max(x, 0)^degree
    cubic          x^3                  signed
    exp            e^(scale x)
    sinh           max(sinh x, 0)
    neg_sinh       sinh x               signed

and maps of where a token stands, which follow an elementwise one:

    proportional(x, p) = [x sin(pi p / 2), x cos(pi p / 2)]     scores times cos(pi/2 (p_i - s_j))
    positional(x, M)_i = proportional(x_i, (i + 1) / M)         cosFormer: the same, p fixed
    rotary(x)_i        = each pair of x_i turned by i theta     scores turned by (i - j) theta

No map gives an infinity. Those that grow faster than their input level off at `LARGEST` (or half
of what the dtype holds, if that is less), beyond which the ops could no longer add features up.

LRA's `joint-sinh` is not here: it bends the score of a pair, and so is no product of features.

Axes: b batch, h heads, t tokens, f features.
"""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from leap.errors import ConfigError, InputError
from leap.ops.checks import check_axes, check_floating, check_same, shape
from leap.ops.derivatives import transformed
from leap.ops.state import accumulator

LARGEST = 1e15
QUARTER_TURN = 1.5707962512969971  # The largest float32 below pi/2: no cosine comes out below 0.


def relu(x: Float[Tensor, "*axes"]) -> Float[Tensor, "*axes"]:
    """max(x, 0)."""
    return F.relu(x)


def elu_plus_one(x: Float[Tensor, "*axes"]) -> Float[Tensor, "*axes"]:
    """e^x below 0, x + 1 above: positive everywhere."""
    # As a sum of two halves, because elu(x) + 1 rounds to 0 where e^x does not.
    return F.relu(x) + x.clamp(max=0).exp()


def square(x: Float[Tensor, "*axes"]) -> Float[Tensor, "*axes"]:
    """max(x, 0)^2."""
    return F.relu(x).clamp(max=math.sqrt(_largest(x))).square()


def power(x: Float[Tensor, "*axes"], *, degree: float = 2.0) -> Float[Tensor, "*axes"]:
    """max(x, 0)^degree, for a degree of 1 or more."""
    if degree < 1:
        raise ConfigError(f"degree={degree} has no gradient at 0; give 1 or more")
    return F.relu(x).clamp(max=_largest(x) ** (1 / degree)).pow(degree)


def cubic(x: Float[Tensor, "*axes"]) -> Float[Tensor, "*axes"]:
    """x^3, sign and all."""
    limit = _largest(x) ** (1 / 3)
    return x.clamp(-limit, limit).pow(3)


def exp(x: Float[Tensor, "*axes"], *, scale: float = 1.0) -> Float[Tensor, "*axes"]:
    """e^(scale x)."""
    return (scale * x).clamp(max=math.log(_largest(x))).exp()


def exp_of_query(x: Float[Tensor, "*axes f"], *, scale: float = 1.0) -> Float[Tensor, "*axes f"]:
    """e^(scale x) over its largest feature, for queries.

    A factor common to a query's features cancels when scores are normalised, so this is `exp`
    without its ceiling. Keys have no such freedom: their features are weighed against each other.
    """
    return (scale * (x - x.amax(dim=-1, keepdim=True))).exp()


def sinh(x: Float[Tensor, "*axes"]) -> Float[Tensor, "*axes"]:
    """max(sinh x, 0)."""
    return neg_sinh(F.relu(x))


def neg_sinh(x: Float[Tensor, "*axes"]) -> Float[Tensor, "*axes"]:
    """The hyperbolic sine of x, sign and all. LRA's further division of keys by d cancels."""
    limit = math.asinh(_largest(x))
    return x.clamp(-limit, limit).sinh()


def _largest(x: Tensor) -> float:
    return min(LARGEST, torch.finfo(x.dtype).max / 2)


@dataclass(frozen=True)
class FeatureMap:
    """A pair of elementwise maps. Scores that may be negative need a normaliser of their own."""

    key: Callable[..., Tensor]
    query: Callable[..., Tensor]
    signed: bool = False
    name: str | None = None
    """Its name in the list, by which ops know it; None if its parameters are not those there."""


FEATURES: dict[str, FeatureMap] = {
    "relu": FeatureMap(relu, relu),
    "elu_plus_one": FeatureMap(elu_plus_one, elu_plus_one),
    "square": FeatureMap(square, square),
    "power": FeatureMap(power, power),
    "cubic": FeatureMap(cubic, cubic, signed=True),
    "exp": FeatureMap(exp, exp_of_query),
    "sinh": FeatureMap(sinh, sinh),
    "neg_sinh": FeatureMap(neg_sinh, neg_sinh, signed=True),
}


def feature_map(name: str, **parameters: float) -> FeatureMap:
    """The map listed as `name`, with those of its parameters that are given; others keep theirs.

    A map's parameters are the keyword-only arguments of its functions.
    """
    if name not in FEATURES:
        raise ConfigError(f"no feature map is called {name!r}; there are {', '.join(FEATURES)}")
    entry = FEATURES[name]
    declared = [
        p.name for p in inspect.signature(entry.key).parameters.values() if p.kind is p.KEYWORD_ONLY
    ]
    for given in parameters:
        if given not in declared:
            raise ConfigError(
                f"the feature map {name} has no parameter {given!r}; "
                f"it has {', '.join(declared) or 'none'}"
            )
    if not parameters:
        return replace(entry, name=name)
    return replace(
        entry, key=partial(entry.key, **parameters), query=partial(entry.query, **parameters)
    )


def proportional(
    x: Float[Tensor, "b h t f"], p: Float[Tensor, "b h t"]
) -> Float[Tensor, "b h t 2*f"]:
    """LeaPformer's map, [x sin(pi p / 2), x cos(pi p / 2)].

    Under it a query at proportion p scores a key at proportion s by (q . k) cos(pi/2 (p - s)).

    Args:
        x: features.
        p: where each token stands, in (0, 1).
    """
    check_floating(x=x, p=p)
    check_axes("b h t f", x=x)
    check_axes("b h t", p=p)
    check_same("b h t", x=x, p=p)
    return widen(x, cosine(p)).to(x.dtype)


def cosine(p: Float[Tensor, "*rows"]) -> Float[Tensor, "*rows 2"]:
    """`[sin, cos](pi/2 p)`: LeaPformer's re-weighting, x_i . y_j = cos(pi/2 (p_i - s_j))."""
    angle = p * (math.pi / 2 if p.dtype == torch.float64 else QUARTER_TURN)
    return torch.stack([angle.sin(), angle.cos()], dim=-1)


def widen(
    x: Float[Tensor, "*rows f"], weights: Float[Tensor, "*rows r"] | None
) -> Float[Tensor, "*rows _"]:
    """[x w_1, ... x w_r]: features with their re-weighting multiplied in; themselves for None.

    Products of features so widened are products of the features times those of the weights.
    """
    if weights is None:
        return x
    return (weights.unsqueeze(-1) * x.unsqueeze(-2)).flatten(-2)


def position_proportion(
    positions: Int[Tensor, "*rows t"], length: int | Int[Tensor, " b"], dtype: torch.dtype
) -> Float[Tensor, "*rows t"]:
    """cosFormer's fixed proportions, (i + 1) / length, for positions i counted from 0.

    A position at or beyond the length is an error, found on the CPU outside compiled code and
    transforms; elsewhere finding it would stall the device at every call.
    """
    check_positions_within(positions, length)
    if isinstance(length, Tensor):
        length = length.unsqueeze(-1)
    total = torch.promote_types(dtype, torch.float32)
    return ((positions + 1).to(total) / length).to(dtype)


def check_positions_within(positions: Tensor, length: int | Tensor) -> None:
    """Every position must be below the length, where looking at the values is free."""
    if torch.compiler.is_compiling() or transformed() or positions.device.type != "cpu":
        return
    beyond = positions >= (length.unsqueeze(-1) if isinstance(length, Tensor) else length)
    if beyond.any():
        longest = int(length.max()) if isinstance(length, Tensor) else length
        raise InputError(
            f"position {int(positions[beyond].max())} lies beyond length={longest}, "
            f"which has the positions 0 to {longest - 1}; give a larger length"
        )


def positional(
    x: Float[Tensor, "b h t f"],
    length: int | Int[Tensor, " b"],
    positions: Int[Tensor, " t"] | Int[Tensor, "b t"] | None = None,
) -> Float[Tensor, "b h t 2*f"]:
    """cosFormer's map: `proportional` with p = (i + 1) / length.

    Args:
        x: features.
        length: the length that positions are proportions of, at least the longest sequence; of
            all rows, or of each.
        positions: of the tokens, counted from 0; by default 0, 1, 2, ...
    """
    check_axes("b h t f", x=x)
    b, h, t, _ = x.shape
    if positions is None:
        positions = torch.arange(t, device=x.device)
    p = position_proportion(_each_row(positions, b, t), length, x.dtype)
    return proportional(x, p.unsqueeze(1).expand(b, h, t))


def rotary(
    x: Float[Tensor, "b h t f"],
    positions: Int[Tensor, " t"] | Int[Tensor, "b t"] | None = None,
    *,
    base: float = 10_000.0,
) -> Float[Tensor, "b h t f"]:
    """Turn each pair (x_m, x_{m + f/2}) of a token at position i by the angle i base^(-2m/f).

    The product of a query and a key so turned depends on their positions by the difference alone.

    Args:
        x: queries, keys or features of them, of even width.
        positions: of the tokens; by default 0, 1, 2, ...
        base: the larger, the slower the slowest pair turns.
    """
    check_floating(x=x)
    check_axes("b h t f", x=x)
    b, _, t, f = x.shape
    if f % 2:
        raise InputError(f"x is {shape(x)}; rotary turns pairs, so its width {f} must be even")
    if positions is None:
        positions = torch.arange(t, device=x.device)
    # In single precision the angle at position ten million is off by a radian. MPS has no double.
    exact = torch.float32 if x.device.type == "mps" else torch.float64
    speed = rotary_speeds(f, base).to(x.device, exact)
    angle = _each_row(positions, b, t)[:, None, :, None] * speed
    return turned(x, angle.expand(b, x.shape[1], -1, -1))


def turned(
    x: Float[Tensor, "b h t f"], angle: Float[Tensor, "b h t p"]
) -> Float[Tensor, "b h t f"]:
    """Turn each pair (x_m, x_{m + f/2}) of a token by an angle of its own, p = f/2 of them."""
    if 2 * angle.shape[-1] != x.shape[-1]:
        raise InputError(f"angle is {shape(angle)}; x {shape(x)} has {x.shape[-1] // 2} pairs")
    sin, cos = (turn.to(accumulator(x)) for turn in (angle.sin(), angle.cos()))
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat([x1 * cos - x2 * sin, x1 * sin + x2 * cos], dim=-1).to(x.dtype)


def rotary_speeds(n_feature: int, base: float = 10_000.0) -> Float[Tensor, " p"]:
    """By how much each pair turns from a position to the next, in double precision."""
    return base ** (-torch.arange(0, n_feature, 2, dtype=torch.float64) / n_feature)


def _each_row(positions: Tensor, b: int, t: int) -> Tensor:
    """Positions as `[b, t]`, from `[t]` or `[b, t]`."""
    if positions.is_floating_point() or positions.shape not in ((t,), (b, t)):
        raise InputError(
            f"positions are {shape(positions)} of {positions.dtype}; "
            f"expected integers, [{t}] or [{b}, {t}]"
        )
    return positions.expand(b, t)
