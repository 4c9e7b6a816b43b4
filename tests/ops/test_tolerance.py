"""The table of tolerances that users read is the one that tests use."""

import re
from pathlib import Path

import torch

from leap.ops.tolerance import TOLERANCES, Tolerance

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "ops.md"


def test_the_published_table_is_the_one_in_use():
    rows = re.findall(r"^\| (\w*float\w*) \| (\S+) \| (\S+) \|$", GUIDE.read_text(), re.MULTILINE)
    published = {
        getattr(torch, name): Tolerance(float(output), float(gradient))
        for name, output, gradient in rows
    }
    assert published == TOLERANCES
