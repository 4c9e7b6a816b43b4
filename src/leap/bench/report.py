"""What a bench measured, as a page: a sentence, tables, a figure and all the numbers."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from leap.reports.files import write_report
from leap.reports.table import Table, markdown


@dataclass(frozen=True)
class Page:
    """A bench's report as it is shown and written."""

    name: str
    """What was measured, in one word: the name of the plot's file."""
    report: Any
    """The dataclass that holds everything."""
    description: str
    tables: list[Table]
    figure: Figure
    more: Mapping[str, Figure] = field(default_factory=dict)
    """Further plots, by the names of their files."""

    @property
    def text(self) -> str:
        """The tables in Markdown, with what they were measured on."""
        return markdown(self.description, *self.tables)

    def write(self, folder: Path) -> list[Path]:
        """Write results.json, results.md and the plots, and tell where they are."""
        results = asdict(self.report)
        figures = {f"{name}.png": x for name, x in {self.name: self.figure, **self.more}.items()}
        return write_report(folder, {"results.json": results, "results.md": self.text, **figures})


def where(machine: Mapping[str, str]) -> str:
    """What the time is of, in one phrase."""
    n = int(machine["threads"])
    place = machine.get("gpu") or f"{n} thread{'s' * (n > 1)} of {machine['processor']}"
    return f"{machine['clock']} on {place}, torch {machine['torch']}"
