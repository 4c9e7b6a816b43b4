"""What `make gpu-check` does, on a machine that has no GPU and on one that only seems to."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "gpu" / "check.py"


@pytest.fixture
def check(monkeypatch):
    spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # Where dataclasses look for names.
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def gpu(monkeypatch):
    """A GPU by its name alone."""
    found = SimpleNamespace(name="Abacus 1", total_memory=2**34)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda n: found)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_one_line_says_so(tmp_path):
    command = [sys.executable, str(SCRIPT)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.count("\n")) == (1, 1)
    assert "no GPU here" in done.stdout and not list(tmp_path.iterdir())


def test_benches_follow_the_tests_and_all_is_in_the_report(check, gpu, tmp_path):
    ran = []

    def run(command, environment, log):
        ran.append(command)
        assert environment["TRITON_INTERPRET"] == "0"
        log.write_text("12 passed in 3 s\n")
        if "--output" in command:
            folder = Path(command[command.index("--output") + 1])
            folder.mkdir()
            (folder / "results.md").write_text(f"tables of {folder.name}")
        return 0

    assert check.main(tmp_path / "report.md", run) == 0
    assert "pytest" in ran[0] and all("--device" in command for command in ran[1:])
    for test in check.TESTS:
        assert test in ran[0] and (ROOT / test).exists()
    said = (tmp_path / "report.md").read_text()
    assert "Abacus 1, 16 GiB" in said and "12 passed" in said
    for name in ("attention-bfloat16", "attention-float32", "train", "decode"):
        assert f"tables of bench-{name}" in said


def test_nothing_is_measured_where_a_test_fails(check, gpu, tmp_path):
    ran = []

    def run(command, environment, log):
        ran.append(command)
        log.write_text("1 failed\n")
        return 1

    assert check.main(tmp_path / "report.md", run) == 1
    said = (tmp_path / "report.md").read_text()
    assert len(ran) == 1 and "1 failed" in said and "Nothing was measured" in said


def test_the_commands_are_ones_that_there_are(check, tmp_path):
    from leap.bench.attention import BenchConfig
    from leap.bench.decode import DecodeConfig
    from leap.bench.train import TrainBenchConfig

    fields = {"attention": BenchConfig, "decode": DecodeConfig, "train": TrainBenchConfig}
    for step in check.steps(tmp_path)[1:]:
        options = [word[2:] for word in step.command if word.startswith("--")]
        assert set(options) <= set(fields[step.command[3]].__dataclass_fields__)
