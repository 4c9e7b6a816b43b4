"""One table of several `leap explain faithfulness`: a row per method, a column per run.

    python benchmarks/explain/summary.py MEASURE FOLDER...

MEASURE is gap, deletion, insertion, "gap, random parameters" ...; folders of one name, as of
methods that were measured later, make one column.
"""

import sys
from pathlib import Path

from leap.reports.files import read_json
from leap.reports.table import tabulate


def main(measure: str, folders: list[Path]) -> str:
    """The table in Markdown; of each the mean over texts and half its 95 % interval."""
    found = {}
    for folder in folders:
        for row in read_json(folder / "results.json")["rows"]:
            if row["measure"] == measure:
                half = (row["high"] - row["low"]) / 2
                found[row["method"], folder.name] = f"{row['mean']:.2f} ± {half:.2f}"
    table = tabulate("", found, str, corner="method")
    first = table.columns[1:]
    rows = sorted(table.rows, key=lambda row: -float(row[1].split()[0]) if row[1] != "-" else 0)
    lines = [["method", *first], ["---", *("--:" for _ in first)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(main(sys.argv[1], [Path(name) for name in sys.argv[2:]]))
