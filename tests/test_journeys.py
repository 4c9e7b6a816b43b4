"""How far a batch travels stays as short as it is: `python tests/journeys.py` tells all of it."""

import importlib.util
import sys
from pathlib import Path

import pytest

from leap.ops.native import library

SCRIPT = Path(__file__).with_name("journeys.py")


@pytest.fixture(scope="module")
def journeys():
    spec = importlib.util.spec_from_file_location("journeys", SCRIPT)
    module = sys.modules["journeys"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules["journeys"]


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_a_batch_passes_eight_frames_in_five_files_to_the_kernel(journeys, backend, tmp_path):
    if backend == "native" and library.missing() is not None:
        pytest.skip(f"no native library: {library.missing()}")
    way = journeys.forward(tmp_path, backend)
    assert way.stack[0] == ("models/causal_lm.py", "forward")
    assert way.stack[-1][0].startswith("ops/")
    assert len(way.stack) <= 8, way.stack
    assert len(way.files_to_kernel) <= 5, way.files_to_kernel


def test_frames_of_others_and_comprehensions_are_not_counted(journeys, tmp_path):
    way = journeys.forward(tmp_path, "torch")
    assert way.functions and all(journeys.is_ours(code) for code in way.functions)
    assert not any(name.startswith("<") for _, name in way.stack)
