"""What a notebook in the repository may hold; that it runs is checked by nbmake."""

import re
from pathlib import Path

import nbformat
import pytest

NOTEBOOKS = sorted((Path(__file__).parents[2] / "examples").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_is_small_by_default_and_holds_nothing_of_a_machine(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert "SMALL = True" in cells[0].source
    assert not any(cell.outputs or cell.execution_count for cell in cells)
    assert not re.search(r"/(home|root|work|Users|tmp)/", path.read_text())
