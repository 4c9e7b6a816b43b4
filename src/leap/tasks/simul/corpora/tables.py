"""Tables with tabs between columns and their names in the first line, as fairseq writes them."""

import csv
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from leap.errors import FileError


class _Dialect(csv.Dialect):
    delimiter = "\t"
    quoting = csv.QUOTE_NONE
    quotechar = None
    escapechar = "\\"
    doublequote = False
    lineterminator = "\n"


def read_table(path: Path, columns: Sequence[str]) -> list[dict[str, str]]:
    """The rows of a table.

    Args:
        path: of the file.
        columns: those it must have.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file, dialect=_Dialect, restval="")
            found = reader.fieldnames or []
            for column in columns:
                if column not in found:
                    raise FileError(
                        f"{path} has no column {column}; it has {', '.join(found) or 'none'}"
                    )
            return list(reader)
    except FileNotFoundError as error:
        raise FileError(f"no table at {path}") from error
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise FileError(f"{path} is no table in UTF-8 ({error})") from error


def write_table(path: Path, columns: Sequence[str], rows: Iterable[Mapping[str, object]]) -> None:
    """Write a table, whole or not at all."""
    unfinished = path.with_name(f".{path.name}.part")
    with unfinished.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, columns, dialect=_Dialect)
        writer.writeheader()
        writer.writerows(rows)
    unfinished.replace(path)
