"""Compile every kernel for GPUs that are not here: what each takes, and how long it may run.

An op is called as it would be on the device, but its kernels are noted instead of launched. They
are then compiled for it, which needs no GPU, and what the compiler says is read off the binary:

    registers   per thread
    shared      memory that the programs on one multiprocessor share, in bytes per program
    spilled     bytes per thread that did not fit into registers

The time is an ESTIMATE, a roofline: the larger of the bytes that must be moved over the bandwidth
and the operations over the peak rate of the device. No kernel was measured.
"""

import re
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from leap.ops.triton import device

THREADS = 128  # Of a program: Triton's usual four warps of 32, and as many of AMD's are 256.


@dataclass(frozen=True)
class Target:
    """A device to compile for, and what its vendor states of it."""

    name: str
    shared: int
    """Bytes that one program may share."""
    bandwidth: float
    """Bytes per second."""
    multiply: float
    """Operations per second in float32."""
    multiply_tf32: float | None = None
    """In TF32, on matrix units; None without."""
    warp: int = 32


TARGETS = {
    "sm_80": Target("A100", 163 * 1024, 2.0e12, 19.5e12, 156e12),
    "sm_90": Target("H100", 227 * 1024, 3.35e12, 67e12, 495e12),
    "sm_100": Target("B200", 227 * 1024, 8.0e12, 75e12, 1100e12),
    "gfx942": Target("MI300X", 64 * 1024, 5.3e12, 163e12, 654e12, warp=64),
    "gfx1100": Target("RX 7900 XTX", 64 * 1024, 0.96e12, 61e12),
}
"""By the name of the architecture."""


@dataclass(frozen=True)
class Noted:
    """One launch of a kernel: what the compiler needs to know of it."""

    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    divisible: tuple[str, ...]
    """Arguments that are multiples of 16, which makes for wider loads."""
    settings: dict[str, Any]
    """Of the compiler: warps and stages."""


@dataclass(frozen=True)
class Compiled:
    """What a kernel takes on a device."""

    kernel: str
    target: str
    registers: int
    shared: int
    spilled: int


def note(calls: Callable[[], None], target: str) -> list[Noted]:
    """What an op launches, each kernel once."""
    found: dict[str, Noted] = {}
    with device.noting(target) as launches:
        calls()
    for kernel, args, options, settings in launches:
        given = dict(zip(kernel.arg_names, args, strict=False)) | options
        constant = {p.name for p in kernel.params if p.is_constexpr}
        constant |= {name for name, x in given.items() if x is None}
        signature = {
            name: "constexpr" if name in constant else _type(given[name])
            for name in kernel.arg_names
        }
        divisible = tuple(
            name
            for name in kernel.arg_names
            if name not in constant
            and name != "T"  # Never specialised.
            and (isinstance(given[name], Tensor) or given[name] % 16 == 0)
        )
        constants = {name: given[name] for name in kernel.arg_names if name in constant}
        noted = Noted(kernel, signature, constants, divisible, settings)
        found.setdefault(f"{kernel.__name__} {constants}", noted)
    return list(found.values())


def compile_for(noted: Noted, target: str) -> Compiled:
    """Compile a kernel as it was launched."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = noted.kernel.arg_names
    attrs = {(names.index(name),): [["tt.divisibility", 16]] for name in noted.divisible}
    source = ASTSource(noted.kernel, noted.signature, noted.constants, attrs)
    if target.startswith("sm_"):
        place = GPUTarget("cuda", int(target.removeprefix("sm_")), 32)
    else:
        place = GPUTarget("hip", target, TARGETS[target].warp)
    made = triton.compile(source, target=place, options=noted.settings)
    registers, spilled = _registers(made.asm)
    return Compiled(noted.kernel.__name__, target, registers, made.metadata.shared, spilled)


def _registers(asm: Any) -> tuple[int, int]:
    """Registers and bytes spilled per thread."""
    if "cubin" in asm:
        import triton.backends.nvidia

        tool = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(asm["cubin"])
            file.flush()
            command = [str(tool), "--dump-resource-usage", file.name]
            said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        found = re.findall(r"REG:(\d+) STACK:(\d+)", said)  # Of the kernel and what it calls.
        return max(int(n) for n, _ in found), max(int(n) for _, n in found)
    said = asm["amdgcn"]
    registers, stack = (
        re.search(rf"\.{name}:\s*(\d+)", said).group(1)  # type: ignore[union-attr]
        for name in ("vgpr_count", "private_segment_fixed_size")
    )
    return int(registers), int(stack)


def _type(x: Any) -> str:
    if isinstance(x, Tensor):
        return f"*{TYPES[x.dtype]}"
    if isinstance(x, float):
        return "fp32"
    return "i32" if -(2**31) <= x < 2**31 else "i64"


TYPES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.bool: "i1",
}
