"""All runs that are found as one table: how often each attention is right, and at what cost.

    report.md      a table for each task, and one over all tasks
    report.csv     the same numbers, unrounded, a line for each task and attention
    report.png     accuracy against speed, the area of a dot being memory

Runs of a task that are not alike (see `ALIKE`) are in tables of their own, and not averaged.

Throughput is in examples per second: on a CPU of its own time, summed over all cores, which leaves
out what other programs took, the mean of all steps; elsewhere of wall time, by the median step.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, geometric_mean, median, stdev
from typing import Any

from matplotlib.figure import Figure

from leap.errors import FileError
from leap.reports.files import read_json, write_report
from leap.reports.plots import Line, Panel, plot
from leap.reports.table import MIB, Table, csv_table, markdown
from leap.tasks.lra.model import PAPER
from leap.tasks.lra.runs import RESULTS, RUNS
from leap.training.folder import read_results

ALIKE = (
    "steps",
    "batch",
    "accumulate",
    "learning_rate",
    "schedule",
    "warmup",
    "bf16",
    "pooling",
    "hidden_dropout_prob",
    "attention_dropout",
    "group_by_length",
    "evaluate_every",
    "start",
    "valid_examples",
    "tests",
    "data",
    "device",
    "threads",
)
"""What runs of a task must have in common to be compared: of their settings and their results, and
the digest of their data."""
BASELINE = "softmax"
AVERAGE = "average"


@dataclass(frozen=True)
class ReportConfig:
    """Put all finished runs into one table and one picture, each figure also beside softmax's."""

    runs: Path = RUNS
    """Folder that leap lra train wrote to."""
    output: Path | None = None
    """Folder for report.md, report.csv and report.png; by default that of the runs."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One attention on one task, over all its seeds; or over all tasks."""

    task: str
    apart: str = ""
    """What tells these runs from others of the task that are not alike, if there are any."""
    name: str
    seeds: int
    steps: int | None
    batch: int | None
    tests: int | None
    """Examples of the test set that were looked at."""
    accuracy: float
    spread: float | None
    """Standard deviation of the accuracy over seeds, if there are several."""
    train_rate: float | None
    """Examples per second in training."""
    inference_rate: float | None
    peak_bytes: float | None
    """Memory of a training step on top of the model."""
    parameters: int | None
    accuracy_gain: float | None = None
    """Accuracy, less that of softmax."""
    train_speed: float | None = None
    """Times softmax's."""
    inference_speed: float | None = None
    memory_share: float | None = None
    parameters_share: float | None = None


def report(config: ReportConfig) -> list[Row]:
    """Read the runs, and write the table and the picture."""
    rows = compare(read_runs(config.runs))
    rows += average(rows)
    text = "Accuracy on the test set, in percent; its gain, and in brackets ratios, over softmax."
    files = {
        "report.md": markdown(text, *not_alike(rows), *tables(rows)),
        "report.csv": csv_table([asdict(row) for row in rows]),
        "report.png": draw(rows),
    }
    write_report(config.output or config.runs, files)
    return rows


def read_runs(folder: Path) -> list[Row]:
    """A row for each task and attention that has finished runs, and for each kind that is alike."""
    tasks: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(folder.glob("*/*/seed-*/metrics.json")):
        run = read_results(path, RESULTS)
        tasks.setdefault(run["task"], []).append(
            {**_settings(path.parent), "tests": run["test"]["examples"], **run}
        )
    if not tasks:
        raise FileError(f"no finished run in {folder}; make some with leap lra train")
    rows: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for task, runs in tasks.items():
        differ = [name for name in ALIKE if len({run.get(name) for run in runs}) > 1]
        for run in runs:
            apart = ", ".join(f"{name}={run.get(name)}" for name in differ)
            rows.setdefault((task, apart, run["name"]), []).append(run)
    return [summary(runs, apart) for (_, apart, _), runs in rows.items()]


def _settings(run: Path) -> dict[str, Any]:
    """What a run was given: its settings, those of its model, and the digest of its data."""
    settings = read_json(run / "config.json")
    return {**settings, **settings.get("changes", {}), **read_json(run / "data.json")}


def unfinished(folder: Path) -> list[Path]:
    """Run folders without results, which a report leaves out."""
    begun = sorted(path.parent for path in folder.glob("*/*/seed-*/config.json"))
    return [path for path in begun if not (path / "metrics.json").exists()]


def summary(runs: Sequence[dict[str, Any]], apart: str = "") -> Row:
    """One row of the runs of an attention on a task, which differ in their seeds.

    Args:
        runs: their results.
        apart: what tells them from others of the task that are not alike.
    """
    first = runs[0]
    clock = "cpu_seconds" if first["device"] == "cpu" else "seconds"
    accuracies = [run["accuracy"] for run in runs]
    steps = [run[f"{clock}_per_step"] for run in runs if run[f"{clock}_per_step"]]
    peaks = [run["peak_bytes"] for run in runs if run["peak_bytes"] is not None]
    return Row(
        task=first["task"],
        apart=apart,
        name=first["name"],
        seeds=len(runs),
        steps=first["steps"],
        batch=first["batch"],
        tests=first["test"]["examples"],
        accuracy=fmean(accuracies),
        spread=stdev(accuracies) if len(runs) > 1 else None,
        train_rate=first["batch"] / median(steps) if steps else None,
        inference_rate=median(run["test"]["examples"] / run["test"][clock] for run in runs),
        peak_bytes=float(median(peaks)) if peaks else None,
        parameters=first["parameters"],
    )


def compare(rows: Iterable[Row]) -> list[Row]:
    """The rows beside softmax's of the same task, if alike: that one first, then by accuracy."""
    rows = sorted(rows, key=lambda row: (*_table(row), row.name != BASELINE, -row.accuracy))
    baselines = {_table(row): row for row in rows if row.name == BASELINE}
    return [
        _beside(row, baselines[_table(row)]) if _table(row) in baselines else row for row in rows
    ]


def _table(row: Row) -> tuple[str, str]:
    """Which table a row is in: there rows can be compared."""
    return row.task, row.apart


def not_alike(rows: Iterable[Row]) -> list[str]:
    """A sentence for each task whose runs are not alike."""
    found: dict[str, list[str]] = {}
    for row in rows:
        if row.apart and row.apart not in found.setdefault(row.task, []):
            found[row.task].append(row.apart)
    return [
        f"{task}: runs are not alike ({'; '.join(kinds)}), so they are in tables of their own and "
        "there is no average over tasks"
        for task, kinds in found.items()
    ]


def _beside(row: Row, baseline: Row) -> Row:
    return replace(
        row,
        accuracy_gain=row.accuracy - baseline.accuracy,
        train_speed=_ratio(row.train_rate, baseline.train_rate),
        inference_speed=_ratio(row.inference_rate, baseline.inference_rate),
        memory_share=_ratio(row.peak_bytes, baseline.peak_bytes),
        parameters_share=_ratio(row.parameters, baseline.parameters),
    )


def _ratio(value: float | int | None, baseline: float | int | None) -> float | None:
    return value / baseline if value is not None and baseline else None


def average(rows: Sequence[Row]) -> list[Row]:
    """Rows over the arena's own tasks, for the attentions that have them all.

    A stand-in for one, or another level of it, is none of them. There are no rows if there is one
    task, or if runs of a task are not alike. Accuracies and their gains are averaged, ratios
    multiplied.
    """
    rows = [row for row in rows if row.task in PAPER]
    tasks = {row.task for row in rows}
    by_name: dict[str, list[Row]] = {}
    for row in rows:
        by_name.setdefault(row.name, []).append(row)
    whole = {name: own for name, own in by_name.items() if len(own) == len(tasks)}
    if len(tasks) < 2 or any(row.apart for row in rows):
        return []
    found = [
        Row(
            task=AVERAGE,
            name=name,
            seeds=min(row.seeds for row in own),
            steps=None,
            batch=None,
            tests=None,
            accuracy=fmean(row.accuracy for row in own),
            spread=None,
            train_rate=None,
            inference_rate=None,
            peak_bytes=None,
            parameters=None,
            accuracy_gain=_over(fmean, [row.accuracy_gain for row in own]),
            train_speed=_over(geometric_mean, [row.train_speed for row in own]),
            inference_speed=_over(geometric_mean, [row.inference_speed for row in own]),
            memory_share=_over(geometric_mean, [row.memory_share for row in own]),
            parameters_share=_over(geometric_mean, [row.parameters_share for row in own]),
        )
        for name, own in whole.items()
    ]
    return sorted(found, key=lambda row: (row.name != BASELINE, -row.accuracy))


def _over(mean: Callable[[list[float]], float], values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return mean(known) if len(known) == len(values) else None


COLUMNS = (
    "attention",
    "accuracy",
    "gain",
    "training, ex/s",
    "inference, ex/s",
    "peak MiB",
    "parameters",
    "seeds",
    "steps",
    "batch",
    "tests",
)


def cells(row: Row) -> list[str]:
    """A row of the table, as text: what was measured, and in brackets how many times softmax's."""
    accuracy = f"{100 * row.accuracy:.2f}"
    if row.spread is not None:
        accuracy += f" ± {100 * row.spread:.2f}"
    mebibytes = None if row.peak_bytes is None else row.peak_bytes / MIB
    return [
        row.name,
        accuracy,
        _text(row.accuracy_gain, lambda x: f"{100 * x:+.2f}"),
        _with_ratio(_text(row.train_rate, _digits), row.train_speed),
        _with_ratio(_text(row.inference_rate, _digits), row.inference_speed),
        _with_ratio(_text(mebibytes, _digits), row.memory_share),
        _with_ratio(_text(row.parameters, lambda x: f"{x:,.0f}"), row.parameters_share),
        str(row.seeds),
        *(_text(count, lambda x: f"{x:,.0f}") for count in (row.steps, row.batch, row.tests)),
    ]


def _with_ratio(text: str, ratio: float | None) -> str:
    return text if ratio is None else f"{text} ({ratio:.2f}x)".strip()


def _text(value: float | int | None, show: Callable[[float], str]) -> str:
    return "" if value is None else show(value)


def _digits(x: float) -> str:
    """Three digits that count."""
    return f"{x:,.0f}" if x >= 100 else f"{x:.3g}"


def tables(rows: Sequence[Row]) -> list[Table]:
    """A table for each task, of the rows that are alike, the average last."""
    by_title = _by_title(rows)
    return [Table(title, COLUMNS, [cells(row) for row in own]) for title, own in by_title.items()]


def _by_title(rows: Sequence[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(": ".join(filter(None, _table(row))), []).append(row)
    return found


def draw(rows: Sequence[Row]) -> Figure:
    """Accuracy against training throughput for each table, the area of a dot being memory."""
    panels = []
    for title, own in _by_title(rows).items():
        relative = all(row.train_speed is not None for row in own)
        sizes = [row.memory_share if relative else row.peak_bytes for row in own]
        largest = max((size for size in sizes if size is not None), default=1.0)
        lines = []
        for row, size in zip(own, sizes, strict=True):
            x = row.train_speed if relative else row.train_rate
            area = 60 if size is None else max(900 * size / largest, 8)
            if x is not None:
                lines.append(Line(row.name, [(x, 100 * row.accuracy)], names=[row.name], area=area))
        unit = "times softmax" if relative else "examples/s"
        panels.append(
            Panel(
                x=f"training throughput, {unit}",
                y="test accuracy, %",
                lines=lines,
                title=title,
                x_scale="log",
            )
        )
    title = "Accuracy against training throughput; area of a dot: peak memory"
    return plot(panels, title, n_columns=3)
