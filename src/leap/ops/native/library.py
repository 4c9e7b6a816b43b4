"""The native library: loading it, and handing it tensors as addresses and strides.

Its structs are those of src/native/leap.h, field by field.
"""

import ctypes
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

LIBRARY, REASON = "libleap.so", "not-built.txt"
INTERFACE = 4  # LEAP_INTERFACE in src/native/leap.h.
TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.bool: 0}
LEAST_WORK = 2**22  # Multiplications below which a second thread costs more than it brings.


class View(ctypes.Structure):
    """A tensor `[b, h, t, ...]`."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("stride", ctypes.c_int64 * 3),
        ("type", ctypes.c_int64),
    )


class Attention(ctypes.Structure):
    """A call of linear attention, causal or to a whole sequence."""

    _fields_ = (
        *(
            (name, ctypes.c_int64)
            for name in ["batch", "heads", "tokens", "features", "values", "rank", "sources"]
        ),
        *((name, ctypes.c_int64) for name in ("map_q", "map_k")),
        *((name, ctypes.c_double) for name in ("map_scale", "map_limit", "eps")),
        ("normalise", ctypes.c_int64),
        *((name, View) for name in ["q", "k", "v", "x", "y", "gate", "mask"]),
        *(
            (name, ctypes.c_void_p)
            for name in ["rate", "kv", "k_sum", "kv_after", "k_sum_after", "den", "marks"]
        ),
        ("o", View),
        ("d_o", View),
        *((name, ctypes.c_void_p) for name in ["dkv_after", "dk_sum_after", "dkv", "dk_sum"]),
        *((name, View) for name in ["dq", "dk", "dv", "dx", "dy", "dgate"]),
    )


class Step(ctypes.Structure):
    """A call of causal linear attention of one token."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("batch", "heads", "features", "values", "rank")),
        ("eps", ctypes.c_double),
        ("normalise", ctypes.c_int64),
        *((name, View) for name in ("q", "k", "v", "x", "y", "gate", "mask")),
        *((name, ctypes.c_void_p) for name in ("kv", "k_sum", "kv_after", "k_sum_after")),
        ("o", View),
    )


class Linear(ctypes.Structure):
    """A linear layer; of null weights where there is none."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weight", "bias")),
        *((name, ctypes.c_int64) for name in ("n_in", "n_out")),
    )


class Norm(ctypes.Structure):
    """A norm; of null weights where there is none."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weight", "bias")),
        ("eps", ctypes.c_double),
    )


class Block(ctypes.Structure):
    """A block of a transformer around causal linear attention."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("width", "heads", "features", "values")),
        *((name, ctypes.c_int64) for name in ("map_q", "map_k")),
        *((name, ctypes.c_double) for name in ("map_scale", "map_limit", "eps", "query_divisor")),
        *(
            (name, ctypes.c_int64)
            for name in ("normalise", "places", "clocks", "from_features", "taps")
        ),
        *((name, Norm) for name in ("attention_norm", "feed_forward_norm", "head_norm")),
        *((name, Linear) for name in ("q", "k", "v", "o", "gate", "output_gate")),
        *((name, Linear * 2) for name in ("steps", "q_place", "k_place")),
        *((name, Linear) for name in ("up", "down")),
        *((name, ctypes.c_void_p) for name in ("log_frequency", "convolution", "rate")),
    )


PAST = ("kv", "k_sum", "log_decay", "angle", "tokens")
"""What a block keeps, in the order of the struct Past: all before, then all after."""


class Convolution(ctypes.Structure):
    """A call of the short convolution."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("batch", "tokens", "channels", "taps", "silu")),
        ("x", ctypes.c_void_p),
        ("x_stride", ctypes.c_int64 * 2),
        *((name, ctypes.c_void_p) for name in ("weight", "past", "y")),
        *((name, ctypes.c_void_p) for name in ("dy", "dx", "dpast", "dweight")),
    )


class Additive(ctypes.Structure):
    """A call of additive attention."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("batch", "heads", "tokens", "past", "values")),
        ("window", ctypes.c_int64),
        *((name, View) for name in ("focus", "v", "mask", "past_focus", "past_v", "past_mass")),
        ("o", View),
        *((name, ctypes.c_void_p) for name in ("unrounded", "peaks", "inverses")),
        *((name, ctypes.c_void_p) for name in ("n_last", "z_last")),
        ("d_o", View),
        *((name, ctypes.c_void_p) for name in ("dn_last", "dz_last")),
        *((name, View) for name in ("dfocus", "dv")),
        *((name, ctypes.c_void_p) for name in ("dpast_focus", "dpast_v", "dpast_mass")),
    )


def view(x: Tensor | None) -> View:
    """A tensor as the library sees it; its last axis must run along memory if it has four."""
    if x is None or not x.numel():
        return View()
    return View(x.data_ptr(), (ctypes.c_int64 * 3)(*x.stride()[:3]), TYPES[x.dtype])


def address(x: Tensor | None) -> int | None:
    """Where a contiguous tensor begins."""
    return None if x is None else x.data_ptr()


def side_by_side(x: Tensor) -> Tensor:
    """The same tensor with the numbers of a token side by side: itself, as a rule."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def like(x: Tensor | None, other: Tensor) -> Tensor:
    """An empty tensor laid out as x, its last axis along memory; of no elements for None."""
    if x is None:
        return other.new_empty(0)
    made = torch.empty_like(x)
    return made if made.stride(-1) == 1 else made.new_empty(made.shape)


def way_to(
    op: Callable[..., Any],
    function: Callable[..., Any],
    save: Callable[..., None] | None = None,
    differentiate: Callable[..., Any] | None = None,
) -> Callable[[Tensor], Callable[..., Any]]:
    """How to call a custom op: without a detour through torch's dispatcher where nobody looks.

    A compiler, an exporter or a dispatch mode is to see one op. All others need but the function,
    and `save` and `differentiate` as the op has them registered; in short calls the detour is a
    tenth of the time.

    Returns:
        Of the first tensor of a call, what to call with all that is given.
    """

    class Direct(torch.autograd.Function):
        forward = staticmethod(function)
        setup_context = staticmethod(save or (lambda ctx, inputs, output: None))
        backward = staticmethod(differentiate or (lambda ctx, *grads: None))

    def way(first: Tensor) -> Callable[..., Any]:
        if (
            torch.compiler.is_compiling()
            or type(first) not in (Tensor, torch.nn.Parameter)
            or torch._C._len_torch_dispatch_stack()
        ):
            return op
        if differentiate is None or not torch.is_grad_enabled():
            return function
        return Direct.apply

    return way


def n_threads(work: int, rows: int) -> int:
    """How many threads to share rows out among, for so many multiplications in all."""
    return min(torch.get_num_threads(), rows) if work >= LEAST_WORK else 1


def load(folder: Path) -> tuple[ctypes.CDLL | None, str | None]:
    """The library in a folder, or why there is none that these structs fit."""
    if not (folder / LIBRARY).is_file():
        said = (folder / REASON).read_text().strip() if (folder / REASON).is_file() else ""
        return None, said or "the library was not built; python src/native/build.py builds it"
    try:
        library = ctypes.CDLL(str(folder / LIBRARY))
    except OSError as error:
        return None, f"the library does not load ({error})"
    past = 2 * len(PAST) * ctypes.sizeof(ctypes.c_void_p)
    sizes = [ctypes.sizeof(kind) for kind in (Attention, Step, Additive, Block)]
    expected = [INTERFACE, *sizes, past, ctypes.sizeof(Linear), ctypes.sizeof(Convolution)]
    try:
        found = list((ctypes.c_int64 * len(expected)).in_dll(library, "leap_interface"))
    except ValueError:
        found = []
    if found != expected:
        return None, "it was built from other sources; python src/native/build.py builds it anew"
    library.leap_instructions.restype = ctypes.c_char_p
    library.leap_causal_scratch.restype = library.leap_whole_scratch.restype = ctypes.c_int64
    library.leap_additive_scratch.restype = ctypes.c_int64
    library.leap_convolution_scratch.restype = ctypes.c_int64
    library.leap_blocks_scratch.restype = library.leap_linear_scratch.restype = ctypes.c_int64
    any_, number = ctypes.c_void_p, ctypes.c_int64
    library.leap_blocks_scratch.argtypes = any_, number, number
    library.leap_blocks.argtypes = any_, any_, number, number, any_, any_
    library.leap_linear_scratch.argtypes = any_, number
    library.leap_linear.argtypes = any_, number, any_, any_, any_
    if library.leap_instructions() is None:
        return None, "this processor has none of the instruction sets that it was compiled for"
    return library, None


_library, _reason = load(Path(__file__).parent)


def missing() -> str | None:
    """Why the library is not here, or None if it is."""
    return _reason


def instructions() -> str:
    """The instruction set in use."""
    return _loaded().leap_instructions().decode()


def use_instructions(name: str) -> bool:
    """Take another instruction set, AVX2 say; False if it is not there."""
    return bool(_loaded().leap_use_instructions(name.encode()))


def _loaded() -> ctypes.CDLL:
    assert _library is not None
    return _library


def run_attention(form: str, call: Attention, *, backward: bool, like: Tensor, work: int) -> None:
    """Run a call whose struct is filled in; `like` tells where scratch memory is to be.

    Args:
        form: causal or whole.
    """
    library, threads = _loaded(), n_threads(work, call.batch * call.heads)
    size = library[f"leap_{form}_scratch"](ctypes.byref(call), int(backward))
    scratch = like.new_empty(threads * size, dtype=torch.float32)
    function = library[f"leap_{form}_backward" if backward else f"leap_{form}"]
    function(ctypes.byref(call), ctypes.c_void_p(scratch.data_ptr()), threads)


def run_additive(call: Additive, *, backward: bool, like: Tensor, work: int) -> None:
    """Run a call whose struct is filled in; `like` tells where scratch memory is to be."""
    library, threads = _loaded(), n_threads(work, call.batch * call.heads)
    size = library.leap_additive_scratch(ctypes.byref(call))
    scratch = like.new_empty(threads * size)
    function = library.leap_additive_backward if backward else library.leap_additive
    function(ctypes.byref(call), ctypes.c_void_p(scratch.data_ptr()), threads)


def run_convolution(call: Convolution, *, backward: bool, like: Tensor, work: int) -> None:
    """Run a call whose struct is filled in; `like` tells where scratch memory is to be."""
    library, threads = _loaded(), n_threads(work, call.batch)
    size = library.leap_convolution_scratch(ctypes.byref(call))
    scratch = like.new_empty(threads * size)
    function = library.leap_convolution_backward if backward else library.leap_convolution
    function(ctypes.byref(call), ctypes.c_void_p(scratch.data_ptr()), threads)


def run_step(call: Step, work: int) -> None:
    """Run a step whose struct is filled in."""
    _loaded().leap_step(ctypes.byref(call), n_threads(work, call.batch * call.heads))


def run_blocks(blocks: ctypes.Array[Block], past: Sequence[int | None], x: Tensor) -> None:
    """One token of each row of x, `[b, width]`, through blocks, which write into x.

    Args:
        blocks: as they are filled in.
        past: addresses of what each keeps, as `PAST` says.
        x: what goes in and comes out.
    """
    library, rows = _loaded(), x.shape[0]
    given = (ctypes.c_void_p * len(past))(*past)
    scratch = x.new_empty(library.leap_blocks_scratch(blocks, len(blocks), rows))
    library.leap_blocks(blocks, given, len(blocks), rows, x.data_ptr(), scratch.data_ptr())


def run_linear(layer: Linear, x: Tensor, y: Tensor) -> None:
    """Rows of x, `[rows, n_in]`, through a linear layer."""
    library, rows = _loaded(), x.shape[0]
    scratch = x.new_empty(library.leap_linear_scratch(ctypes.byref(layer), rows))
    library.leap_linear(ctypes.byref(layer), rows, x.data_ptr(), y.data_ptr(), scratch.data_ptr())


def refuses(tensors: Iterable[Tensor | None]) -> str | None:
    """What the library cannot take whatever the op, or None."""
    if _reason is not None:
        return _reason
    for x in tensors:
        if x is None:
            continue
        if x.device.type != "cpu":
            return f"it is for the CPU, and tensors are on {x.device.type}"
        if x.dtype not in TYPES:
            given = str(x.dtype).removeprefix("torch.")
            return f"it takes float32 and bfloat16, and {given} was given"
    return None
