"""A table on standard output."""

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

WIDTH = 160
"""Of a file or a pipe, which has none of its own: enough to leave tables whole."""


def show_table(columns: Sequence[str], rows: Sequence[Sequence[str]], title: str = "") -> None:
    """Print a table, its numbers, which begin in the second column, to the right."""
    console = Console()
    console = console if console.is_terminal else Console(width=WIDTH)
    if title:
        console.print(title, style="bold", highlight=False)
    table = Table(box=SIMPLE_HEAD)
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left", no_wrap=bool(i))
    for row in rows:
        table.add_row(*row)
    console.print(table)
