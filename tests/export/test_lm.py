"""What `leap export` refuses; what it makes is tested with the runtime that runs it."""

import json

import pytest

from leap.errors import ConfigError, FileError, LeapError
from leap.export.command import export
from leap.export.files import ExportConfig, check_agrees, fresh_folder


def test_a_graph_that_disagrees_is_refused(tmp_path):
    check_agrees(1e-5, tmp_path)
    for difference in (2e-3, float("nan")):
        with pytest.raises(LeapError, match="nothing was exported"):
            check_agrees(difference, tmp_path)


def test_an_export_that_fails_leaves_what_was_there(tmp_path):
    output = tmp_path / "out"
    output.mkdir()
    (output / "manifest.json").write_text("{}")
    with pytest.raises(LeapError), fresh_folder(output) as folder:
        (folder / "new").write_text("")
        raise LeapError("no")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert json.loads((output / "manifest.json").read_text()) == {}


def test_a_folder_with_something_else_is_not_replaced(tmp_path):
    (tmp_path / "thesis.txt").write_text("")
    with pytest.raises(ConfigError, match="holds something else"):
        ExportConfig(run=tmp_path, output=tmp_path)
    with pytest.raises(ConfigError, match="is a file"):
        ExportConfig(run=tmp_path, output=tmp_path / "thesis.txt")


def test_a_run_that_is_not_there_is_told(tmp_path):
    with pytest.raises(FileError, match="no run folder at"):
        export(ExportConfig(run=tmp_path / "none", output=tmp_path / "out"))
