"""What the documentation site adds to docs/: pages from elsewhere, the reference, and links.

Every page of the site is a file of the repository, or is made from one while the site is built.
Links in the files lead from file to file, as a code host follows them. Here each becomes a link
from page to page:

    docs/guides/ops.md            guides/ops.md
    README.md, benchmarks/...     the same path
    examples/..., src/...         the same path and .md: a page that shows the file
    __all__ of leap.ops, ...      reference/ops.md, ..., by mkdocstrings

MkDocs calls the functions that begin with `on_`.
"""

import ast
import json
import posixpath
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SHOWN = {".py": "python", ".toml": "toml", ".cff": "yaml", ".json": "json", "": "make", ".h": "cpp"}
"""Files that are shown as code, by suffix, with the language they are coloured as."""
REFERENCE: dict[str, dict[str, list[str]]] = {
    "ops": {"leap.ops": [], "leap.ops.features": ["feature_map", "proportional", "positional"]},
    "layers": {"leap.layers": [], "leap.layers.efficient": []},
    "models": {"leap.models": []},
    "explain": {
        "leap.explain": [],
        "leap.explain.faithfulness": ["measure", "Case", "Curves", "Faithfulness"],
        "leap.explain.places": ["places", "places_table", "Places"],
    },
    "tasks": {
        "leap.tasks.lm.train": ["train", "TrainConfig"],
        "leap.tasks.lm.evaluate": ["evaluate", "score", "EvalConfig", "Score"],
        "leap.tasks.lm.writing": ["generate", "GenerateConfig"],
        "leap.tasks.lm.compare": ["compare", "CompareConfig"],
        "leap.tasks.lra.prepare": ["prepare", "PrepareConfig"],
        "leap.tasks.lra.train": ["train", "TrainConfig"],
        "leap.tasks.lra.report": ["report", "ReportConfig"],
        "leap.tasks.simul.prepare": ["prepare", "PrepareConfig"],
        "leap.tasks.simul.train": ["train", "TrainConfig"],
        "leap.tasks.simul.evaluate": ["evaluate", "EvalConfig"],
        "leap.tasks.simul.streaming.stream": [
            "load_trained",
            "Interpreter",
        ],
    },
    "runtime": {
        "leap.runtime.writer": ["Writer", "Past", "Generated"],
        "leap.runtime.streaming.stream": ["Interpreter", "Stream", "StreamPool"],
        "leap.runtime.manifest": ["Manifest", "StateTensor", "GraphFile"],
    },
}
"""Pages of the reference: modules, and the names of each; of none, those of its `__all__`."""
FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"(?<=\]\()(?!https?:|mailto:)([^)#\s]*)(#[^)\s]*)?(?=\))")
HEADING = re.compile(r"^#{1,6} +(.+?) *$", re.MULTILINE)


def markdown_files() -> list[str]:
    """Every Markdown file of the repository, by its path there."""
    folders = (
        ROOT.glob("*.md"),
        (ROOT / "docs").rglob("*.md"),
        (ROOT / "benchmarks").rglob("*.md"),
    )
    return sorted(path.relative_to(ROOT).as_posix() for found in folders for path in found)


def links(text: str) -> Iterator[tuple[str, str]]:
    """The relative links of a Markdown text that are not in code: each path, and its anchor."""
    for match in LINK.finditer(FENCE.sub("", text)):
        yield match[1], (match[2] or "").removeprefix("#")


def resolved(page: str, link: str) -> str:
    """Which file a link of a page leads to, by its path in the repository."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), link)) if link else page


def anchor(heading: str, separator: str = "-") -> str:
    """What a heading is linked to by, the same on the site and on code hosts."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    return re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", separator)


def anchors(text: str) -> set[str]:
    """What can be linked to within a Markdown text; of headings that repeat, all but the first."""
    found: dict[str, int] = {}
    for heading in HEADING.findall(FENCE.sub("", text)):
        name = anchor(heading)
        found[name] = found.get(name, -1) + 1
    return {
        name if not n else f"{name}-{n}" for name, last in found.items() for n in range(last + 1)
    }


def place(path: str) -> str:
    """Where on the site a file of the repository is."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return path if path.endswith((".md", ".png")) else f"{path}.md"


def shown(path: str) -> str:
    """A page that shows a file of the repository."""
    file = ROOT / path
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".ipynb":
        cells = [(cell["cell_type"], "".join(cell["source"])) for cell in json.loads(text)["cells"]]
        return "\n\n".join(
            f"```python\n{source}\n```" if kind == "code" else source for kind, source in cells
        )
    return f"# {file.name}\n\n`{path}`\n\n```{SHOWN[file.suffix]}\n{text}```\n"


def reference(page: str) -> str:
    """A page of the reference: what each module says of itself, then its public names."""
    parts = [f"# leap.{page}"]
    for module, listed in REFERENCE[page].items():
        groups = {module: listed} if listed else exported(module)
        for source, names in groups.items():
            # The module of the page's own name has that heading already.
            heading = f"show_root_heading: {str(source != f'leap.{page}').lower()}"
            parts.append(f"::: {source}\n    options:\n      members: false\n      {heading}")
            parts += [
                f"::: {module}.{name}\n    options:\n      heading_level: 3\n"
                # Settings of a task are those of its model and recipe besides its own.
                f"      inherited_members: {str(page == 'tasks').lower()}\n"
                "      show_root_full_path: false"
                for name in names
            ]
    return "\n\n".join(parts)


def exported(package: str) -> dict[str, list[str]]:
    """The `__all__` of a package by the modules that define the names; its own come first."""
    path = ROOT / "src" / package.replace(".", "/") / "__init__.py"
    body = ast.parse(path.read_text(encoding="utf-8")).body
    public: set[str] = set()
    for node in body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            public |= set(ast.literal_eval(node.value))
    found: dict[str, list[str]] = {package: []}
    for node in body:
        if isinstance(node, ast.ImportFrom) and node.module:
            names = sorted(public & {alias.name for alias in node.names}, key=_functions_first)
            if names:
                found[node.module] = names
                public -= set(names)
    found[package] = sorted(public, key=_functions_first)
    return found


def _functions_first(name: str) -> tuple[bool, str]:
    return not name.islower(), name


def on_config(config: Any) -> Any:
    """Have headings linked to as code hosts do, and every page of a folder in its section."""
    config.mdx_configs.setdefault("toc", {})["slugify"] = anchor
    _complete(config.nav)
    return config


def _complete(nav: list[Any]) -> None:
    """Add pages that the navigation does not name to the section whose index is in their folder."""
    for item in nav:
        section = next(iter(item.values())) if isinstance(item, dict) else None
        if not isinstance(section, list):
            continue
        _complete(section)
        if isinstance(section[0], str):
            folder = posixpath.dirname(section[0])
            named = {page for entry in section[1:] for page in entry.values()}
            pages = [place(path) for path in markdown_files()]
            section += [
                {posixpath.basename(posixpath.dirname(page)): page} if "results" in page else page
                for page in pages
                if page.startswith(f"{folder}/") and page not in {section[0], *named}
            ]


def on_files(files: Any, config: Any) -> Any:
    """Add what does not lie in docs/."""
    from mkdocs.structure.files import File, InclusionLevel

    pages = markdown_files()
    examples = [path.relative_to(ROOT).as_posix() for path in (ROOT / "examples").glob("*.*y*")]
    linked = {
        resolved(page, link)
        for page in pages
        for link, _ in links((ROOT / page).read_text(encoding="utf-8"))
    }
    for path in sorted({*pages, *examples, *linked}):
        if files.get_file_from_path(place(path)) is not None:
            continue
        if path.endswith((".md", ".png")):
            options: dict[str, Any] = {"abs_src_path": str(ROOT / path)}
        else:
            options = {"content": shown(path), "inclusion": InclusionLevel.NOT_IN_NAV}
        files.append(File.generated(config, place(path), **options))
    for page in REFERENCE:
        files.append(File.generated(config, f"reference/{page}.md", content=reference(page)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Turn links from file to file into links from page to page."""
    uri = page.file.src_uri
    path = f"docs/{uri}" if (ROOT / "docs" / uri).exists() else uri

    def turned(match: re.Match[str]) -> str:
        if not match[1]:
            return match[0]
        target = place(resolved(path, match[1]))
        return posixpath.relpath(target, posixpath.dirname(uri) or ".") + (match[2] or "")

    ends = [0, *(end for fence in FENCE.finditer(markdown) for end in fence.span()), len(markdown)]
    parts = [markdown[a:b] for a, b in pairwise(ends)]
    return "".join(part if i % 2 else LINK.sub(turned, part) for i, part in enumerate(parts))
