"""What `leap.bench.serve` measured, as a page."""

from matplotlib.figure import Figure

from leap.bench.decode import GPT2, sizes
from leap.bench.report import Page, where
from leap.bench.serve import Percentiles, ServeReport, ServeResult, SoakResult
from leap.reports.plots import Panel, lines_of, plot
from leap.reports.table import KIB, Table, digits, tabulate, times


def page(report: ServeReport) -> Page:
    """The tables, the plot and the sentences that go with the report."""
    return Page("serve", report, describe(report), tables(report), draw(report))


def named(result: ServeResult) -> str:
    """The model, and how it was served; a single user is the whole batch."""
    is_alone = result.slots < result.users
    return f"{result.model}, one at a time" if is_alone else result.model


def speed(result: ServeResult) -> float:
    """Tokens written per second, reading included in the time."""
    return result.n_written / result.seconds


def tables(report: ServeReport) -> list[Table]:
    """Throughput, its gain, latencies, memory per user, and the soak."""
    results = report.results
    speeds = {(named(r), r.users): speed(r) for r in results}
    alone = {(r.model, r.users): speed(r) for r in results if r.slots == 1}
    found = [tabulate("tokens written per second", speeds, corner="users")]
    batched = [r for r in results if r.slots > 1]
    if batched:
        gain = {(r.model, r.users): speed(r) / alone[r.model, r.users] for r in batched}
        found.append(tabulate("speed-up over one at a time", gain, times, corner="users"))
    found.append(_latencies(results))
    memory = {(r.model, r.users): r.bytes_per_user / KIB for r in batched or results}
    found.append(tabulate("memory per user of the fullest batch, KiB", memory, corner="users"))
    if report.soak is not None:
        found.append(_soaked(report.soak))
    return found


def _latencies(results: list[ServeResult]) -> Table:
    rows = [
        [
            named(r),
            str(r.users),
            _three(r.first, 1e3),
            _three(r.between, 1e3),
            _three(r.whole, 1.0),
            f"{r.n_equal} of {r.n_requests}",
        ]
        for r in results
    ]
    columns = (
        *("model", "users", "first token, ms", "between tokens, ms", "whole reply, s"),
        "replies as alone",
    )
    return Table("latency: p50 / p95 / p99", columns, rows)


def _three(found: Percentiles, factor: float) -> str:
    return " / ".join(digits(factor * x) for x in (found.p50, found.p95, found.p99))


def _soaked(soak: SoakResult) -> Table:
    rows = [
        [f"{100 * (i + 1) // len(soak.n_tensors)} %", f"{mib:.0f}", str(n)]
        for i, (mib, n) in enumerate(zip(soak.resident_mib, soak.n_tensors, strict=True))
    ]
    title = (
        f"soak of {soak.seconds:g} s, {soak.users} users of {soak.model}: {soak.n_replies} "
        f"replies, {soak.n_wrong} unlike those alone, {soak.n_failed} failed, "
        f"{soak.n_broken_off} broken off, {soak.n_left} left behind"
    )
    return Table(title, ("of the time", "resident MiB", "tensors"), rows)


def describe(report: ServeReport) -> str:
    """The settings and the machine, and how users were served."""
    config = report.config
    same = sizes(config.preset, config.n_positions)
    text = (
        f"{same.n_layer} layers of width {same.hidden_size}, {same.n_head} heads, "
        f"{same.vocab_size} tokens in the vocabulary, float32; prompts of {config.prompts[0]} to "
        f"{config.prompts[1]} tokens, replies of {config.replies[0]} to {config.replies[1]}, "
        f"greedy; {where(report.machine)}, transformers {report.machine['transformers']}. Users "
        "ask the engine in its own process, without HTTP, each again as soon as it has its reply. "
        "One at a time is the same engine with one slot."
    )
    if GPT2 in config.models:
        text += (
            " GPT-2 is served with its KV cache, a DynamicCache, rows padded to the longest of "
            "the batch."
        )
    return text


def draw(report: ServeReport) -> Figure:
    """Throughput and the latency of most replies against the number of users."""
    clock = report.machine["clock"]
    speeds = {(named(r), r.users): speed(r) for r in report.results}
    waits = {(named(r), r.users): r.whole.p95 for r in report.results}
    panels = [
        Panel(x="users", y=y, lines=lines_of(numbers), x_scale="sizes", y_scale="log")
        for y, numbers in (
            (f"tokens per second of {clock}", speeds),
            (f"whole reply, 95 % within ({clock}, s)", waits),
        )
    ]
    return plot(panels, f"Many users of one server\n{where(report.machine)}")
