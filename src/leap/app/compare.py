"""The tab Compare: recorded benchmarks as plots to hover over."""

import html
from collections.abc import Sequence
from typing import Any

import gradio as gr

from leap.app.config import AppConfig
from leap.app.looks import note, told
from leap.app.records import Benchmark, Record, read_benchmarks
from leap.errors import InputError
from leap.reports.plots import COLOURS, PALETTE

WIDE = 30
"""Times that the largest number must be the smallest, for a log scale to begin with."""

MOST_TICKS = 12
DASHES = ("solid", "dash", "dot", "dashdot")


def draw(
    benchmark: Benchmark,
    x: str,
    y: str,
    by: str | None,
    cases: Sequence[str],
    *,
    log_x: bool = False,
    log_y: bool = False,
) -> Any:
    """A plot of some columns: lines where numbers are across, else bars."""
    import plotly.graph_objects as go

    records = [r for r in benchmark.where(cases) if x in r and y in r]
    if not records:
        raise InputError("no record has all of this; choose fewer cases or other columns")
    is_bar = x in benchmark.words
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(str(record.get(by, "")) if by else "", []).append(record)
    figure = go.Figure()
    used: dict[str, int] = {}
    for i, (name, rows) in enumerate(groups.items()):
        if not is_bar:
            rows = sorted(rows, key=lambda record: record[x])
        colour = COLOURS.get(name.partition("-")[0].partition(":")[0], PALETTE[i % len(PALETTE)])
        values = {"x": [r[x] for r in rows], "y": [r[y] for r in rows], "name": html.escape(name)}
        shared = {
            "text": [_hover(record) for record in rows],
            "hovertemplate": "%{text}<extra></extra>",
            "showlegend": by is not None,
        }
        if is_bar:
            mark: Any = go.Bar(**values, **shared, marker={"color": colour}, textposition="none")
        else:
            n_alike = used.get(colour, 0)
            used[colour] = n_alike + 1
            line = {"color": colour, "dash": DASHES[n_alike % len(DASHES)]}
            marker = {"symbol": n_alike, "size": 7}
            mark = go.Scatter(**values, **shared, mode="lines+markers", line=line, marker=marker)
        figure.add_trace(mark)
    figure.update_xaxes(title=x)
    figure.update_yaxes(title=y)
    if log_x and not is_bar:
        places = sorted({record[x] for record in records})
        named = {"tickvals": places, "ticktext": [_said(each) for each in places]}
        figure.update_xaxes(type="log", **(named if len(places) <= MOST_TICKS else {"dtick": 1}))
    if log_y:
        figure.update_yaxes(type="log", dtick=1)
    figure.update_layout(
        template="plotly_white", height=520, hoverlabel={"align": "left"}, barmode="group",
        margin={"l": 10, "r": 10, "t": 34, "b": 10}, legend={"title": by or ""},
    )  # fmt: skip
    return figure


def _hover(record: Record) -> str:
    shown = list(record.items())[:14]
    return "<br>".join(f"{html.escape(name)}: {html.escape(_said(x))}" for name, x in shown)


def _said(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def spans(benchmark: Benchmark, name: str) -> bool:
    """Whether a column wants a log scale."""
    if name not in benchmark.numbers:
        return False
    values = [record[name] for record in benchmark.records if name in record]
    return min(values) > 0 and max(values) / min(values) > WIDE


def tab(config: AppConfig) -> None:
    """The tab."""
    known = {} if config.recorded is None else read_benchmarks(config.recorded)
    if not known:
        where = config.recorded or "benchmarks"
        gr.Markdown(
            f"There are no recorded benchmarks in `{where}`; start `leap app` in a checkout, or "
            "give their folder with `--benchmarks`."
        )
        return
    first = next(iter(known))
    began = _begin(known[first])
    with gr.Row(equal_height=False):
        with gr.Column(scale=1, min_width=260):
            name = gr.Dropdown(list(known), value=first, label="Benchmark")
            x, y, by = (
                gr.Dropdown(choices, value=value, label=label, interactive=True)
                for label, (choices, value) in zip(
                    ("Across", "Upwards", "One line per"), began[:3], strict=True
                )
            )
            cases = gr.Dropdown(
                began[3][0], value=began[3][1], label="Only where", multiselect=True
            )
            log_x = gr.Checkbox(began[4], label="Log scale across")
            log_y = gr.Checkbox(began[5], label="Log scale upwards")
        with gr.Column(scale=3, min_width=360):
            plot = gr.Plot(_drawn(known[first]), show_label=False)
            about = gr.HTML(note(known[first].about))

    def benchmark_of(name: Any) -> Benchmark:
        if name not in known:
            raise InputError("there is no such benchmark here; choose one of the list")
        return known[name]

    def chosen(name: str) -> Any:
        benchmark = benchmark_of(name)
        found = _begin(benchmark)
        lists = [gr.update(choices=choices, value=value) for choices, value in found[:4]]
        return *lists, found[4], found[5], _drawn(benchmark), note(benchmark.about)

    def changed(name: str, x: Any, y: Any, by: Any, cases: Any, log_x: Any, log_y: Any) -> Any:
        benchmark = benchmark_of(name)
        across = [*benchmark.numbers, *benchmark.words]
        if x not in across or y not in benchmark.numbers or by not in (NOTHING, *benchmark.words):
            raise InputError("this benchmark has no such column; choose one of the lists")
        only = [case for case in cases or () if isinstance(case, str)]
        line = None if by == NOTHING else by
        return draw(benchmark, x, y, line, only, log_x=bool(log_x), log_y=bool(log_y))

    every = [x, y, by, cases, log_x, log_y]
    shared = {"show_progress": "hidden", "concurrency_limit": config.at_once}
    name.input(told(chosen), [name], [*every, plot, about], api_name="benchmark", **shared)
    gr.on(
        [each.input for each in every], told(changed), [name, *every], [plot],
        api_name="compare", **shared,
    )  # fmt: skip


NOTHING = "(nothing)"


def _begin(benchmark: Benchmark) -> tuple[Any, ...]:
    """Choices and what is chosen at first: across, upwards, line, cases; and both scales."""
    x, y, by = benchmark.choose()
    numbers, words = benchmark.numbers, benchmark.words
    return (
        ([*numbers, *words], x),
        (numbers, y),
        ([NOTHING, *words], by or NOTHING),
        (benchmark.cases(x, by), benchmark.usual(x, by)),
        spans(benchmark, x),
        spans(benchmark, y),
    )


def _drawn(benchmark: Benchmark) -> Any:
    x, y, by = benchmark.choose()
    log_x, log_y = spans(benchmark, x), spans(benchmark, y)
    return draw(benchmark, x, y, by, benchmark.usual(x, by), log_x=log_x, log_y=log_y)
