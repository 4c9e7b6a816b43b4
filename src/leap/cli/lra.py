"""`leap lra`: Long Range Arena, every attention on every task."""

import sys
from typing import Any

from transformers.utils import logging

from leap.bench import lra, lra_report
from leap.bench import overhead as overheads
from leap.bench.lra import SpeedConfig
from leap.bench.measure import keep_freed_memory, peak_bytes
from leap.bench.overhead import OverheadConfig
from leap.cli.bench import run_bench
from leap.cli.progress import progress_shown
from leap.cli.table import show_table, show_written
from leap.reports.table import Table
from leap.tasks.lra import ablate as ablating
from leap.tasks.lra import prepare as preparing
from leap.tasks.lra import report as reporting
from leap.tasks.lra import train as training
from leap.tasks.lra.ablate import AblateConfig
from leap.tasks.lra.prepare import PrepareConfig, Prepared
from leap.tasks.lra.report import ReportConfig
from leap.tasks.lra.train import TrainConfig

# What goes wrong comes as a LeapError; the library's hints are for those who program with it.
logging.set_verbosity_error()


def prepare(config: PrepareConfig) -> None:
    """Make the data, and say of each task what it holds and where it is."""
    with progress_shown() as progress:
        for task in preparing.prepare(config, progress):
            print(_summary(task))
    if not config.task:
        for name, why in preparing.tasks_at_hand()[1].items():
            print(f"{name}: left out, {why}")


def train(config: TrainConfig) -> None:
    """Train, and say what came out and where it is."""
    keep_freed_memory()
    with progress_shown() as progress:
        results = training.train(config, progress, peak_bytes, _say)
    if not results:
        return  # Not the first of several processes.
    by_name: dict[str, list[dict[str, Any]]] = {}
    for metrics in results:
        by_name.setdefault(metrics["name"], []).append(metrics)
    rows = reporting.compare(reporting.summary(runs) for runs in by_name.values())
    show_table(Table(config.task, reporting.COLUMNS, [reporting.cells(row) for row in rows]))
    print(f"wrote {config.output / config.task}")


def report(config: ReportConfig) -> None:
    """Print the tables, and say where the files are and which runs are not in them."""
    rows = reporting.report(config)
    for table in reporting.tables(rows):
        show_table(table)
    for sentence in reporting.not_alike(rows):
        print(sentence)
    for path in reporting.unfinished(config.runs):
        print(f"left out {path}, which is not finished")
    show_written(config.output or config.runs, ("report.md", "report.csv", "report.png"))


def ablate(config: AblateConfig) -> None:
    """Train the variants, print the table, and say where the files are."""
    keep_freed_memory()
    with progress_shown() as progress:
        rows = ablating.ablate(config, progress, peak_bytes, _say)
    if not rows:
        return  # Not the first of several processes.
    show_table(ablating.table(rows, config.task))
    files = ("ablation.md", "ablation.csv", "ablation.png")
    show_written(config.output / config.task, files)


def speed(config: SpeedConfig) -> None:
    """Measure, print the tables, and say where the files are."""
    run_bench(config, lra.measure, lra_report.page)


def overhead(config: OverheadConfig) -> None:
    """Measure, print the table, and say where the files are."""
    run_bench(config, overheads.measure, overheads.page)


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
