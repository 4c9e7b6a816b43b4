"""Derivatives that kernels do not have: second ones, forward mode, and those of `torch.func`.

A kernel computes an output and its gradient, and torch knows how to do neither again. Where more is
asked for, the same sum by plain operations of torch takes its place, in more memory and time:

    in a call       under a transform of `torch.func` or in forward mode
    in a backward   also with `create_graph=True`, when the gradient is to be differentiated
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad


def transformed() -> bool:
    """Whether a transform of `torch.func`, or forward mode, is at work: they know no kernels."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def followed(x: Tensor) -> bool:
    """Whether somebody may look at the operations of a call: autograd, a compiler, or a mode."""
    return (
        torch.compiler.is_compiling()
        or torch.is_grad_enabled()
        or type(x) not in (Tensor, torch.nn.Parameter)
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._len_torch_function_stack() > 0
        or torch.is_autocast_enabled(x.device.type)
        or transformed()
    )


def differentiable_again() -> bool:
    """Whether a backward pass must itself be differentiable."""
    return torch.is_grad_enabled() or transformed()


def gradients(
    plain: Callable[..., tuple[Tensor, ...]],
    inputs: Sequence[Any],
    upstream: Sequence[Tensor | None],
) -> tuple[Tensor | None, ...]:
    """Gradients of the inputs, None for what is no floating-point tensor.

    Args:
        plain: from the inputs to the outputs, by operations that torch differentiates.
        inputs: tensors, and anything else.
        upstream: gradients of the outputs; None for 0.
    """
    places = [i for i, x in enumerate(inputs) if isinstance(x, Tensor) and x.is_floating_point()]

    def of_tensors(*tensors: Tensor) -> tuple[Tensor, ...]:
        given = dict(zip(places, tensors, strict=True))
        return plain(*(given.get(i, x) for i, x in enumerate(inputs)))

    outputs, pull = torch.func.vjp(of_tensors, *(inputs[i] for i in places))  # type: ignore[misc]
    grads = pull(
        tuple(
            torch.zeros_like(o) if g is None else g for o, g in zip(outputs, upstream, strict=True)
        )
    )
    found = dict(zip(places, grads, strict=True))
    return tuple(found.get(i) for i in range(len(inputs)))
