"""What makes a kernel of a function."""

import inspect
from collections.abc import Callable
from typing import Any

import triton


def jit(function: Callable[..., Any]) -> Any:
    """A kernel, or a function for kernels to call; never compiled anew for another length T."""
    function = inspect.unwrap(function)  # From the shape checks of the tests: Triton has its own.
    names = inspect.signature(function).parameters
    return triton.jit(do_not_specialize=["T"] if "T" in names else [])(function)
