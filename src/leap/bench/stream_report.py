"""What `leap.bench.stream` measured, as a page."""

from collections.abc import Callable

from matplotlib.figure import Figure

from leap.bench.report import Page, where
from leap.bench.stream import REENCODE, WINDOW, Kind, StreamReport, StreamResult
from leap.reports.plots import Panel, lines_of, plot
from leap.reports.table import KIB, Table, digits, tabulate


def page(report: StreamReport) -> Page:
    """The tables, the plot and the sentences that go with the report."""
    shown = [table for kind in kinds(report) for table in tables(report, kind)]
    return Page("stream", report, describe(report), shown, draw(report))


def kinds(report: StreamReport) -> list[Kind]:
    """Text, speech or both: what was measured."""
    return list(dict.fromkeys(result.kind for result in report.results))


def tables(report: StreamReport, kind: Kind) -> list[Table]:
    """Time of a step, how flat it is, the real-time factor of speech, and the size of the state."""
    found = results(report, kind)
    shortest = min(length for _, length in found)
    step = "a subword of text" if kind == "text" else "320 ms of speech"
    unit = "subwords" if kind == "text" else "seconds"
    clock = report.machine["clock"]

    def table(
        title: str,
        number: Callable[[StreamResult], float],
        show: Callable[[float], str] = digits,
    ) -> Table:
        numbers = {case: number(result) for case, result in found.items()}
        return tabulate(title, numbers, show, corner=unit)

    made = [
        table(f"milliseconds of {clock} for {step}", lambda r: 1e3 * r.seconds),
        table(
            f"time of {step} over that after {shortest} {unit} (1 is flat)",
            lambda r: r.seconds / found[r.model, shortest].seconds,
        ),
    ]
    if kind == "speech":
        made.append(
            table(
                "real-time factor (below 1 keeps up)",
                lambda r: r.real_time_factor or 0.0,
                lambda x: f"{x:.3f}" if x < 1 else digits(x),
            )
        )
    title = f"state kept of the {'stream' if kind == 'text' else 'speech'}, KiB"
    return [*made, table(title, lambda r: r.state_bytes / KIB)]


def results(report: StreamReport, kind: Kind) -> dict[tuple[str, int], StreamResult]:
    """Those of text, or of speech, by model and length."""
    return {(r.model, r.length): r for r in report.results if r.kind == kind}


def describe(report: StreamReport) -> str:
    """The settings and the machine, and how each model came by what it had read."""
    config = report.config
    return (
        f"{config.layers} + {config.layers} layers of width {config.hidden_size}, "
        f"{config.heads} heads, {config.vocabulary} subwords, random weights, one stream, "
        f"float32; {where(report.machine)}. A step of text reads one subword and writes one; a "
        "step of speech makes the frames of 320 ms, reads them, and writes one subword. Ours "
        f"has read the stream, and {WINDOW} sees the last {config.cross_window} states of it by "
        "softmax attention; the KV cache of softmax everywhere was filled with random numbers, as "
        f"reading would take quadratic time. {REENCODE} encodes all of the source at each step."
    )


def draw(report: StreamReport) -> Figure:
    """Time of a step against the source so far, log-log: a level line is a constant cost."""
    panels = []
    for kind in kinds(report):
        source, step = (
            ("subwords", "a subword")
            if kind == "text"
            else ("seconds of speech", "320 ms of speech")
        )
        panels.append(
            Panel(
                x=f"source so far ({source})",
                y=f"{report.machine['clock']} for {step} (ms)",
                lines=lines_of({x: 1e3 * r.seconds for x, r in results(report, kind).items()}),
                x_scale="sizes",
                y_scale="log",
            )
        )
    return plot(panels, f"One more step of a stream\n{where(report.machine)}")
