"""A step for ExecuTorch does as the model does; its package is not part of `make setup`."""

import importlib.util
import json
import sys

import pytest

from leap.errors import ConfigError, FileError
from leap.export.command import export
from leap.export.files import TOLERANCE, ExportConfig
from leap.runtime.writer import Writer

needs_executorch = pytest.mark.skipif(
    importlib.util.find_spec("executorch") is None,
    reason="executorch is not installed: pip install -c constraints.txt '.[executorch]'",
)


@needs_executorch
@pytest.mark.parametrize(
    "settings",
    [
        {"n_layer": 2},
        {"attention": "leap", "n_layer": 2, "window_sizes": [4, None]},
        {"gate": "channel", "n_layer": 2},
    ],
)
def test_a_step_does_as_the_model_does(save_lm, leap, text_file, tmp_path, settings):
    save_lm(tmp_path / "model", **settings)
    output = tmp_path / "out"
    done = leap(
        *("export", "--run", tmp_path / "model", "--output", output),
        *("--data", text_file, "--to", "executorch"),
    )
    difference = float(done.stdout.split("largest difference from torch ")[1].split()[0])
    assert difference < TOLERANCE
    manifest = json.loads((output / "manifest.json").read_text())
    assert manifest["runtime"] == "executorch" and manifest["at_once"] == 1
    assert {path.name for path in output.iterdir()} == {
        *("step.pte", "manifest.json", "tokenizer.json", "README.md")
    }
    with pytest.raises(FileError, match="was exported for executorch, which runs it"):
        Writer(output)


@needs_executorch
def test_a_state_that_grows_is_refused(save_lm, leap, text_file, tmp_path):
    save_lm(tmp_path / "model", attention="softmax", n_layer=1)
    done = leap(
        *("export", "--run", tmp_path / "model", "--output", tmp_path / "out"),
        *("--data", text_file, "--to", "executorch"),
        check=False,
    )
    assert done.returncode == 1 and "whose state grows with each token" in done.stderr
    assert not (tmp_path / "out").exists()


def test_without_the_package_it_says_how_to_install_it(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "executorch", None)
    with pytest.raises(ConfigError, match=r"exporting to executorch needs .*\[executorch\]"):
        export(ExportConfig(run=tmp_path, output=tmp_path / "out", to="executorch"))


def test_what_it_does_not_take_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="int8 is for onnx"):
        ExportConfig(run=tmp_path, output=tmp_path / "out", to="executorch", int8=True)
    (tmp_path / "config.json").write_text('{"model_type": "leapformer-seq2seq"}')
    with pytest.raises(ConfigError, match="translates; --to executorch takes language models"):
        export(ExportConfig(run=tmp_path, output=tmp_path / "out", to="executorch"))
