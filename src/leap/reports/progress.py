"""How far long work is: one kind of news, told to one kind of listener."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class Status:
    """How far some work is."""

    step: int
    steps: int
    """How many there are; 0 if that is not known."""
    name: str = ""
    """Of the work, where there are several kinds or parts of it."""
    doing: str = ""
    """What is under way."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    """What was measured last, by name: of a training its `loss`, and on held-out data `held-out`
    and, if there is a measure, `scoring`."""
    news: object = None
    """What is worth a line of a log at once when it changes."""
    note: str | None = None
    """What there is to know besides, in a line, as that a checkpoint was damaged."""


Progress = Callable[[Status], None]
Say = Callable[[str], None]
"""Told in a line what there is to know."""


def silent(_status: Status) -> None:
    """Tell nobody."""


def named(progress: Progress, name: str) -> Progress:
    """Tells of one part of the work by its name."""
    return lambda status: progress(replace(status, name=name))
