"""One token of each row through whole blocks by the native library: see src/native/block.h.

A block is described once, by the addresses of its weights, and what it keeps of the past is given
with each token. Nothing here knows of modules: `leap.layers.fused` describes them.

Axes: b batch, d hidden size, h heads, f features and e values of a head.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from leap.ops.features import LARGEST
from leap.ops.native.causal import MAPS
from leap.ops.native.library import Block, Linear, Norm, address, run_blocks

MOST_CLOCKS = 32  # As block.h has room for.
PLACES = {"none": 0, "travelled": 1, "learned": 2}
"""Re-weightings, by their numbers in leap.h."""


class Kept(NamedTuple):
    """What a block keeps of the past; None where it has no such thing."""

    kv: Tensor
    k_sum: Tensor
    log_decay: Tensor | None
    angle: Tensor | None
    tokens: Tensor | None


def linear(weight: Tensor, bias: Tensor | None) -> Linear:
    """A linear layer as the library sees it."""
    return Linear(address(weight), address(bias), weight.shape[1], weight.shape[0])


def norm(weight: Tensor, bias: Tensor | None, eps: float) -> Norm:
    """A norm as the library sees it."""
    return Norm(address(weight), address(bias), eps)


def describe(
    *,
    feature: str,
    places: str,
    steps: Sequence[Linear] = (),
    q_place: Sequence[Linear] = (),
    k_place: Sequence[Linear] = (),
    **fields: Any,
) -> Block:
    """A block, by the fields of the struct in leap.h.

    Args:
        feature: the feature map, one of `causal.MAPS`.
        places: how scores are re-weighted, one of `PLACES`.
        steps, q_place, k_place: nets of one layer or two.
        fields: all others, left out where there is no such thing.
    """
    block = Block(**fields)
    block.map_q, block.map_k = MAPS[feature]
    block.map_scale, block.map_limit = 1, math.log(LARGEST)
    block.places = PLACES[places]
    for net, layers in ((block.steps, steps), (block.q_place, q_place), (block.k_place, k_place)):
        for i, layer in enumerate(layers, start=2 - len(layers)):
            net[i] = layer
    return block


def advance(blocks: Any, x: Tensor, past: Sequence[Kept]) -> tuple[Tensor, list[Kept]]:
    """Tokens `[b, d]` after all blocks, and what each keeps then.

    Args:
        blocks: an array of what `describe` gave.
        x: tokens, float32.
        past: what each block kept, contiguous: sums, logs and angles in float64, tokens in float32.
    """
    y = x.clone(memory_format=torch.contiguous_format)
    after, addresses = [], []
    for kept in past:
        new = Kept(*(None if each is None else torch.empty_like(each) for each in kept))  # type: ignore[arg-type]
        after.append(new)
        addresses += [None if each is None else each.data_ptr() for each in (*kept, *new)]
    run_blocks(blocks, addresses, y)
    return y, after
