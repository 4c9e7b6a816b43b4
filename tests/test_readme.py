import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [
    "README.md",
    "docs/guides/lm.md",
    "docs/guides/lra.md",
    "docs/guides/ops.md",
    "docs/guides/places.md",
    "docs/guides/simul.md",
]


def blocks(page):
    """The Python of a page, each piece with its first line."""
    text = (ROOT / page).read_text()
    found = re.finditer(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return [(page, text[: match.start(1)].count("\n") + 1, match[1]) for match in found]


@pytest.mark.parametrize(
    ("page", "line", "code"),
    [block for page in PAGES for block in blocks(page)],
    ids=lambda value: str(value) if not str(value).endswith("\n") else "",
)
def test_code_runs(page, line, code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shifted = "\n" * (line - 1) + code  # Errors then point into the page.
    exec(compile(shifted, ROOT / page, "exec"), {"__name__": "page"})


def test_the_first_screen_has_code():
    _, line, _ = blocks("README.md")[0]
    assert line < 40


def test_every_table_of_the_readme_says_what_to_conclude():
    tables = re.findall(r"^(?:\|.*\n)+\n(.*)", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert tables
    assert [after for after in tables if not after.startswith("**What to conclude:**")] == []


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_make_targets_that_are_named_exist(page):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    text = (ROOT / page).read_text()
    named = set(re.findall(r"(?:^    |`)make (?:[A-Z]+=\S+ )*([a-z-]+)", text, re.MULTILINE))
    assert named and named <= targets


def test_extras_are_named_and_installed_from_this_folder():
    text = (ROOT / "README.md").read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for extra in project["optional-dependencies"]:
        assert f"'.[{extra}]'" in text
    for page in (*PAGES, "CONTRIBUTING.md", "examples/language_model.ipynb"):
        assert "leapformer[" not in (ROOT / page).read_text()  # No index has it yet.
