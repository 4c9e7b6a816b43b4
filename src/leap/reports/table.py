"""Tables as text: Markdown to read, CSV to go on with."""

import csv
import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

KIB, MIB = 2**10, 2**20


@dataclass(frozen=True)
class Table:
    """Numbers as they are to be read."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


def markdown(*parts: str | Table) -> str:
    """Paragraphs and tables in Markdown; numbers, from the second column on, to the right."""
    texts = []
    for part in parts:
        if isinstance(part, str):
            texts.append(part)
            continue
        if part.title:
            texts.append(f"**{part.title}**")
        lines = [part.columns, ["---", *("--:" for _ in part.columns[1:])], *part.rows]
        texts.append("\n".join("| " + " | ".join(line) + " |" for line in lines))
    return "\n\n".join(texts) + "\n"


def csv_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A table in CSV, its columns named as the first row's are; nothing for None."""
    text = io.StringIO()
    if rows:
        writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return text.getvalue()


def digits(x: float | int) -> str:
    """Two or three digits that count, without an exponent."""
    if x >= 10:
        return f"{x:.0f}"
    return f"{x:.2f}" if x < 1 else f"{x:.1f}"


def times(x: float | int) -> str:
    """A factor."""
    return f"{digits(x)}x"


def percent(x: float | int) -> str:
    """A share."""
    return f"{100 * x:.0f} %"


def optional(value: float | int | None, n_digits: int) -> str:
    """A number with `n_digits` digits behind the point; nothing for None."""
    return "" if value is None else f"{value:,.{n_digits}f}"


def perplexity(x: float | int, n_digits: int) -> str:
    """With so many digits behind the point, while it says something."""
    return f"{x:,.{n_digits}f}" if x < 1e6 else "over 1,000,000"


def tabulate(
    title: str,
    numbers: Mapping[tuple[str, Any], float | int],
    show: Callable[[float], str] = digits,
    *,
    corner: str = "tokens",
    growth: bool = False,
) -> Table:
    """A row for each name and a column for each number of tokens, or whatever else `corner` says.

    Args:
        title: of the table.
        numbers: by name and column; what is missing is a dash.
        show: a number as text.
        corner: what the columns are.
        growth: add a column with the exponent e of t^e between the two longest lengths.
    """
    names = list(dict.fromkeys(name for name, _ in numbers))
    across = list(dict.fromkeys(column for _, column in numbers))
    if all(isinstance(column, int) for column in across):
        across.sort()
    columns = [corner, *map(str, across)]
    rows = [
        [name, *(show(numbers[name, x]) if (name, x) in numbers else "-" for x in across)]
        for name in names
    ]
    if growth and len(across) > 1:
        columns.append("growth")
        for row in rows:
            before, last = (numbers[row[0], length] for length in across[-2:])
            longer = across[-1] / across[-2]
            row.append(f"t^{math.log(last / before, longer):.1f}" if before else "")
    return Table(title, columns, rows)
