"""The instruments: seconds and bytes of one call, with as little noise as the machine allows."""

import ctypes
import gc
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # As in <malloc.h>.

Call = Callable[[], object]
Clock = Callable[[], float]


@contextmanager
def threads(n: int) -> Iterator[None]:
    """Let torch compute on `n` threads, and on as many as before afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def keep_freed_memory() -> None:
    """Have the C library keep what is freed for the next allocation, on systems where it can.

    By default glibc hands back every block above 32 MiB, and a fifth of the time of a long
    sequence is then the kernel's, clearing pages that were clear a moment ago. Allocators made
    for training keep them, as torch's own does on a GPU.
    """
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
        mallopt(M_MMAP_THRESHOLD, 2**31 - 1)


class EventClock:
    """The clock of a GPU: seconds between events in the order of its work, as it saw them itself.

    An event tells how long before another it was in milliseconds, of float32: so each is compared
    with the one before it, and never with one of minutes ago.
    """

    def __init__(self, event: Callable[..., Any] = torch.cuda.Event) -> None:
        self._event = event
        self._last: Any = None
        self._now = 0.0

    def __call__(self) -> float:
        """Wait for all work given so far, and tell when it was done."""
        event = self._event(enable_timing=True)
        event.record()
        event.synchronize()
        if self._last is not None:
            self._now += self._last.elapsed_time(event) / 1e3
        self._last = event
        return self._now


def clock_for(device: torch.device, n_threads: int) -> tuple[str, Clock]:
    """The clock that tells most, and what it counts.

    On a GPU that is the device's own. On one CPU thread it is the CPU time of this process, which
    leaves out the time other processes took; the CPU time of many threads would be their sum, so
    there it is wall time.
    """
    if device.type == "cuda":
        return "GPU time", EventClock()
    if n_threads == 1:
        return "CPU time", time.process_time
    return "wall time", time.perf_counter


def seconds(call: Call, clock: Clock, *, n_calls: int = 1) -> float:
    """Seconds of one call, the mean of `n_calls` made in a row."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        start = clock()
        for _ in range(n_calls):
            call()
        return (clock() - start) / n_calls
    finally:
        if collecting:
            gc.enable()


def peak_bytes(call: Call, device: torch.device) -> int:
    """The most memory that `call` holds at once on top of what was held before it.

    Exact, and the same on every run: torch's own count of what it allocates and frees. What a
    library takes without asking torch (the packing buffers of a matrix product) is not in it.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before

    # Below this level the profiler of torch 2.13 writes two lines to stderr each time it runs.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        call()
    assert recorded.profiler is not None and recorded.profiler.kineto_results is not None
    events = [e for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak
