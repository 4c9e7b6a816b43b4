"""A bench's results as tables, a JSON file, a Markdown file and a plot."""

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from leap.bench.attention import PASSES, Passes, Report, Result
from leap.errors import FileError

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


@dataclass(frozen=True)
class Table:
    """Numbers by mechanism and length, as they are to be read."""

    title: str
    columns: list[str]
    rows: list[list[str]]


def tables(report: Report) -> list[Table]:
    """Speed, time and memory of each pass, the pass that training takes first."""
    return [table for passes in reversed(PASSES) for table in _tables_of(report, passes)]


def _tables_of(report: Report, passes: Passes) -> Iterator[Table]:
    results = [r for r in report.results if r.passes == passes]
    compared = [r for r in results if r.mechanism != r.baseline]
    if compared:
        yield _table(
            f"{passes}: how many times as fast as scaled_dot_product_attention",
            compared,
            lambda r: f"{_digits(r.speed)}x",
        )
    yield _table(
        f"{passes}: milliseconds of {report.machine['clock']}",
        results,
        lambda r: _digits(1e3 * r.seconds),
        growing=lambda r: r.seconds,
    )
    yield _table(
        f"{passes}: peak memory besides the inputs, MiB",
        results,
        lambda r: _digits(r.peak_bytes / MIB),
        growing=lambda r: r.peak_bytes,
    )


def _table(
    title: str,
    results: list[Result],
    cell: Callable[[Result], str],
    growing: Callable[[Result], float] | None = None,
) -> Table:
    lengths = sorted({r.length for r in results})
    names = list(dict.fromkeys(r.mechanism for r in results))
    by_case = {(r.mechanism, r.length): r for r in results}
    columns = ["tokens", *(str(length) for length in lengths)]
    rows = [[name, *(cell(by_case[name, length]) for length in lengths)] for name in names]
    if growing and len(lengths) > 1:
        columns.append("growth")
        for row in rows:
            before, last = (growing(by_case[row[0], length]) for length in lengths[-2:])
            row.append(_growth(last / before, lengths[-1] / lengths[-2]) if before else "")
    return Table(title, columns, rows)


def _growth(ratio: float, longer: float) -> str:
    """The exponent e of t^e, between the two longest lengths: 1 is linear, 2 quadratic."""
    return f"t^{math.log(ratio, longer):.1f}"


def _digits(x: float) -> str:
    """Two or three digits that count, without an exponent."""
    if x >= 10:
        return f"{x:.0f}"
    return f"{x:.2f}" if x < 1 else f"{x:.1f}"


def markdown(report: Report) -> str:
    """The tables in Markdown, with what they were measured on."""
    parts = [describe(report)]
    for table in tables(report):
        ruler = ["---", *("--:" for _ in table.columns[1:])]
        lines = [table.columns, ruler, *table.rows]
        parts.append(f"**{table.title}**")
        parts.append("\n".join("| " + " | ".join(line) + " |" for line in lines))
    return "\n\n".join(parts) + "\n"


def describe(report: Report) -> str:
    """One sentence on the settings and the machine."""
    config, machine = report.config, report.machine
    n = config.threads
    where = machine.get("gpu") or f"{n} thread{'s' * (n > 1)} of {machine['processor']}"
    return (
        f"Batch {config.batch}, {config.heads} heads of {config.width}, {config.dtype}; "
        f"{machine['clock']} on {where}, torch {machine['torch']}."
    )


def make_folder(folder: Path) -> None:
    """Make the folder that results go to, so that a wrong one shows before the work is done."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileError(
            f"cannot write to {folder} ({error.strerror}); give another folder as output"
        ) from error


def write(report: Report, folder: Path) -> list[Path]:
    """Write results.json, results.md and attention.png, and tell where they are."""
    make_folder(folder)
    paths = [folder / name for name in ("results.json", "results.md", "attention.png")]
    paths[0].write_text(json.dumps(asdict(report), indent=1, default=str) + "\n")
    paths[1].write_text(markdown(report))
    plot(report).savefig(paths[2], dpi=150)
    return paths


def plot(report: Report) -> Figure:
    """Time and memory against length, log-log: a straight line's slope is its growth."""
    figure = Figure(figsize=(12, 8), layout="constrained")
    axes = figure.subplots(2, len(PASSES), sharex=True, sharey="row")
    for column, passes in enumerate(PASSES):
        results = [r for r in report.results if r.passes == passes]
        _draw(axes[0, column], results, lambda r: 1e3 * r.seconds)
        _draw(axes[1, column], results, lambda r: r.peak_bytes / MIB)
        axes[0, column].set_title(passes)
        axes[1, column].set_xlabel("length (tokens)")
    axes[0, 0].set_ylabel(f"{report.machine['clock']} (ms)")
    axes[1, 0].set_ylabel("peak memory besides the inputs (MiB)")
    figure.suptitle(f"Attention against length\n{describe(report)}", fontsize=11)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", frameon=False)
    return figure


def _draw(axes: Axes, results: list[Result], number: Callable[[Result], float]) -> None:
    lengths = sorted({r.length for r in results})
    names = list(dict.fromkeys(r.mechanism for r in results))
    styles = _styles(names)
    for name in names:
        points = [(r.length, number(r)) for r in results if r.mechanism == name]
        axes.plot(*zip(*points, strict=True), label=name, markersize=5, **styles[name])
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(lengths)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda length, _: f"{length:.0f}"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def _styles(names: list[str]) -> dict[str, dict[str, Any]]:
    """A colour for each mechanism, a marker for each window, dashes for no causality."""
    others, markers = iter(OTHER_COLOURS * len(names)), iter(WINDOW_MARKERS * len(names))
    colours = dict(COLOURS)
    styles = {}
    for name in names:
        base, _, variant = name.partition("-")
        colour = colours.setdefault(base, next(others) if base not in colours else "")
        styles[name] = {
            "color": colour,
            "marker": next(markers) if variant.startswith("w") else "o",
            "linestyle": "--" if variant == "bidirectional" else ":" if variant else "-",
        }
    return styles
