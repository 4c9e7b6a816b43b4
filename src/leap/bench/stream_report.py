"""What `leap.bench.stream` measured, as a page."""

from collections.abc import Callable, Mapping

from matplotlib.figure import Figure

from leap.bench.report import Page, Table, add_legend, digits, draw, where
from leap.bench.stream import REENCODE, WINDOW, Kind, StreamReport, StreamResult

KIB = 2**10
Measured = Mapping[tuple[str, int], StreamResult]


def page(report: StreamReport) -> Page:
    """The tables, the plot and the sentences that go with the report."""
    return Page(
        name="stream",
        report=report,
        description=describe(report),
        tables=[table for kind in kinds(report) for table in tables(report, kind)],
        figure=plot(report),
    )


def kinds(report: StreamReport) -> list[Kind]:
    """Text, speech or both: what was measured."""
    return list(dict.fromkeys(result.kind for result in report.results))


def tables(report: StreamReport, kind: Kind) -> list[Table]:
    """Time of a step, how flat it is, the real-time factor of speech, and the size of the state."""
    found = results(report, kind)
    shortest = min(length for _, length in found)
    step = "a piece of text" if kind == "text" else "320 ms of speech"
    unit = "pieces" if kind == "text" else "seconds"
    clock = report.machine["clock"]
    made = [
        _table(f"milliseconds of {clock} for {step}", unit, found, lambda r: 1e3 * r.seconds),
        _table(
            f"time of {step} over that after {shortest} {unit} (1 is flat)",
            unit,
            found,
            lambda r: r.seconds / found[r.model, shortest].seconds,
        ),
    ]
    if kind == "speech":
        made.append(
            _table(
                "real-time factor (below 1 keeps up)",
                unit,
                found,
                lambda r: r.real_time_factor or 0.0,
                lambda x: f"{x:.3f}" if x < 1 else digits(x),
            )
        )
    title = f"state kept of the {'stream' if kind == 'text' else 'speech'}, KiB"
    return [*made, _table(title, unit, found, lambda r: r.state_bytes / KIB)]


def results(report: StreamReport, kind: Kind) -> dict[tuple[str, int], StreamResult]:
    """Those of text, or of speech, by model and length."""
    return {(r.model, r.length): r for r in report.results if r.kind == kind}


def describe(report: StreamReport) -> str:
    """The settings and the machine, and how each model came by what it had read."""
    config = report.config
    return (
        f"{config.layers} + {config.layers} layers of width {config.hidden_size}, "
        f"{config.heads} heads, {config.vocabulary} pieces, random weights, one stream, "
        f"float32; {where(report.machine)}. A step of text reads one piece and writes one; a step "
        "of speech makes the frames of 320 ms, reads them, and writes one piece. Ours has read the "
        f"stream, and {WINDOW} sees the last {config.cross_window} states of it by softmax "
        "attention; the keys and values of softmax everywhere were filled with random numbers, as "
        f"reading would take quadratic time. {REENCODE} encodes all of the source at each step."
    )


def plot(report: StreamReport) -> Figure:
    """Time of a step against the source so far, log-log: a level line is a constant cost."""
    shown = kinds(report)
    figure = Figure(figsize=(4 + 5 * len(shown), 5.5), layout="constrained")
    for axes, kind in zip(figure.subplots(1, len(shown), squeeze=False)[0], shown, strict=True):
        draw(axes, {case: 1e3 * r.seconds for case, r in results(report, kind).items()})
        axes.set_xlabel(f"source so far ({'pieces' if kind == 'text' else 'seconds of speech'})")
        step = "a piece" if kind == "text" else "320 ms of speech"
        axes.set_ylabel(f"{report.machine['clock']} for {step} (ms)")
        axes.set_title(where(report.machine), fontsize=8)
    figure.suptitle("One more step of a stream", fontsize=11)
    add_legend(figure)
    return figure


def _table(
    title: str,
    unit: str,
    found: Measured,
    number: Callable[[StreamResult], float],
    show: Callable[[float], str] = digits,
) -> Table:
    lengths = sorted({length for _, length in found})
    rows = []
    for name in dict.fromkeys(name for name, _ in found):
        cells = [found.get((name, length)) for length in lengths]
        rows.append([name, *("-" if cell is None else show(number(cell)) for cell in cells)])
    return Table(title, [unit, *map(str, lengths)], rows)
