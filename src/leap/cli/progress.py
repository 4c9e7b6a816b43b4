"""How far long work is: a bar on a terminal, and in a log a plain line now and then."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Protocol, runtime_checkable

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from leap.training import Status

SECONDS_BETWEEN_LINES = 30.0


@runtime_checkable
class Show(Protocol):
    """Shows how far the work is."""

    def __call__(
        self, name: str, done: int, total: int, note: str = "", news: object = None
    ) -> None:
        """Show it.

        Args:
            name: of the work, where there are several kinds or parts of it.
            done, total: how much of it is done.
            note: what else there is to say.
            news: what is worth a line of a log at once when it changes.
        """


@contextmanager
def progress_shown() -> Iterator[Show]:
    """Show progress on standard error, by a bar for each name or by lines, as suits where it is."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _Lines(console)
        return
    bars = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
        console=console,
        transient=True,
    )
    with bars:
        tasks = {}

        def show(name: str, done: int, total: int, note: str = "", news: object = None) -> None:
            if name not in tasks:
                tasks[name] = bars.add_task(name, note="")
            bars.update(tasks[name], completed=done, total=total, note=note)

        yield show


class _Lines:
    """For a log: a line when there is news, and otherwise every half minute."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.name: str | None = None
        self.news: object = None
        self.written = 0.0
        self.start = (0.0, 0)

    def __call__(
        self, name: str, done: int, total: int, note: str = "", news: object = None
    ) -> None:
        now = monotonic()
        if name != self.name:
            self.name, self.news = name, None
            self.written, self.start = now, (now, done)
        if news == self.news and now - self.written < SECONDS_BETWEEN_LINES:
            return
        self.news, self.written = news, now
        parts = [f"{name} {done}/{total}".strip(), note, self._time_left(now, done, total)]
        self.console.print(
            "  ".join(part for part in parts if part), highlight=False, markup=False, soft_wrap=True
        )

    def _time_left(self, now: float, done: int, total: int) -> str:
        """At the speed so far; nothing where that is not known yet, or all is done."""
        since, at_first = self.start
        if done <= at_first or done >= total:
            return ""
        return f"{_duration((now - since) / (done - at_first) * (total - done))} left"


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    if seconds < 60:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def told(show: Show) -> Callable[[str, Status], None]:
    """Shows a training's status, which is news when there has been a look at held-out data."""

    def tell(name: str, status: Status) -> None:
        if status.note is not None:
            print(f"leap: {status.note}", file=sys.stderr)
            return
        show(name, status.step, status.steps, _losses(status), news=status.held_out_loss)

    return tell


def _losses(status: Status) -> str:
    parts = []
    if status.loss is not None:
        parts.append(f"loss {status.loss:.3f}")
    if status.held_out_loss is not None:
        parts.append(f"held-out {status.held_out_loss:.3f}")
    if status.held_out_score is not None:
        parts.append(f"scoring {status.held_out_score:.3f}")
    return "  ".join(parts)
