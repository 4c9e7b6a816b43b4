"""Which code answers a call: backends, each of which says what it takes and why it refuses.

    native      C++ for the CPU, compiled when the package is installed
    triton      kernels for GPUs, compiled as they are called; by name interpreted on the CPU
    torch       operations of PyTorch; takes every call
    fla         kernels of flash-linear-attention, where it is installed; only by name
    reference   the formulas as written, in O(t^2); only by name as well
    graph       operations that ONNX has too, without loops over tokens; only by name as well

The first of the list that is here and does not refuse a call answers it. A name overrides the
choice: `backend=` of a call, else `using` around it, else the environment variable LEAP_BACKEND. A
backend that was named and refuses is an error, never another backend.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from leap.errors import ConfigError, InputError
from leap.ops.fla import package
from leap.ops.native import library
from leap.ops.triton import device

VARIABLE = "LEAP_BACKEND"


@dataclass(frozen=True)
class Backend:
    """One way to compute."""

    covers: str
    """What it takes, in a line."""
    missing: Callable[[], str | None] = lambda: None
    """Why it is not here, or None if it is."""
    by_name_alone: bool = False
    """Whether it answers only those who name it."""


BACKENDS: dict[str, Backend] = {
    "native": Backend(
        covers="on the CPU, float32 and bfloat16: linear attention, causal with gates per head, or "
        "bidirectional; additive attention; in float32 the short convolution, and one more token "
        "through all layers of a decoder at once",
        missing=library.missing,
    ),
    "triton": Backend(
        covers="on CUDA and ROCm: linear attention, bidirectional, or causal with gates per head "
        "or per feature; additive attention; rows packed by cu_seqlens of the causal ones",
        missing=device.missing,
    ),
    "torch": Backend(covers="every op, on any device: operations of PyTorch"),
    "fla": Backend(
        covers="on CUDA and ROCm: causal linear attention by kernels of flash-linear-attention",
        missing=package.missing,
        by_name_alone=True,
    ),
    "reference": Backend(
        covers="the formulas in O(t^2), to check others by: sequences from their beginning",
        by_name_alone=True,
    ),
    "graph": Backend(
        covers="a few tokens without pads, in O(t^2) and without loops: for leap export",
        by_name_alone=True,
    ),
}
"""Every backend by its name, the most wanted first."""

_named: str | None = os.environ.get(VARIABLE) or None


@contextmanager
def using(name: str | None) -> Iterator[None]:
    """A context in which the backend of this name answers, or for None the first that can."""
    global _named
    if name is not None:
        check_name(name)
    before, _named = _named, name
    try:
        yield
    finally:
        _named = before


def named() -> str | None:
    """The backend that `using` or the environment names, or None."""
    if _named is not None:
        check_name(_named)
    return _named


def traces() -> bool:
    """Whether a graph is being made, which has to serve any number of tokens."""
    return _named == "graph"


def is_named(asked: str | None, name: str) -> bool:
    """Whether the backend of this name is the one asked for with a call, or around it."""
    return (named() if asked is None else asked) == name


def choose(asked: str | None, refusals: Mapping[str, str | None]) -> str:
    """The name of the backend that answers a call.

    Args:
        asked: the name given with the call, if any.
        refusals: by backend, why it cannot take this call, or None if it can. Backends that are
            not among them do not have the op; torch takes everything.
    """
    name = named() if asked is None else asked
    if name is None:
        for each, backend in BACKENDS.items():
            if not backend.by_name_alone and _refusal(each, refusals) is None:
                return each
        raise AssertionError("torch takes everything")
    check_name(name)
    reason = _refusal(name, refusals)
    if reason is not None:
        raise InputError(
            f"backend {name!r} cannot answer this call: {reason}; "
            f"without backend= and {VARIABLE} another one does"
        )
    return name


def check_name(name: str) -> None:
    """Refuse a name that no backend has."""
    if name not in BACKENDS:
        raise ConfigError(
            f"no backend is called {name!r} (backend= or {VARIABLE}); "
            f"there are {', '.join(BACKENDS)}"
        )


def _refusal(name: str, refusals: Mapping[str, str | None]) -> str | None:
    if name == "torch":
        return None
    if name == "graph":
        return refusals.get(name)
    return refusals.get(name, "it does not have this op")
