"""Every figure: panels of lines or of named dots, alike in colours, ticks, legend and grid.

A mechanism has one colour in all of them, its variants have other dashes and markers. The colours
are those of Okabe and Ito, which colour-blind readers can tell apart.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, product
from pathlib import Path
from typing import Any, Literal

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg, RendererAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Text
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator

from leap.reports.files import DPI

COLOURS = {
    "softmax": "#000000",
    "leapformer": "#d55e00",
    "cosformer": "#009e73",
    "linear": "#56b4e9",
    "leap": "#0072b2",
}
"""Of what is in many figures, by the first word of its name."""
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f", "#000000")
DASHES = ("-", "--", ":", "-.")
MARKERS = "ovsD^<P>X"
GREY = "#666666"

Number = float | int
Point = tuple[Number, Number]
Box = Sequence[float]
"""Left, lower, right and upper edge, in pixels."""
History = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Line:
    """Points that belong together."""

    label: str
    """Who it is of, which also decides over its looks."""
    points: Sequence[Point]
    spread: Sequence[Number] | None = None
    """Half the height of a bar at each point."""
    names: Sequence[str] = ()
    """What to write beside the points."""
    kind: str = ""
    """What it shows, where a label has lines of several kinds."""
    thin: bool = False
    """Whether it is drawn thin and pale, behind the others."""
    area: Number = 25
    """Of a dot, in square points."""


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One pair of axes."""

    x: str
    y: str
    lines: Sequence[Line]
    title: str = ""
    x_scale: Literal["linear", "log", "sizes"] = "linear"
    """With sizes, which are few and chosen, it is log, with a tick at each that has room."""
    y_scale: Literal["linear", "log"] = "linear"
    y_limits: tuple[Number | None, Number | None] | None = None
    levels: Mapping[str, Number] = field(default_factory=dict)
    """Level lines across, by what they stand for."""
    upright: Mapping[str, Number] = field(default_factory=dict)
    """Upright lines, by what they stand for."""


def plot(
    panels: Sequence[Panel], title: str, *, n_columns: int | None = None, shared: bool = False
) -> Figure:
    """Draw panels beside each other, with one legend for all unless dots carry their names.

    Args:
        panels: row by row.
        title: of the whole.
        n_columns: panels in a row; by default all.
        shared: whether the panels of a column have one x axis, and those of a row one y axis.
    """
    n_columns = min(n_columns or len(panels), len(panels))
    n_rows = math.ceil(len(panels) / n_columns)
    width = 7.5 if n_columns == 1 else 5.0 * n_columns
    figure = Figure(figsize=(2 + width, max(4.2 * n_rows, 4.8)), layout="constrained")
    places = figure.subplots(
        n_rows,
        n_columns,
        squeeze=False,
        sharex="col" if shared else "none",
        sharey="row" if shared else "none",
    )
    styles = line_styles([line.label for panel in panels for line in panel.lines])
    for axes, panel in zip(places.flat, panels, strict=False):
        _draw(axes, panel, styles)
        if shared:
            axes.label_outer()
    for axes in places.flat[len(panels) :]:
        axes.set_axis_off()
    for axes, panel in zip(places.flat, panels, strict=False):
        _set_ticks(axes, panel)
    figure.suptitle(title, fontsize=11)
    _add_legend(figure, panels, styles)
    _place_names(figure)
    return figure


def plot_curves(
    histories: Mapping[str, History],
    path: Path,
    title: str,
    *,
    unit: str = "nats per token",
    measure: str | None = None,
) -> None:
    """Draw what each run's loss did over its steps, in training and on held-out data.

    Args:
        histories: points of each run, as `Fitted.history` has them, by the run's name.
        path: the PNG file to write.
        title: what was trained.
        unit: of the loss.
        measure: name of what the best checkpoint was chosen by, to be drawn as well.
    """
    kinds = [("loss", "training", True), ("eval_loss", "held-out data", False)]
    losses = [
        Line(name, points, kind=kind, thin=thin)
        for key, kind, thin in kinds
        for name, history in histories.items()
        if (points := _points(history, key))
    ]
    panels = [Panel(x="step", y=f"loss ({unit})", lines=losses)]
    if measure is not None:
        scores = [Line(name, _points(rows, f"eval_{measure}")) for name, rows in histories.items()]
        panels.append(Panel(x="step", y=f"{measure} on held-out data", lines=scores))
    plot(panels, title).savefig(path, dpi=DPI)


def lines_of(numbers: Mapping[tuple[str, int], Number]) -> list[Line]:
    """A line for each name, of numbers by name and size."""
    names = dict.fromkeys(name for name, _ in numbers)
    return [
        Line(name, sorted((size, y) for (own, size), y in numbers.items() if own == name))
        for name in names
    ]


def _points(history: History, name: str) -> list[Point]:
    return [(row["step"], row[name]) for row in history if name in row]


def line_styles(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """A colour for each mechanism, and dashes and a marker for each variant of it.

    Where all are variants of one, each has a colour.
    """
    names = list(dict.fromkeys(names))
    bases = {name: re.split(r"[-: ]", name)[0] for name in names}
    if len(set(bases.values())) == 1:
        bases = {name: name for name in names}
    colours = {base: COLOURS[base] for base in bases.values() if base in COLOURS}
    free = [colour for colour in PALETTE if colour not in colours.values()] or list(PALETTE)
    free.sort(key=lambda colour: colour in COLOURS.values())  # Those of mechanisms last.
    turns = count()
    numbers: dict[str, Iterator[int]] = {}
    styles = {}
    for name, base in bases.items():
        if base not in colours:
            colours[base] = free[next(turns) % len(free)]
        n = next(numbers.setdefault(colours[base], count()))
        dashes, marker = DASHES[n % len(DASHES)], MARKERS[n % len(MARKERS)]
        styles[name] = {"color": colours[base], "linestyle": dashes, "marker": marker}
    return styles


def _draw(axes: Axes, panel: Panel, styles: Mapping[str, dict[str, Any]]) -> None:
    axes.set_axisbelow(True)
    for line in panel.lines:
        if not line.points:
            continue
        style = {**styles[line.label], "markersize": math.sqrt(line.area)}
        if line.thin:
            style |= {"marker": "", "linewidth": 0.7, "alpha": 0.45}
        elif len(line.points) == 1:
            style |= {"linestyle": "", "alpha": 0.6 if line.area > 100 else 1.0}
            style |= {"marker": "o"} if line.names else {}
        x, y = zip(*line.points, strict=True)
        axes.plot(x, y, label=line.label, **style)
        if line.spread is not None:
            axes.errorbar(x, y, line.spread, fmt="none", ecolor=style["color"], capsize=3)
        for name, point in zip(line.names, line.points, strict=False):
            look = {"fontsize": 8, "color": style["color"], "textcoords": "offset points"}
            arrow = {"arrowstyle": "-", "color": style["color"], "linewidth": 0.5}
            axes.annotate(name, point, (0, 0), arrowprops=arrow, **look)
    for (label, level), dashes in zip(panel.levels.items(), DASHES[1:], strict=False):
        axes.axhline(level, color=GREY, linestyle=dashes, label=label)
    for label, place in panel.upright.items():
        axes.axvline(place, color=GREY, linewidth=0.6, label=label)
    axes.set_xscale("linear" if panel.x_scale == "linear" else "log")
    axes.set_yscale(panel.y_scale)
    if panel.y_limits is not None:
        axes.set_ylim(*panel.y_limits)
    axes.set_title(panel.title, wrap=True)
    axes.set_xlabel(panel.x)
    axes.set_ylabel(panel.y)
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    if any(line.names for line in panel.lines):
        axes.margins(0.15)


def _set_ticks(axes: Axes, panel: Panel) -> None:
    if panel.x_scale == "sizes":
        sizes = sorted({x for line in panel.lines for x, _ in line.points})
        axes.xaxis.set_major_locator(FixedLocator(_apart(sizes)))
        _finish_log(axes.xaxis)
    if panel.x_scale == "log":
        _set_log_ticks(axes.xaxis, *axes.get_xlim())
    if panel.y_scale == "log":
        _set_log_ticks(axes.yaxis, *axes.get_ylim())


def _apart(sizes: Sequence[Number], most: int = 9) -> list[Number]:
    """Sizes whose labels do not run into each other, the largest one among them."""
    kept: list[Number] = []
    for size in reversed(sizes):
        if not kept or math.log(kept[-1] / size) * most >= math.log(sizes[-1] / sizes[0]):
            kept.append(size)
    return kept[::-1]


def _set_log_ticks(axis: Axis, low: float, high: float) -> None:
    """Ticks at powers of ten, at 1, 2 and 5 of each where they are few, or as on a linear axis."""
    decades = math.log10(high / low)
    if decades < 1:
        axis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
    else:
        axis.set_major_locator(LogLocator(subs=(1.0,) if decades > 3 else (1.0, 2.0, 5.0)))
    _finish_log(axis)


def _finish_log(axis: Axis) -> None:
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.6g}"))


def _add_legend(
    figure: Figure, panels: Sequence[Panel], styles: Mapping[str, dict[str, Any]]
) -> None:
    """Name all that has no name beside it, once; and kinds of lines, where there are several."""
    lines = [line for panel in panels for line in panel.lines if line.points]
    entries: dict[str, Artist] = {
        line.label: Line2D([], [], markersize=5, **styles[line.label])
        for line in lines
        if not (line.names and len(line.points) == 1)
    }
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            if label not in styles:
                entries.setdefault(label, handle)
    for kind, thin in dict.fromkeys((line.kind, line.thin) for line in lines if line.kind):
        look: dict[str, Any] = {"linewidth": 0.7} if thin else {"marker": "o", "markersize": 5}
        entries[kind] = Line2D([], [], color=GREY, **look)
    if len(entries) > 1 or not any(line.names for line in lines):
        handles, labels = list(entries.values()), list(entries)
        figure.legend(handles, labels, loc="outside right center", frameon=False)


def _place_names(figure: Figure) -> None:
    """Move the names beside points to where they cover neither points nor each other."""
    if not any(axes.texts for axes in figure.axes):
        return
    renderer = FigureCanvasAgg(figure).get_renderer()  # type: ignore[no-untyped-call]
    figure.draw_without_rendering()  # Only then is it known where the axes are.
    for axes in figure.axes:
        taken = [
            _box(*place, *2 * [line.get_markersize() * figure.dpi / 72])
            for line in axes.get_lines()
            if str(line.get_marker()) in MARKERS
            for place in axes.transData.transform(line.get_xydata())
        ]
        for name in axes.texts:
            taken.append(_place(name, taken, list(axes.bbox.extents), renderer))


def _place(name: Text, taken: Sequence[Box], inside: Box, renderer: RendererAgg) -> Box:
    """Move a name to the nearest place around its point that is free, or to the least covered."""
    now = Text.get_window_extent(name, renderer)  # Without the line to its point.
    best, chosen = math.inf, (0.0, 0.0)
    for far, right, up in product((0, 6, 14, 24, 36), (1, -1, 0), (-1, 1, 0)):
        # From the middle of the name to its point, in pixels.
        shift = right * (now.width / 2 + far + 6), up * (now.height / 2 + far + 3)
        box = _box(now.x0 + shift[0], now.y0 + shift[1], now.width, now.height)
        covered = now.width * now.height - _overlap(box, inside)
        covered += sum(_overlap(box, other) for other in taken)
        if covered < best:
            best, chosen = covered, shift
        if best < 1:
            break
    name.set(ha="center", va="center", position=[72 / name.figure.dpi * x for x in chosen])
    return _box(now.x0 + chosen[0], now.y0 + chosen[1], now.width, now.height)


def _box(x: float, y: float, width: float, height: float) -> Box:
    """Around a point."""
    return x - width / 2, y - height / 2, x + width / 2, y + height / 2


def _overlap(a: Box, b: Box) -> float:
    width, height = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    return width * height if width > 0 and height > 0 else 0.0
