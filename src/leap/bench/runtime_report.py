"""What `leap.bench.runtime` measured, as a page."""

from collections.abc import Callable

from matplotlib.figure import Figure

from leap.bench.decode import GPT2, sizes
from leap.bench.report import Page, where
from leap.bench.runtime import TORCH, RuntimeReport, RuntimeResult
from leap.reports.plots import Line, Panel, plot
from leap.reports.table import KIB, Table, tabulate, times

MIB = KIB * KIB


def page(report: RuntimeReport) -> Page:
    """The tables, the plot and the sentences that go with the report."""
    return Page("runtime", report, describe(report), tables(report), draw(report))


def tables(report: RuntimeReport) -> list[Table]:
    """Time of a token, what is gained, and what a start takes."""
    results = {(r.model, r.runtime): r for r in report.results}

    def table(title: str, number: Callable[[RuntimeResult], float]) -> Table:
        return tabulate(title, {case: number(r) for case, r in results.items()}, corner="model")

    found = [
        table(f"milliseconds of {report.machine['clock']} per token", lambda r: 1e3 * r.seconds),
        tabulate(
            "speed-up over torch",
            {
                case: results[case[0], TORCH].seconds / r.seconds
                for case, r in results.items()
                if case[1] != TORCH
            },
            times,
            corner="model",
        ),
    ]
    if any(model == GPT2 for model, _ in results):
        found.append(
            tabulate(
                "speed-up over GPT-2 on the same runtime",
                {
                    (model, runtime): results[GPT2, runtime].seconds / r.seconds
                    for (model, runtime), r in results.items()
                    if model != GPT2
                },
                times,
                corner="model",
            )
        )
    return [
        *found,
        table("state kept of the context, KiB", lambda r: r.state_bytes / KIB),
        table("file, MiB", lambda r: r.file_bytes / MIB),
        table("start to first logits, CPU seconds", lambda r: r.start_seconds),
        table("most memory of a start, MiB", lambda r: r.start_bytes / MIB),
        tabulate(
            "largest difference from torch's logits, as a share of the largest",
            {case: r.error for case, r in results.items() if case[1] != TORCH},
            lambda error: f"{error:.1e}",
            corner="model",
        ),
    ]


def describe(report: RuntimeReport) -> str:
    """The settings and the machine, and how GPT-2 came by its context."""
    config = report.config
    same = sizes(config.preset, config.context + 1)
    text = (
        f"{same.n_layer} layers of width {same.hidden_size}, {same.n_head} heads, "
        f"{same.vocab_size} tokens in the vocabulary, after a context of {config.context}, "
        f"batch 1, random weights; {where(report.machine)}, "
        f"transformers {report.machine['transformers']}."
    )
    if GPT2 in config.models:
        text += " GPT-2's KV cache was filled with random numbers; the others read the context."
    return text


def draw(report: RuntimeReport) -> Figure:
    """Time of a token against that of a start: the lower and the further left, the better."""
    lines = [
        Line(
            model,
            [(each.start_seconds, 1e3 * each.seconds) for each in of_model],
            names=[each.runtime for each in of_model],
        )
        for model in dict.fromkeys(r.model for r in report.results)
        if (of_model := [r for r in report.results if r.model == model])
    ]
    panel = Panel(
        x="start to first logits (CPU seconds)",
        y=f"{report.machine['clock']} per token (ms)",
        lines=lines,
        x_scale="log",
        y_scale="log",
    )
    return plot([panel], f"A token and a start on each runtime\n{where(report.machine)}")
