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
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from leap.errors import ConfigError
from leap.ops.triton import additive, causal, device, step, whole
from leap.ops.triton.device import BLOCK, CHUNK


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
    kind: str
    """Which of a kernel's forms it is, in words; empty for those that have one."""
    target: str
    registers: int
    shared: int
    spilled: int
    seconds: float
    """An estimate for the workload below."""


BATCH, HEADS, TOKENS, WIDTH, RANK = 8, 16, 4096, 64, 2
WORKLOAD = f"batch {BATCH}, {HEADS} heads of width {WIDTH}, {TOKENS} tokens, rank {RANK}, bfloat16"
"""What times are estimated for."""


def compile_all(targets: Iterable[str] = tuple(TARGETS)) -> Iterator[Compiled]:
    """Every kernel on every device, with all that it can be asked for."""
    for target in targets:
        if target not in TARGETS:
            raise ConfigError(f"no GPU is called {target!r} here; there are {', '.join(TARGETS)}")
        if device.interpreted():
            raise ConfigError(f"{device.INTERPRET}=1 interprets kernels; unset it to compile them")
        if find_spec("triton") is None:
            raise ConfigError(str(device.missing()))
        for noted in note(_calls, target):
            yield compile_for(noted, target)


def _calls() -> None:
    """Each op once, forward and backward. Lengths change nothing."""
    q, k, v = (torch.empty(1, 200, 2, WIDTH, dtype=torch.bfloat16).transpose(1, 2) for _ in "qkv")
    x, y = (torch.empty(1, 2, 200, RANK) for _ in "xy")
    gate, mask = torch.empty(1, 2, 200), torch.ones(1, 200, dtype=torch.bool)
    given = q, k, v, x, y, gate, mask
    kv, k_sum = torch.empty(1, 2, RANK * WIDTH, WIDTH).double(), torch.empty(1, 2, RANK * WIDTH)
    state = kv, k_sum.double()
    gates = torch.empty(1, 2, 200, WIDTH)
    packed = *given[:5], gates, mask, torch.tensor([0, 200])
    for tokens in ((*given, None), packed):
        o, den, _, _, scale, rest = causal.attend_op(*tokens, None, *state, None, True, 1e-6)
        saved = o, den, scale, rest
        causal.attend_backward(o, *state, *state, *tokens, *saved, None, None, True, 1e-6)
    weighed = q, k, v, x, y, mask
    o, _, _, *kept = whole.attend(*weighed, True, 1e-6)
    whole.attend_backward(o, None, None, *weighed, o, *kept, True, 1e-6)
    for gate_of_one in (gate, gates):
        one = (each[:, :, :1] for each in (q, k, v, x, y, gate_of_one))
        step.attend(*one, mask[:, :1], *state, True, 1e-6)
    starts = torch.tensor([0, 200])
    for window, cu_seqlens in ((None, None), (None, starts), (64, starts)):
        args = gate[0], gate[0], v[0], gate[0], window, cu_seqlens
        additive.sum_up(*args, backwards=window is None)


def _work(kernel: str, constants: Mapping[str, Any]) -> tuple[float, float]:
    """Bytes that a kernel must move, and multiplications and additions of its products."""
    chunk, block = constants.get("CHUNK", CHUNK), constants.get("BT", BLOCK)
    n, f, wide, size = BATCH * HEADS * TOKENS, WIDTH, RANK * WIDTH, 2
    states = 4 * n / chunk * wide * (f + 1)
    seen = (chunk + block) / 2 if constants.get("CAUSAL", True) else 0  # Keys of its chunk.
    tokens, products = {
        "chunk_states": (2 * f, 2 * wide * f),
        "scan": (0, 0),
        "outputs": (5 * f, seen * 3 * f + 2 * wide * f),
        "divide": (3 * f, f),
        "query_gradients": (5 * f, seen * 4 * f + 2 * wide * f),
        "key_gradients": (5 * f, seen * 4 * f + 2 * wide * f),
        "value_gradients": (4 * f, seen * 3 * f + 2 * wide * f),
        "step": (4 * f / TOKENS, 0),
        "totals": (f, f),
        "sums": (3 * f, 4 * block * f),
    }.get(kernel, (0, 0))
    small = ("divide", "decays", "gate_gradients", "totals", "before", "sums")
    moved = 2 * states if kernel == "scan" else 0 if kernel in small else states
    if kernel == "step":
        moved = 2 * 8 * n / TOKENS * wide * (f + 1)
    per_token = 4.0 * 4  # Denominators, scales, gates.
    if constants.get("GATED") == 2 and kernel != "scan":
        per_token += (12 if kernel == "decays" else 8) * f  # Decays, in float64.
    if kernel == "feature_gate_gradients":
        per_token, moved = 3.0 * 4 * f, 2 * states
    return n * (tokens * size + per_token) + moved, 2.0 * n * products


def _seconds(kernel: str, constants: Mapping[str, Any], target: str) -> float:
    place = TARGETS[target]
    moved, operations = _work(kernel, constants)
    return max(moved / place.bandwidth, operations / (place.multiply_tf32 or place.multiply))


def _kind(constants: Mapping[str, Any]) -> str:
    if constants.get("GATED") == 2 or constants.get("PER_FEATURE"):
        return "gates per feature"
    if constants.get("CAUSAL") is False:
        return "to all tokens"
    if constants.get("BACKWARD") or constants.get("BACKWARDS"):
        return "backward"
    return "windowed" if constants.get("WINDOWED") else ""


def note(calls: Callable[[], None], target: str) -> list[Noted]:
    """What an op launches, each kernel once."""
    found: dict[str, Noted] = {}
    with device.noting(target) as launches:
        calls()
    for kernel, args, options, settings in launches:
        given = dict(zip(kernel.arg_names, args, strict=False)) | options
        constant = {p.name for p in kernel.params if p.is_constexpr}
        general = {p.name for p in kernel.params if p.do_not_specialize}
        constant |= {name for name, x in given.items() if x is None}
        signature = {
            name: "constexpr" if name in constant else _type(given[name])
            for name in kernel.arg_names
        }
        divisible = tuple(
            name
            for name in kernel.arg_names
            if name not in constant | general
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
    name, constants = noted.kernel.__name__, noted.constants
    return Compiled(
        name,
        _kind(constants),
        target,
        registers,
        made.metadata.shared,
        spilled,
        _seconds(name, constants, target),
    )


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
    torch.int32: "i32",
}
