"""Recorded benchmarks as tables: JSON files with a list of records under results or rows.

A benchmark is a folder; where it has several such files, a column says which one a record is of.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from leap.errors import FileError

LISTS = ("results", "rows")
"""Under which name a file has its records."""
LARGEST = 20 * 2**20
"""Bytes of a file."""
FILE, AT = "file", "at"
"""Columns of the file that a record is of, and of the number that a value is told for."""
ACROSS = ("length", "context", "users", AT, "latency.LAAL", "threads")
UPWARDS = ("bleu", "accuracy", "perplexity", "tokens_per_second", "seconds", "mean", "cpu_ms")
BY = ("mechanism", "attention", "model", "method", FILE, "proportions", "policy", "kind")
CASES = ("gap", "forward+backward", "training step")
"""What is drawn across, upwards, as one line and alone if a benchmark has it, in this order."""

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Benchmark:
    """One recorded table."""

    name: str
    records: Sequence[Record]
    about: str
    """The machine, in a line."""

    @property
    def numbers(self) -> list[str]:
        """Columns of numbers."""
        return [name for name in self._columns() if self._all(name, int | float)]

    @property
    def words(self) -> list[str]:
        """Columns of words that differ."""
        return [
            name
            for name in self._columns()
            if self._all(name, str) and len({record.get(name) for record in self.records}) > 1
        ]

    def choose(self) -> tuple[str, str, str | None]:
        """What to draw across, upwards, and a line of, unless told."""
        varied = [x for x in self.numbers if len({r.get(x) for r in self.records}) > 1]
        named = [name for name in BY if name in self.words] or self.words
        x = next((name for name in ACROSS if name in varied), None)
        if x is None:
            x = named.pop(0) if named else (varied or self.numbers)[0]
        else:
            named = [name for name in named if self._repeats(name)]
        pool = [name for name in varied or self.numbers if name != x] or self.numbers
        y = next((name for name in UPWARDS if name in pool), pool[0])
        return x, y, named[0] if named else None

    def cases(self, *drawn: str | None) -> list[str]:
        """What records differ in besides what is drawn: `column = value`."""
        return [
            f"{name} = {value}"
            for name in self.words
            if name not in drawn
            for value in dict.fromkeys(record[name] for record in self.records if name in record)
        ]

    def usual(self, *drawn: str | None) -> list[str]:
        """One value of each other column, as long as what is drawn has more than one place."""
        found: dict[str, str] = {}
        for case in self.cases(*drawn):
            name, _, value = case.partition(" = ")
            others = [each for key, each in found.items() if key != name]
            places = [tuple(map(r.get, drawn)) for r in self.where(others)]  # type: ignore[arg-type]
            if len(set(places)) < len(places) and (name not in found or value in CASES):
                found[name] = case
        return list(found.values())

    def where(self, cases: Sequence[str]) -> list[Record]:
        """The records of these cases; of a column that none names, all."""
        wanted: dict[str, set[str]] = {}
        for case in cases:
            name, _, value = case.partition(" = ")
            wanted.setdefault(name, set()).add(value)
        return [
            record
            for record in self.records
            if all(str(record.get(name)) in values for name, values in wanted.items())
        ]

    def _repeats(self, name: str) -> bool:
        """Whether some of the records have the same value."""
        values = [record.get(name) for record in self.records]
        return len(set(values)) < len(values)

    def _columns(self) -> list[str]:
        return list(dict.fromkeys(name for record in self.records for name in record))

    def _all(self, name: str, kind: Any) -> bool:
        values = [record[name] for record in self.records if name in record]
        return bool(values) and all(isinstance(x, kind) and x is not True for x in values)


def read_benchmarks(folder: Path) -> dict[str, Benchmark]:
    """All benchmarks of a folder, by name; files of another kind are passed over."""
    found = {}
    for place in sorted(path for path in folder.iterdir() if path.is_dir()):
        files = {path.stem: _read(path) for path in sorted(place.glob("*.json"))}
        tables = {stem: each for stem, each in files.items() if each is not None}
        records = [
            {**record, **({FILE: stem} if len(tables) > 1 else {})}
            for stem, (rows, _) in tables.items()
            for record in rows
        ]
        about = next((about for _, about in tables.values() if about), "")
        benchmark = Benchmark(place.name, records, about)
        if benchmark.numbers:
            found[place.name] = benchmark
    return found


def _read(path: Path) -> tuple[list[dict[str, Any]], str] | None:
    """Records of a file, and the machine; None if it is none of these."""
    if path.stat().st_size > LARGEST:
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise FileError(f"{path} is no whole JSON file ({error}); record it again") from error
    if not isinstance(content, dict):
        return None
    lists = [content[key] for key in LISTS if isinstance(content.get(key), list)]
    if not lists or not all(isinstance(row, dict) for row in lists[0]):
        return None
    machine = content.get("machine")
    about = ", ".join(f"{k} {v}" for k, v in machine.items()) if isinstance(machine, dict) else ""
    return [record for row in lists[0] for record in _spread(flat(row))], about


def flat(row: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """A record without records in it: `latency.LAAL`; only words and numbers are kept."""
    found: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{before}{name}.")
        elif isinstance(value, str) or (
            isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        ):
            found[before + name] = value
    return found


def _spread(record: dict[str, Any]) -> list[dict[str, Any]]:
    """A record for each number that values are told for: `accuracy.64`, `accuracy.256`."""
    told: dict[int, dict[str, Any]] = {}
    rest: dict[str, Any] = {}
    for name, value in record.items():
        first, _, last = name.rpartition(".")
        if first and last.isdecimal():
            told.setdefault(int(last), {})[first] = value
        else:
            rest[name] = value
    return [{**rest, AT: at, **values} for at, values in told.items()] or [rest]
