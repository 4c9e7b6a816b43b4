"""What `leap.bench.decode` measured, as a page."""

from matplotlib.figure import Figure

from leap.bench.decode import GPT2, DecodeReport
from leap.bench.report import Page, where
from leap.reports.plots import Panel, lines_of, plot
from leap.reports.table import KIB, Table, digits, tabulate, times


def page(report: DecodeReport) -> Page:
    """The tables, the plot and the sentences that go with the report."""
    return Page("decode", report, describe(report), tables(report), draw(report))


def tables(report: DecodeReport) -> list[Table]:
    """Time of a token, how flat it is, how it compares with GPT-2, and the size of the state."""
    results = {(r.model, r.context): r for r in report.results}
    shortest = min(context for _, context in results)
    batch = report.config.batch
    of = "per token" if batch == 1 else f"for a token of each of {batch} rows"
    found = [
        tabulate(f"milliseconds of {report.machine['clock']} {of}", milliseconds(report)),
        tabulate("tokens per second", {case: batch / r.seconds for case, r in results.items()}),
        tabulate(
            f"time per token over that at a context of {shortest} (1 is flat)",
            {
                (name, context): r.seconds / results[name, shortest].seconds
                for (name, context), r in results.items()
            },
            lambda ratio: f"{ratio:.2f}" if ratio < 10 else digits(ratio),
        ),
        tabulate(
            "state kept of the context, KiB",
            {case: r.state_bytes / KIB for case, r in results.items()},
        ),
    ]
    speeds = {
        (name, context): results[GPT2, context].seconds / r.seconds
        for (name, context), r in results.items()
        if name != GPT2 and (GPT2, context) in results
    }
    if speeds:
        found.append(tabulate("speed-up over GPT-2", speeds, times))
    return found


def milliseconds(report: DecodeReport) -> dict[tuple[str, int], float]:
    """Time of a token, by model and context."""
    return {(r.model, r.context): 1e3 * r.seconds for r in report.results}


def describe(report: DecodeReport) -> str:
    """The settings and the machine, and how GPT-2 came by its context."""
    sizes = report.config.sizes()
    text = (
        f"{sizes.n_layer} layers of width {sizes.hidden_size}, {sizes.n_head} heads, "
        f"{sizes.vocab_size} tokens in the vocabulary, batch {report.config.batch}, float32; "
        f"{where(report.machine)}, transformers {report.machine['transformers']}."
    )
    if report.config.generate:
        text += f" Through generate(): the mean of {report.config.generate} tokens, greedily."
    ways = {r.model: r.way for r in report.results if r.model != GPT2}
    text += "".join(f" {name}: {way}." for name, way in ways.items())
    if GPT2 in report.config.models:
        text += (
            " GPT-2's KV cache was filled with random numbers, as reading the context would "
            "take it quadratic time; the others read the context. It is a DynamicCache, the "
            "default of generate(), which copies the whole KV cache at each token; that is in "
            "the time."
        )
    return text


def draw(report: DecodeReport) -> Figure:
    """Time of a token against the context, log-log: a level line is a constant cost."""
    panel = Panel(
        x="context (tokens)",
        y=f"{report.machine['clock']} per token (ms)",
        lines=lines_of(milliseconds(report)),
        x_scale="sizes",
        y_scale="log",
    )
    return plot([panel], f"One more token against the context before it\n{where(report.machine)}")
