"""Promises of explaining a trained model."""

import json

import pytest

from leap.errors import ConfigError, FileError
from leap.tasks.lm.explain import ExplainConfig, explain, explain_text
from leap.tasks.lm.model import load_model
from leap.tasks.lm.tokenizer import END

TEXT = "Björn bado.\nBjörn kale"


def test_the_pieces_are_the_text(trained):
    explained = explain_text(*load_model(trained), TEXT)
    assert explained.pieces[0] == END
    assert "".join(explained.pieces[1:]) == TEXT
    assert explained.found.weights.shape[-1] == len(explained.pieces)


def test_page_picture_and_numbers_are_written(trained, tmp_path):
    config = ExplainConfig(run=trained, prompt=TEXT, token=3, output=tmp_path / "new" / "folder")
    explained = explain(config)
    assert {path.name for path in config.output.iterdir()} == {
        "explain.html", "explain.png", "explain.json"
    }  # fmt: skip
    numbers = json.loads((config.output / "explain.json").read_text())
    assert numbers["token"] == 3 and numbers["pieces"] == explained.pieces
    assert [layer["name"] for layer in numbers["layers"]] == ["leap, window of 4", "leapformer"]
    for layer in numbers["layers"]:
        for head in layer["heads"]:
            assert sum(head) == pytest.approx(1, abs=1e-5)
            assert not any(head[4:])


def test_bad_input_is_named(trained, tmp_path):
    with pytest.raises(ConfigError, match="prompt is empty"):
        ExplainConfig(run=trained, prompt="")
    (tmp_path / "file").write_text("")
    config = ExplainConfig(run=trained, prompt=TEXT, output=tmp_path / "file")
    with pytest.raises(FileError, match=f"cannot write to {config.output}"):
        explain(config)
