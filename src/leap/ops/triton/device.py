"""Where the kernels run: on a device of CUDA or ROCm, or interpreted on the CPU to check them.

TRITON_INTERPRET=1 LEAP_BACKEND=triton      the kernels, statement by statement, in NumPy
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from leap.extras import install_command

INTERPRET = "TRITON_INTERPRET"
CHUNK, BLOCK = 128, 32  # Tokens from one state to the next, and of a program at a time.
FUSED = {"enable_fp_fusion": True}  # a * b + c in one rounding: said, as Triton's default changes.
Launch = tuple[Any, tuple[Any, ...], dict[str, Any], dict[str, Any]]
"""A kernel, its arguments, its options by name, and settings of the compiler."""


def interpreted() -> bool:
    """Whether kernels are to be interpreted."""
    return os.environ.get(INTERPRET) == "1"


def missing() -> str | None:
    """Why no kernel runs here, or None if they do."""
    if find_spec("triton") is None:
        return f"Triton, which is for Linux, is not installed: {install_command('triton')}"
    if not torch.cuda.is_available() and not interpreted():
        return (
            f"no GPU here; {INTERPRET}=1 interprets the kernels on the CPU, slowly, to check them"
        )
    return None


def refuses(tensors: Iterable[Tensor | None], *, is_named: bool) -> str | None:
    """What no kernel takes, or None.

    Args:
        tensors: all that are given.
        is_named: whether the caller named this backend: nobody is given the interpreter unasked.
    """
    reason = missing()
    if reason is not None:
        return reason
    kinds = {x.device.type for x in tensors if x is not None}
    if kinds == {"cpu"}:
        if not interpreted():
            return f"tensors are on the CPU, where kernels run only with {INTERPRET}=1"
        return None if is_named else "the interpreter is for those who name this backend"
    if kinds != {"cuda"}:
        return f"it is for CUDA and ROCm, and tensors are on {', '.join(sorted(kinds))}"
    return None


@dataclass(frozen=True)
class Blocks:
    """How tokens, features and values are cut up, and in what precision they are multiplied."""

    chunk: int
    """Tokens from one state to the next."""
    tokens: int
    """Tokens that a program takes at a time."""
    gradient_tokens: int
    """Those that one for gradients of queries or keys takes, which holds more of each."""
    features: int
    values: int
    double: bool
    precision: str
    """TF32 where inputs have no more digits than it holds: their products are then exact."""

    @classmethod
    def of(
        cls, tensors: Sequence[Tensor], features: int, values: int, *, per_feature: bool = False
    ) -> "Blocks":
        """For given queries, keys and values, by their dtypes and widths; never by their length.

        Args:
            tensors: queries, keys and values.
            features: their width.
            values: the width of values.
            per_feature: whether gates are: blocks then meet themselves pair by pair.
        """
        double = any(x.dtype == torch.float64 for x in tensors)
        half = all(x.dtype in (torch.float16, torch.bfloat16) for x in tensors)
        chunk, tokens = (64, 16) if double else (CHUNK, BLOCK)
        if per_feature:
            chunk, tokens = 64, 16
        if not has_tf32():
            tokens = 16  # Without matrix units, products take more registers.
        if interpreted():
            chunk, tokens = 32, 16  # Few tokens are then several chunks.
        widest = 64 if has_tf32() else 32
        f, e = (min(widest, max(16, power_of_two(width))) for width in (features, values))
        f = min(f, 32) if per_feature else f
        precision = "tf32" if half and has_tf32() else "ieee"
        # Longer ones would spill, but for those whose threads have 512 registers.
        gradient_tokens = tokens if has_wide_warps() else 16
        return cls(chunk, tokens, gradient_tokens, f, e, double, precision)

    def options(self) -> dict[str, Any]:
        """As kernels take them."""
        import triton.language as tl

        return {
            "CHUNK": self.chunk,
            "BT": self.tokens,
            "BF": self.features,
            "BE": self.values,
            "ACC": tl.float64 if self.double else tl.float32,
            "PRECISION": self.precision,
        }

    @property
    def dtype(self) -> torch.dtype:
        """What sums within chunks are kept in."""
        return torch.float64 if self.double else torch.float32


_target: str | None = None  # The device compiled for, where it is not the one here.
_noted: list[Launch] = []


@contextmanager
def noting(target: str) -> Iterator[list[Launch]]:
    """A context in which kernels are noted, as they would run on a device, and not run."""
    global _target
    _noted.clear()
    _target = target
    try:
        yield _noted
    finally:
        _target = None


def architecture() -> str | None:
    """Of the device compiled for, or of AMD's here; None for others."""
    if _target is not None or not torch.cuda.is_available() or torch.version.hip is None:
        return _target
    return torch.cuda.get_device_properties(0).gcnArchName.split(":")[0]


def is_amd() -> bool:
    """Whether the device, or the one compiled for, is one of AMD's."""
    return (architecture() or "").startswith("gfx")


def has_tf32() -> bool:
    """Whether it multiplies TF32."""
    return not is_amd() or architecture() == "gfx942"


def has_wide_warps() -> bool:
    """Whether it is one of AMD's for servers, with twice the threads per warp and the registers."""
    return (architecture() or "").startswith("gfx9")


def power_of_two(n: int) -> int:
    """The first power of two from n on."""
    return 1 << max(n - 1, 0).bit_length()


def cut(n: int, size: int) -> int:
    """How many pieces of a size it takes."""
    return (n + size - 1) // size


def strides(x: Tensor) -> tuple[int, int, int]:
    """Of batch, heads and tokens."""
    return x.stride(0), x.stride(1), x.stride(2)


def warps(options: Mapping[str, Any]) -> int:
    """For a kernel: those that hold the most numbers share them out among more threads."""
    if is_amd():
        return 4 if has_wide_warps() or "CHUNK" not in options else 8
    return 8 if options.get("GATED") == 2 else 4


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Run a kernel on the device of its first tensor."""
    if not all(grid):
        return
    settings = {"num_warps": warps(options), "num_stages": 2}
    if _target is not None:
        _noted.append((kernel, args, options, settings | FUSED))
        return
    first = next(x for x in args if isinstance(x, Tensor))
    if first.device.type == "cuda":
        with torch.cuda.device(first.device):
            kernel[grid](*args, **options, **settings, **FUSED)
    else:
        kernel[grid](*args, **options)
