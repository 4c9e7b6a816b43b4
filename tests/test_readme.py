import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: f"line-{line_of(block)}")
def test_code_runs(block):
    lines = "\n" * (line_of(block) - 1)  # Errors then point into the README.
    exec(compile(lines + block, ROOT / "README.md", "exec"), {"__name__": "readme"})


def line_of(block):
    return README[: README.index(block)].count("\n") + 1


def test_the_first_screen_has_code():
    assert line_of(BLOCKS[0]) < 40


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "docs/decisions/README.md"])
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\((?!https?:)([^)#]+)", (ROOT / page).read_text())
    assert links or page == "CONTRIBUTING.md"
    missing = [link for link in links if not ((ROOT / page).parent / link).exists()]
    assert not missing


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_make_targets_that_are_named_exist(page):
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    text = (ROOT / page).read_text()
    named = set(re.findall(r"(?:^    |`)make (?:[A-Z]+=\S+ )*([a-z]+)", text, re.MULTILINE))
    assert named and named <= targets
