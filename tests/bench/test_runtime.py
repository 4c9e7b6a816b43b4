import json
import subprocess
import sys

import pytest

from leap.bench.runtime import RUNTIMES, RuntimeConfig
from leap.errors import ConfigError


def test_every_runtime_is_measured_beside_gpt2(tmp_path):
    for name in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(name, reason=f"exporting needs {name}")
    # A process of its own, as shape checks stop tracing.
    given = ["--models", "leapformer", "gpt2", "--preset", "tiny", "--context", "40"]
    given += ["--starts", "1", "--repeats", "1", "--output", str(tmp_path)]
    command = [sys.executable, "-m", "leap.cli", "bench", "runtime", *given]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    results = json.loads((tmp_path / "results.json").read_text())["results"]
    assert [(r["model"], r["runtime"]) for r in results] == [
        (model, runtime) for model in ("leapformer", "gpt2") for runtime in RUNTIMES
    ]
    for result in results:
        assert result["seconds"] > 0 and result["start_seconds"] > 0
        assert result["error"] < (0.3 if "int8" in result["runtime"] else 1e-3)
    starts = {(r["model"], r["runtime"]): r["start_bytes"] for r in results}
    assert starts["leapformer", "onnxruntime"] < starts["leapformer", "torch"] / 2
    assert "speed-up over GPT-2 on the same runtime" in done.stdout
    assert (tmp_path / "runtime.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"models": ("gpt3",)}, "no model is called 'gpt3'"),
        ({"models": ()}, "nothing to measure"),
        ({"context": 0}, "context=0 must be at least 1"),
        ({"starts": 0}, "starts=0 must be at least 1"),
        ({"preset": "huge"}, "huge"),
    ],
    ids=str,
)
def test_a_setting_that_cannot_work_is_told(settings, message):
    with pytest.raises(ConfigError, match=message):
        RuntimeConfig(**settings)
