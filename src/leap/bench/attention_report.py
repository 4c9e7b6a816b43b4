"""What `leap.bench.attention` measured, as a page."""

from collections.abc import Iterator

from matplotlib.figure import Figure

from leap.bench.attention import PASSES, BenchReport, Passes
from leap.bench.report import Page, where
from leap.reports.plots import Line, Panel, lines_of, plot
from leap.reports.table import MIB, Table, percent, tabulate, times


def page(report: BenchReport) -> Page:
    """The tables, the plot and the sentence that go with the report."""
    return Page(
        "attention",
        report,
        describe(report),
        tables(report),
        draw(report),
        {"roofline": roofline(report)},
    )


def tables(report: BenchReport) -> list[Table]:
    """Speed, time and memory of each pass, the pass that training takes first."""
    return [table for passes in reversed(PASSES) for table in _tables_of(report, passes)]


def _tables_of(report: BenchReport, passes: Passes) -> Iterator[Table]:
    results = [r for r in report.results if r.passes == passes]
    compared = [r for r in results if r.mechanism != r.baseline]
    if compared:
        yield tabulate(
            f"{passes}: speed-up over scaled_dot_product_attention",
            {(r.mechanism, r.length): r.speed for r in compared},
            times,
        )
    if counted := {(r.mechanism, r.length): r.of_sgemm for r in results if r.of_sgemm is not None}:
        yield tabulate(f"{passes}: speed as a share of a matrix product's", counted, percent)
    yield tabulate(
        f"{passes}: milliseconds of {report.machine['clock']}",
        milliseconds(report, passes),
        growth=True,
    )
    yield tabulate(
        f"{passes}: peak memory besides the inputs, MiB", mebibytes(report, passes), growth=True
    )


def milliseconds(report: BenchReport, passes: Passes) -> dict[tuple[str, int], float]:
    """Time of one pass, by mechanism and length."""
    return {(r.mechanism, r.length): 1e3 * r.seconds for r in report.results if r.passes == passes}


def mebibytes(report: BenchReport, passes: Passes) -> dict[tuple[str, int], float]:
    """Memory of one pass, by mechanism and length."""
    results = [r for r in report.results if r.passes == passes]
    return {(r.mechanism, r.length): r.peak_bytes / MIB for r in results}


def describe(report: BenchReport) -> str:
    """One sentence on the settings and the machine."""
    config = report.config
    said = (
        f"Batch {config.batch}, {config.heads} heads of {config.width}, {config.dtype}; "
        f"{where(report.machine)}."
    )
    left_out = report.machine.get("not measured")
    return f"{said} Not measured: {left_out}." if left_out else said


def draw(report: BenchReport) -> Figure:
    """Time and memory against length, log-log: a straight line's slope is its growth."""
    panels = [
        Panel(
            x="length (tokens)",
            y=label,
            lines=lines_of(numbers(report, passes)),
            title=passes if numbers is milliseconds else "",
            x_scale="sizes",
            y_scale="log",
        )
        for numbers, label in (
            (milliseconds, f"{report.machine['clock']} (ms)"),
            (mebibytes, "peak memory besides the inputs (MiB)"),
        )
        for passes in PASSES
    ]
    title = f"Attention against length\n{describe(report)}"
    return plot(panels, title, n_columns=len(PASSES), shared=True)


def roofline(report: BenchReport) -> Figure:
    """Operations per second against operations per byte, under what the machine can do."""
    counted = [r for r in report.results if r.operations is not None]
    panels = []
    for passes in PASSES:
        of_passes = [r for r in counted if r.passes == passes]
        points: dict[str, list[tuple[float, float]]] = {}
        for r in of_passes:
            assert r.operations is not None
            at = r.operations / r.touched, r.operations / r.seconds / 1e9
            points.setdefault(r.mechanism, []).append(at)
        sgemm = max((r.sgemm for r in of_passes), default=1.0)
        copy = max((r.copy for r in of_passes), default=1.0)
        roof = [(x, min(copy * x, sgemm) / 1e9) for x in (1.0, sgemm / copy, 100.0)]
        lines = [Line(label=name, points=each) for name, each in points.items()]
        panels.append(
            Panel(
                x="operations per byte of inputs and outputs",
                y="GFLOP/s",
                lines=[Line(label="copy, then sgemm", points=roof), *lines],
                title=passes,
                x_scale="log",
                y_scale="log",
            )
        )
    return plot(panels, f"Roofline\n{describe(report)}", n_columns=len(PASSES), shared=True)
