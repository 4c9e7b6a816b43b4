"""Promises of the files of a report."""

import json

import pytest
from matplotlib.figure import Figure

from leap.errors import FileError
from leap.reports.files import write_report


def test_every_kind_of_content_becomes_a_file(tmp_path):
    files = {"a.json": {"x": tmp_path}, "b.md": "text", "c.bin": b"bytes", "d.png": Figure()}
    paths = write_report(tmp_path / "new" / "folder", files)
    assert paths == [tmp_path / "new" / "folder" / name for name in files]
    assert json.loads(paths[0].read_text()) == {"x": str(tmp_path)}
    assert (paths[1].read_text(), paths[2].read_bytes()) == ("text", b"bytes")
    assert paths[3].read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("files", [{}, {"a.md": "text"}], ids=["ahead", "later"])
def test_a_folder_that_cannot_be_made_is_named(tmp_path, files):
    taken = tmp_path / "taken"
    taken.write_text("")
    with pytest.raises(FileError, match=f"cannot write to {taken} .*; give another output folder"):
        write_report(taken, files)
