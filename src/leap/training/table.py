"""Tables as text: Markdown to read, CSV to go on with."""

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown, its numbers, which begin in the second column, to the right."""
    ruler = ["---", *("--:" for _ in columns[1:])]
    lines = [columns, ruler, *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def csv_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A table in CSV, its columns named as the first row's are; nothing for None."""
    text = io.StringIO()
    if rows:
        writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return text.getvalue()
