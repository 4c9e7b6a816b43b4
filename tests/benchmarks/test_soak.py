"""Streams that join a pool and leave it at random: a short run of what is measured for an hour."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "soak" / "measure.py"
pytestmark = pytest.mark.usefixtures("shapes_unchecked")  # Thousands of small steps.


@pytest.fixture(scope="module")
def measure():
    spec = importlib.util.spec_from_file_location("soak_measure", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # Where dataclasses look for the names in their fields.
    spec.loader.exec_module(module)
    return module


def test_streams_that_join_and_leave_stay_small_and_say_what_they_say_alone(measure, tmp_path):
    settings = {"streams": 5, "seconds": 12, "stay": 1.0, "reset": 20, "output": tmp_path}
    found = measure.main(measure.Settings(**settings))
    assert found["same_alone"] == found["left"] > settings["streams"]
    assert found["words"] > found["left"]
    assert found["steps"] == found["steps_alone"]  # No more work, however long others were there.
    first, *later = found["quarters"]
    for quarter in later:
        assert quarter["state_bytes"] == first["state_bytes"]
        assert quarter["tensors"] <= first["tensors"]
        assert quarter["source_bytes"] < 10_000 * settings["streams"]
    assert json.loads((tmp_path / "results.json").read_text())["results"] == found
    assert "had said" in (tmp_path / "results.md").read_text()
