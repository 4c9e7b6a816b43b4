"""The recorded measurement of the loss: that it runs, and what it must show."""

import importlib.util
import json
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks" / "loss"


@pytest.fixture(scope="module")
def measure():
    spec = importlib.util.spec_from_file_location("measure", FOLDER / "measure.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_chunks_take_a_fraction_of_the_memory(measure, tmp_path):
    settings = measure.Settings(tokens=2048, vocabulary=500, width=4, repeats=1, output=tmp_path)
    found = measure.main(settings)
    assert found["all logits at once"]["peak_bytes"] > 4 * found["in chunks"]["peak_bytes"]
    assert json.loads((tmp_path / "results.json").read_text())["results"] == found
    assert "times less memory" in (tmp_path / "results.md").read_text()


def test_what_is_recorded_is_of_the_promised_size_and_fraction():
    recorded = json.loads((FOLDER / "results.json").read_text())
    sizes = recorded["settings"]
    assert (sizes["tokens"], sizes["vocabulary"], sizes["width"]) == (4096, 32100, 128)
    plain, chunks = (row["peak_bytes"] for row in recorded["results"].values())
    assert plain >= 4 * chunks
