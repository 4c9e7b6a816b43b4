"""`leap lra`: Long Range Arena, every attention on every task."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from leap.cli import Verb
from leap.tasks.lra import prepare as preparing
from leap.tasks.lra.prepare import PrepareConfig, Prepared, Progress


def prepare(config: PrepareConfig) -> None:
    """Make the data, and say of each task what it holds and where it is."""
    with _bars_shown() as progress:
        for task in preparing.prepare(config, progress):
            print(_summary(task))
    if not config.task:
        for name, why in preparing.tasks_at_hand()[1].items():
            print(f"{name}: left out, {why}")


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


VERBS = {
    "prepare": Verb(
        config=PrepareConfig,
        run=prepare,
        examples=[
            ("lra prepare", "all that can be made from what is at hand"),
            ("lra prepare --task listops", "100,000 expressions, in less than a minute"),
            ("lra prepare --task pathfinder --difficulty easy", "short curves"),
            ("lra prepare --task text --source aclImdb", "IMDb's reviews, byte by byte"),
            ("lra prepare --task image --source cifar-10-binary.tar.gz", "CIFAR-10 in grey"),
            ("lra prepare --task listops --train 2000 --output small", "fewer to train on"),
        ],
    ),
}
