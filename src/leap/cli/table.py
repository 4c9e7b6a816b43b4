"""A table on standard output, and where files were written."""

from collections.abc import Iterable
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table as Columns

from leap.reports.table import Table

WIDTH = 160
"""Of a file or a pipe, which has none of its own: enough to leave tables whole."""


def show_table(table: Table) -> None:
    """Print a table, its numbers, which begin in the second column, to the right."""
    console = Console()
    console = console if console.is_terminal else Console(width=WIDTH)
    if table.title:
        console.print(table.title, style="bold", highlight=False)
    shown = Columns(box=SIMPLE_HEAD)
    for i, column in enumerate(table.columns):
        shown.add_column(column, justify="right" if i else "left", no_wrap=bool(i))
    for row in table.rows:
        shown.add_row(*row)
    console.print(shown)


def show_written(folder: Path, names: Iterable[str]) -> None:
    """Say where files are."""
    for name in names:
        print(f"wrote {folder / name}")
