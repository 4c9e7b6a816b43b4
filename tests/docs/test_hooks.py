import importlib.util
import os
import re
import subprocess
import sys

import pytest


def test_every_relative_link_leads_to_a_file_and_every_anchor_to_a_heading(hooks):
    texts = {page: (hooks.ROOT / page).read_text() for page in hooks.markdown_files()}
    dead = []
    n_links = 0
    for page, text in texts.items():
        for link, anchor in hooks.links(text):
            n_links += 1
            target = hooks.resolved(page, link)
            known = hooks.anchors(texts[target]) if anchor and target in texts else {anchor}
            if not (hooks.ROOT / target).is_file() or anchor not in known:
                dead.append(f"{page}: {link}#{anchor}")
    assert n_links > 50
    assert not dead


def test_links_in_code_are_not_links(hooks):
    text = "[a](x.md) and [b](y.md#part)\n\n```python\n[c](z.md)\n```\n\n[d](#here), [e](https://f.g)\n"
    assert list(hooks.links(text)) == [("x.md", ""), ("y.md", "part"), ("", "here")]


@pytest.mark.parametrize(
    ("heading", "expected"),
    [
        ("The state", "the-state"),
        (
            "Long Range Arena in an hour: `easy` lists, first",
            "long-range-arena-in-an-hour-easy-lists-first",
        ),
        ("[Unreleased](x.md)", "unreleased"),
    ],
)
def test_headings_are_linked_to_as_on_code_hosts(hooks, heading, expected):
    assert hooks.anchor(heading) == expected


def test_headings_that_repeat_are_numbered(hooks):
    assert hooks.anchors("# A\n\n## B\n\n## B\n") == {"a", "b", "b-1"}


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("docs/guides/ops.md", "guides/ops.md"),
        ("README.md", "README.md"),
        ("benchmarks/attention/attention.png", "benchmarks/attention/attention.png"),
        ("src/leap/ops/softmax.py", "src/leap/ops/softmax.py.md"),
    ],
)
def test_every_file_has_one_place_on_the_site(hooks, path, expected):
    assert hooks.place(path) == expected


def test_a_notebook_is_shown_as_its_text_and_code(hooks):
    page = hooks.shown("examples/language_model.ipynb")
    assert page.startswith("# A language model with LEAP")
    assert "```python\nSMALL = True" in page


def test_the_reference_lists_every_public_name_once(hooks):
    import leap.layers
    import leap.models
    import leap.ops

    for package in (leap.ops, leap.layers, leap.models):
        found = hooks.exported(package.__name__)
        names = [name for names in found.values() for name in names]
        assert sorted(names) == sorted(package.__all__)


def test_the_site_builds_without_a_warning(hooks, tmp_path):
    for module in ("mkdocs", "material", "mkdocstrings_handlers"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed: pip install -c constraints.txt '.[docs]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(tmp_path)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        command, cwd=hooks.ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "causal_linear_attention" in (tmp_path / "reference" / "ops.html").read_text()
    assert (tmp_path / "benchmarks" / "readme" / "cost.png").exists()


def test_every_attention_has_its_paper(hooks):
    from leap.models import ATTENTIONS

    page = (hooks.ROOT / "docs" / "papers.md").read_text()
    own = {"leapformer", "leap"}  # Each has a section there.
    assert not [name for name in ATTENTIONS if name not in own and f"`{name}`" not in page]


def test_the_formulas_of_both_papers_are_two_clicks_from_the_readme(hooks):
    clicks = {
        hooks.resolved("README.md", link) for link, _ in hooks.links(_text(hooks, "README.md"))
    }
    assert "docs/papers.md" in clicks
    page = "docs/papers.md"
    further = {hooks.resolved(page, link) for link, _ in hooks.links(_text(hooks, page))}
    formulas = ("layers/leapformer", "layers/proportion", "ops/features", "layers/additive")
    assert {f"src/leap/{name}.py" for name in formulas} <= further


def test_the_citation_has_the_version_of_the_package(hooks):
    import tomllib

    project = tomllib.loads(_text(hooks, "pyproject.toml"))["project"]
    assert f"\nversion: {project['version']}\n" in _text(hooks, "CITATION.cff")


def _text(hooks, path):
    return (hooks.ROOT / path).read_text()


@pytest.mark.parametrize("page", ["docs/read-the-code.md", "docs/papers.md"])
def test_names_said_to_be_in_a_file_are_there(hooks, page):
    named = re.findall(r"`(\w+)`\s+in\s+\[[^\]]+\]\(([^)#]+)\)", _text(hooks, page))
    assert named
    for name, link in named:
        code = _text(hooks, hooks.resolved(page, link))
        assert re.search(rf"^(?:def|class) {name}\b|^{name}\b.* = ", code, re.MULTILINE), (
            name,
            link,
        )
