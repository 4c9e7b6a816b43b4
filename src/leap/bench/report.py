"""Results as tables, a JSON file, a Markdown file and a plot, the same for every bench.

A bench gives numbers by name and number of tokens, and puts them on a `Page`.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from leap.errors import FileError
from leap.training.table import markdown_table

MIB = 2**20

# The palette of Okabe and Ito, which colour-blind readers can tell apart.
COLOURS = {
    "softmax": "#000000",
    "leapformer": "#d55e00",
    "cosformer": "#009e73",
    "linear": "#56b4e9",
    "leap": "#0072b2",
}
OTHER_COLOURS = ("#cc79a7", "#e69f00", "#f0e442")
WINDOW_MARKERS = "v^<>sDPX"
VARIANT_LINES = ("--", ":", "-.")

Numbers = Mapping[tuple[str, int], float]
"""What was measured, by the name of a mechanism or model and a number of tokens."""


@dataclass(frozen=True)
class Table:
    """Numbers as they are to be read."""

    title: str
    columns: list[str]
    rows: list[list[str]]


@dataclass(frozen=True, kw_only=True)
class Page:
    """A bench's report as it is shown and written."""

    name: str
    """What was measured, in one word: the name of the plot's file."""
    report: Any
    """The dataclass that holds everything."""
    description: str
    tables: list[Table]
    figure: Figure


def digits(x: float) -> str:
    """Two or three digits that count, without an exponent."""
    if x >= 10:
        return f"{x:.0f}"
    return f"{x:.2f}" if x < 1 else f"{x:.1f}"


def times(x: float) -> str:
    """A factor."""
    return f"{digits(x)}x"


def tabulate(
    title: str, numbers: Numbers, show: Callable[[float], str] = digits, *, growth: bool = False
) -> Table:
    """A row for each name and a column for each number of tokens, and one for growth if wanted."""
    names, lengths = _axes_of(numbers)
    columns = ["tokens", *(str(length) for length in lengths)]
    rows = [[name, *(show(numbers[name, length]) for length in lengths)] for name in names]
    if growth and len(lengths) > 1:
        columns.append("growth")
        for row in rows:
            before, last = (numbers[row[0], length] for length in lengths[-2:])
            row.append(_growth(last / before, lengths[-1] / lengths[-2]) if before else "")
    return Table(title, columns, rows)


def _axes_of(numbers: Numbers) -> tuple[list[str], list[int]]:
    return list(dict.fromkeys(name for name, _ in numbers)), sorted({n for _, n in numbers})


def _growth(ratio: float, longer: float) -> str:
    """The exponent e of t^e, between the two longest lengths: 1 is linear, 2 quadratic."""
    return f"t^{math.log(ratio, longer):.1f}"


def where(machine: Mapping[str, str]) -> str:
    """What the time is of, in one phrase."""
    n = int(machine["threads"])
    place = machine.get("gpu") or f"{n} thread{'s' * (n > 1)} of {machine['processor']}"
    return f"{machine['clock']} on {place}, torch {machine['torch']}"


def markdown(page: Page) -> str:
    """The tables in Markdown, with what they were measured on."""
    parts = [page.description]
    for table in page.tables:
        parts += [f"**{table.title}**", markdown_table(table.columns, table.rows)]
    return "\n\n".join(parts) + "\n"


def make_folder(folder: Path) -> None:
    """Make the folder that results go to, so that a wrong one shows before the work is done."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileError(
            f"cannot write to {folder} ({error.strerror}); give another folder as output"
        ) from error


def write(page: Page, folder: Path) -> list[Path]:
    """Write results.json, results.md and the plot, and tell where they are."""
    make_folder(folder)
    paths = [folder / name for name in ("results.json", "results.md", f"{page.name}.png")]
    paths[0].write_text(json.dumps(asdict(page.report), indent=1, default=str) + "\n")
    paths[1].write_text(markdown(page))
    page.figure.savefig(paths[2], dpi=150)
    return paths


def draw(axes: Axes, numbers: Numbers) -> None:
    """A line for each name against the number of tokens, log-log."""
    names, lengths = _axes_of(numbers)
    styles = _styles(names)
    for name in names:
        points = [(n, number) for (named, n), number in numbers.items() if named == name]
        axes.plot(*zip(*points, strict=True), label=name, markersize=5, **styles[name])
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(lengths)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda length, _: f"{length:.0f}"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def add_legend(figure: Figure) -> None:
    """Name the lines of all the plots of a figure, once."""
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", frameon=False)


def _styles(names: list[str]) -> dict[str, dict[str, Any]]:
    """A colour for each mechanism, a line for each variant of it, a marker for each window."""
    others, markers = iter(OTHER_COLOURS * len(names)), iter(WINDOW_MARKERS * len(names))
    colours = dict(COLOURS)
    lines: dict[str, Iterator[str]] = {}
    styles = {}
    for name in names:
        base, _, variant = name.partition("-")
        colour = colours.setdefault(base, next(others) if base not in colours else "")
        is_window = variant.startswith("w")
        variants = lines.setdefault(base, cycle(VARIANT_LINES))
        styles[name] = {
            "color": colour,
            "marker": next(markers) if is_window else "o",
            "linestyle": ":" if is_window else next(variants) if variant else "-",
        }
    return styles
