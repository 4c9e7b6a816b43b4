"""`leap lra`: Long Range Arena, every attention on every task."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars
from transformers.utils import logging

from leap.bench import lra, lra_report
from leap.bench import overhead as overheads
from leap.bench.lra import SpeedConfig
from leap.bench.measure import keep_freed_memory, peak_bytes
from leap.bench.overhead import OverheadConfig
from leap.bench.report import make_folder
from leap.cli.bench import show_page, stages_shown
from leap.cli.progress import progress_shown, told
from leap.cli.table import show_table
from leap.tasks.lra import ablate as ablating
from leap.tasks.lra import prepare as preparing
from leap.tasks.lra import report as reporting
from leap.tasks.lra import train as training
from leap.tasks.lra.ablate import AblateConfig
from leap.tasks.lra.prepare import PrepareConfig, Prepared, Progress
from leap.tasks.lra.report import ReportConfig
from leap.tasks.lra.train import TrainConfig

# What goes wrong comes as a LeapError; the library's hints are for those who program with it.
logging.set_verbosity_error()


def prepare(config: PrepareConfig) -> None:
    """Make the data, and say of each task what it holds and where it is."""
    with _bars_shown() as progress:
        for task in preparing.prepare(config, progress):
            print(_summary(task))
    if not config.task:
        for name, why in preparing.tasks_at_hand()[1].items():
            print(f"{name}: left out, {why}")


def train(config: TrainConfig) -> None:
    """Train, and say what came out and where it is."""
    keep_freed_memory()
    with progress_shown() as show:
        results = training.train(config, told(show), peak_bytes, _say)
    if not results:
        return  # Not the first of several processes.
    by_name: dict[str, list[dict[str, Any]]] = {}
    for metrics in results:
        by_name.setdefault(metrics["name"], []).append(metrics)
    rows = reporting.compare(reporting.summary(runs) for runs in by_name.values())
    show_table(reporting.COLUMNS, [reporting.cells(row) for row in rows], config.task)
    print(f"wrote {config.output / config.task}")


def report(config: ReportConfig) -> None:
    """Print the tables, and say where the files are and which runs are not in them."""
    rows = reporting.report(config)
    for title, own in reporting.by_task(rows).items():
        show_table(reporting.COLUMNS, [reporting.cells(row) for row in own], title)
    for sentence in reporting.not_alike(rows):
        print(sentence)
    for path in reporting.unfinished(config.runs):
        print(f"left out {path}, which is not finished")
    for name in ("report.md", "report.csv", "report.png"):
        print(f"wrote {(config.output or config.runs) / name}")


def ablate(config: AblateConfig) -> None:
    """Train the variants, print the table, and say where the files are."""
    keep_freed_memory()
    with progress_shown() as show:
        rows = ablating.ablate(config, told(show), peak_bytes, _say)
    if not rows:
        return  # Not the first of several processes.
    show_table(ablating.COLUMNS, [ablating.cells(row) for row in rows], config.task)
    for name in ("ablation.md", "ablation.csv", "ablation.png"):
        print(f"wrote {config.output / config.task / name}")


def speed(config: SpeedConfig) -> None:
    """Measure, print the tables, and say where the files are."""
    make_folder(config.output)
    with stages_shown() as progress:
        measured = lra.measure(config, progress)
    show_page(lra_report.page(measured), config.output)


def overhead(config: OverheadConfig) -> None:
    """Measure, print the table, and say where the files are."""
    make_folder(config.output)
    with stages_shown() as progress:
        measured = overheads.measure(config, progress)
    show_page(overheads.page(measured), config.output)


def _say(sentence: str) -> None:
    print(sentence, file=sys.stderr)


def _summary(task: Prepared) -> str:
    splits = task.facts["splits"]
    counts = ", ".join(f"{split['examples']:,} {name}" for name, split in splits.items())
    longest = max(split["longest"] for split in splits.values())
    source = task.facts["settings"]["source"]
    lines = [f"{task.name} ({source}): {counts}; at most {longest:,} tokens"]
    cut = sum(split["cut"] for split in splits.values())
    if cut:
        lines[0] += f", {cut:,} inputs cut to that"
    lines.append(f"{'found' if task.found else 'wrote'} {task.folder}")
    return "\n".join(lines)


@contextmanager
def _bars_shown() -> Iterator[Progress | None]:
    """A bar for each task on a terminal, and nothing elsewhere."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    bars = Bars(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )
    with bars:
        tasks = {}

        def show(name: str, done: int, total: int) -> None:
            if name not in tasks:
                tasks[name] = bars.add_task(name)
            # Without a total the bar only shows that something is going on.
            bars.update(tasks[name], completed=done, total=total or None)

        yield show
