"""Checks shared by the ops: each says what was given and what would work.

They read shapes and dtypes only, which costs microseconds; values are checked where an op must
look at them anyway.
"""

import torch
from torch import Tensor

from leap.errors import InputError


def shape(x: Tensor) -> str:
    """A tensor's shape as written in messages: `[2, 8, 100, 64]`."""
    return str(list(x.shape))


def check_floating(**tensors: Tensor | None) -> None:
    """Every tensor given must hold floating-point numbers."""
    for name, x in tensors.items():
        if x is not None and not x.is_floating_point():
            raise InputError(
                f"{name} has dtype {x.dtype}; attention needs floating point, say {name}.float()"
            )


def check_axes(axes: str, **tensors: Tensor | None) -> None:
    """Every tensor given must have the axes named in `axes`, say `b h t f`."""
    for name, x in tensors.items():
        if x is not None and x.ndim != len(axes.split()):
            raise InputError(f"{name} is {shape(x)}; expected axes [{', '.join(axes.split())}]")


def check_same(axes: str, **tensors: Tensor | None) -> None:
    """All tensors given must agree on the axes marked in `axes`: `b h t *` leaves the last free."""
    first, *others = ((name, x) for name, x in tensors.items() if x is not None)
    named = [(i, axis) for i, axis in enumerate(axes.split()) if axis != "*"]
    for name, x in others:
        for i, axis in named:
            if x.shape[i] != first[1].shape[i]:
                raise InputError(
                    f"{first[0]} is {shape(first[1])} and {name} is {shape(x)}: they differ in "
                    f"axis {i} ({axis}), where they must agree"
                )


def check_key_mask(key_mask: Tensor | None, k: Tensor, name: str = "k") -> None:
    """A mask is `[b, t]`, true where a token is real."""
    if key_mask is None:
        return
    if key_mask.dtype != torch.bool:
        raise InputError(
            f"key_mask has dtype {key_mask.dtype}; expected bool, true at real tokens: "
            "use attention_mask.bool()"
        )
    if key_mask.shape != (k.shape[0], k.shape[2]):
        raise InputError(
            f"key_mask is {shape(key_mask)}; with {name} {shape(k)} "
            f"it must be [{k.shape[0]}, {k.shape[2]}]"
        )
