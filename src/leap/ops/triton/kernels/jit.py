"""What makes a kernel of a function."""

import inspect
from collections.abc import Callable
from typing import Any

import triton

OF_THE_LENGTH = {"T", "n_blocks", "n_chunks", "n_slots", "n_sequences", "g_b", "g_h", "g_t"}
"""Arguments that differ with the number of tokens: Triton would compile anew for 1 and for those
that 16 divides. Gates per head have the length as a stride; strides of others are wider."""


def jit(function: Callable[..., Any]) -> Any:
    """A kernel, or a function for kernels to call; never compiled anew for another length."""
    function = inspect.unwrap(function)  # From the shape checks of the tests: Triton has its own.
    names = inspect.signature(function).parameters
    return triton.jit(do_not_specialize=[name for name in names if name in OF_THE_LENGTH])(function)
