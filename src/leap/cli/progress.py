"""How far long work is: a bar on a terminal, and in a log a plain line now and then."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from leap.reports.progress import Progress, Status

SECONDS_BETWEEN_LINES = 30.0


@contextmanager
def progress_shown() -> Iterator[Progress]:
    """Show progress on standard error, by a bar for each name or by lines, as suits where it is."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _with_notes(_Lines(console))
        return
    bars = Bars(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[doing]}"),
        console=console,
        transient=True,
    )
    with bars:
        tasks = {}

        def show(status: Status) -> None:
            if status.name not in tasks:
                tasks[status.name] = bars.add_task(status.name, doing="")
            # Without a total the bar only shows that something is going on.
            bars.update(
                tasks[status.name],
                completed=status.step,
                total=status.steps or None,
                doing=_doing(status),
            )

        yield _with_notes(show)


class _Lines:
    """For a log: a line when there is news, and otherwise every half minute."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.name: str | None = None
        self.news: object = None
        self.written = 0.0
        self.start = (0.0, 0)

    def __call__(self, status: Status) -> None:
        now = monotonic()
        if status.name != self.name:
            self.name, self.news = status.name, None
            self.written, self.start = now, (now, status.step)
        if status.news == self.news and now - self.written < SECONDS_BETWEEN_LINES:
            return
        self.news, self.written = status.news, now
        counted = f"{status.name} {status.step}/{status.steps or '?'}".strip()
        parts = [counted, _doing(status), self._time_left(now, status.step, status.steps)]
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


def _doing(status: Status) -> str:
    numbers = (f"{name} {value:.3f}" for name, value in status.numbers.items())
    return "  ".join([status.doing] * bool(status.doing) + [*numbers])


def _with_notes(show: Progress) -> Progress:
    """Prints notes as lines of their own."""
    return lambda status: (
        show(status) if status.note is None else print(f"leap: {status.note}", file=sys.stderr)
    )
