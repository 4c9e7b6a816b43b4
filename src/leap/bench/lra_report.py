"""What `leap.bench.lra` measured, as a page."""

from collections.abc import Callable, Iterator

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from leap.bench.lra import NAIVE, PASSES, VARIANTS, Passes, Result, SpeedReport
from leap.bench.report import MIB, Page, Table, digits, times, where

OURS = "leapformer"
Numbers = dict[tuple[str, str], float]
"""By attention and task."""


def page(report: SpeedReport) -> Page:
    """The tables, the plot and the sentence that go with the report."""
    return Page(
        name="speed",
        report=report,
        description=describe(report),
        tables=tables(report),
        figure=plot(report),
    )


def tables(report: SpeedReport) -> list[Table]:
    """How LeaPformer compares with each of the others, then what everything took."""
    found = []
    for passes in PASSES:
        found += list(_compared(report, passes))
    for passes in PASSES:
        found += list(_measured(report, passes))
    return found


def _compared(report: SpeedReport, passes: Passes) -> Iterator[Table]:
    """What the others take, in times of what LeaPformer does."""
    if OURS not in report.config.attentions():
        return
    for title, value in (
        (f"as fast as the others {OURS} is", _seconds),
        (f"as much memory as {OURS} the others take", _mebibytes),
    ):
        numbers = _numbers(report, passes, value)
        ratios = {
            (name, task): number / numbers[OURS, task]
            for (name, task), number in numbers.items()
            if name != OURS
        }
        yield _table(f"{passes}: how many times {title}", ratios, times)


def _measured(report: SpeedReport, passes: Passes) -> Iterator[Table]:
    clock = report.machine["clock"]
    milliseconds = _numbers(report, passes, lambda result: 1e3 * result.seconds)
    yield _table(f"{passes}: milliseconds of {clock}", milliseconds, digits)
    mebibytes = _numbers(report, passes, _mebibytes)
    yield _table(f"{passes}: peak memory besides the model, MiB", mebibytes, digits)


def _seconds(result: Result) -> float:
    return result.seconds


def _mebibytes(result: Result) -> float:
    return result.peak_bytes / MIB


def _numbers(report: SpeedReport, passes: Passes, value: Callable[[Result], float]) -> Numbers:
    return {(r.attention, r.task): value(r) for r in report.results if r.passes == passes}


def _table(title: str, numbers: Numbers, show: Callable[[float], str]) -> Table:
    names = list(dict.fromkeys(name for name, _ in numbers))
    tasks = list(dict.fromkeys(task for _, task in numbers))
    rows = [[name, *(show(numbers[name, task]) for task in tasks)] for name in names]
    return Table(title, ["attention", *tasks], rows)


def describe(report: SpeedReport) -> str:
    """One sentence on the settings and the machine."""
    config = report.config
    return (
        f"The paper's models of Long Range Arena, {config.batch} example"
        f"{'s' * (config.batch > 1)} at once of each task's full length, float32; "
        f"{' and '.join(VARIANTS)} hold their scores in memory, softmax is "
        f"scaled_dot_product_attention; {where(report.machine)}."
    )


def plot(report: SpeedReport) -> Figure:
    """Memory against time of a training step, for each task."""
    tasks = report.config.tasks
    figure = Figure(figsize=(5 * len(tasks), 5), layout="constrained")
    panels = figure.subplots(1, len(tasks), squeeze=False)[0]
    for panel, task in zip(panels, tasks, strict=True):
        for r in report.results:
            if r.task != task or r.passes != "training step":
                continue
            at = 1e3 * r.seconds, r.peak_bytes / MIB
            colour = {OURS: "#d55e00", "softmax": "#000000", NAIVE: "#000000"}.get(r.attention)
            panel.scatter(*at, color=colour or "#0072b2", s=24)
            panel.annotate(
                r.attention, at, (3, 3), textcoords="offset points", fontsize=7, color=colour
            )
        panel.set_xscale("log")
        panel.set_yscale("log")
        for axis in (panel.xaxis, panel.yaxis):
            axis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
            axis.set_minor_formatter(FuncFormatter(lambda x, _: ""))
        panel.set_title(task)
        panel.set_xlabel(f"{report.machine['clock']} (ms)")
        panel.grid(color="#dddddd", linewidth=0.6)
        panel.spines[["top", "right"]].set_visible(False)
        panel.margins(0.15)
    panels[0].set_ylabel("peak memory besides the model (MiB)")
    figure.suptitle("A training step of each attention in Long Range Arena", fontsize=11)
    return figure
