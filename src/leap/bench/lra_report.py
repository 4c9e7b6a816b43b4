"""What `leap.bench.lra` measured, as a page."""

from collections.abc import Callable, Iterator

from matplotlib.figure import Figure

from leap.bench.lra import PASSES, VARIANTS, Passes, Result, SpeedReport
from leap.bench.report import Page, where
from leap.reports.plots import Line, Panel, plot
from leap.reports.table import MIB, Table, tabulate, times

OURS = "leapformer"
CORNER = "attention"
Numbers = dict[tuple[str, str], float]
"""By attention and task."""


def page(report: SpeedReport) -> Page:
    """The tables, the plot and the sentence that go with the report."""
    return Page("speed", report, describe(report), tables(report), draw(report))


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
        (f"speed-up of {OURS} over the others", lambda result: result.seconds),
        (f"memory of the others over that of {OURS}", lambda result: float(result.peak_bytes)),
    ):
        numbers = _numbers(report, passes, value)
        ratios = {
            (name, task): number / numbers[OURS, task]
            for (name, task), number in numbers.items()
            if name != OURS
        }
        yield tabulate(f"{passes}: {title}", ratios, times, corner=CORNER)


def _measured(report: SpeedReport, passes: Passes) -> Iterator[Table]:
    clock = report.machine["clock"]
    milliseconds = _numbers(report, passes, lambda result: 1e3 * result.seconds)
    yield tabulate(f"{passes}: milliseconds of {clock}", milliseconds, corner=CORNER)
    mebibytes = _numbers(report, passes, lambda result: result.peak_bytes / MIB)
    title = f"{passes}: peak memory besides the model, MiB"
    yield tabulate(title, mebibytes, corner=CORNER)


def _numbers(report: SpeedReport, passes: Passes, value: Callable[[Result], float]) -> Numbers:
    return {(r.attention, r.task): value(r) for r in report.results if r.passes == passes}


def describe(report: SpeedReport) -> str:
    """One sentence on the settings and the machine."""
    config = report.config
    return (
        f"The paper's models of Long Range Arena, {config.batch} example"
        f"{'s' * (config.batch > 1)} at once of each task's full length, float32; "
        f"{' and '.join(VARIANTS)} hold their scores in memory, softmax is "
        f"scaled_dot_product_attention; {where(report.machine)}."
    )


def draw(report: SpeedReport) -> Figure:
    """Memory against time of a training step, for each task."""
    panels = [
        Panel(
            x=f"{report.machine['clock']} (ms)",
            y="peak memory besides the model (MiB)",
            lines=[
                Line(r.attention, [(1e3 * r.seconds, r.peak_bytes / MIB)], names=[r.attention])
                for r in report.results
                if r.task == task and r.passes == "training step"
            ],
            title=task,
            x_scale="log",
            y_scale="log",
        )
        for task in report.config.tasks
    ]
    return plot(panels, "A training step of each attention in Long Range Arena", n_columns=3)
