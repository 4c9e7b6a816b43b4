import ctypes
from pathlib import Path

import pytest

from leap.training.heap import trim_heap


def resident_mib():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20


def test_holes_are_given_back():
    try:
        assert ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        pytest.skip("this C library keeps what is free")
    large, small = [], []
    for i in range(2000):  # 125 MiB, of which none is next to another.
        large.append(bytes(64_000 + i))
        small.append(bytes(1000 + i))
    full = resident_mib()
    del large
    trim_heap()
    assert resident_mib() < full - 80
    assert all(len(each) == 1000 + i for i, each in enumerate(small))
