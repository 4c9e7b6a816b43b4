"""Evaluations beside each other: quality and latency of each policy, in one table and one picture.

    report.md      BLEU and LAAL, a row for each evaluation and a column for each policy
    report.csv     the same numbers, unrounded, a line for each evaluation and policy
    report.png     quality against latency, a line for each evaluation

Only what was evaluated alike can be compared: on the same sentences, with the same search, scored
the same way.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from leap.errors import ConfigError, FileError
from leap.reports.files import read_json, write_report
from leap.reports.table import Table, csv_table, markdown
from leap.tasks.simul.scoring.curves import Point, families, plot_quality


@dataclass(frozen=True, kw_only=True)
class ReportConfig:
    """Put evaluations of several models beside each other, in one table and one picture."""

    evals: tuple[Path, ...]
    """Folders that leap simul eval has written, two or more; their names are those of the rows."""
    output: Path = Path("runs/simul-report")
    """Folder for report.md, report.csv and report.png."""

    def __post_init__(self) -> None:
        names = [path.name for path in self.evals]
        if not names or len(set(names)) < len(names):
            raise ConfigError(f"evals={' '.join(names)}: give one or more, each of another name")


@dataclass(frozen=True)
class Evaluation:
    """What one folder holds."""

    name: str
    points: Mapping[str, Point]
    """Latency and quality by the policy's name; latency is nan where there is none."""
    alike: Mapping[str, Any]
    """What it must have in common with others."""


def report(config: ReportConfig) -> list[Table]:
    """Read the evaluations, and write the tables and the picture."""
    found = [read_evaluation(path) for path in config.evals]
    check_alike(found)
    shown = tables(found)
    lines, alike = _lines(found), found[0].alike
    picture = plot_quality(lines, alike["unit"], alike["part"], named=list(lines)[:1])
    records = [
        {
            "evaluation": each.name,
            "policy": policy,
            "bleu": bleu,
            "laal": None if math.isnan(laal) else laal,
        }
        for each in found
        for policy, (laal, bleu) in each.points.items()
    ]
    files = {"report.md": markdown(*shown), "report.csv": csv_table(records), "report.png": picture}
    write_report(config.output, files)
    return shown


def read_evaluation(folder: Path) -> Evaluation:
    """What `leap simul eval` has left in a folder."""
    if not (folder / "results.json").is_file():
        raise FileError(f"no evaluation at {folder}; make one with leap simul eval")
    facts = read_json(folder / "results.json")
    try:
        results = facts["results"]
        points = {
            each["policy"]: (_or_nan(each["latency"].get("LAAL")), each["bleu"]) for each in results
        }
        alike = {
            "part": facts["part"],
            "unit": facts["unit"],
            "sentences": results[0]["sentences"],
            "beam": facts["config"]["beam"],
            "long_form": facts["config"]["long_form"],
            "bleu_signature": results[0]["bleu_signature"],
        }
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise FileError(
            f"{folder / 'results.json'} is of no evaluation of leap simul eval ({error})"
        ) from error
    return Evaluation(folder.name, points, alike)


def check_alike(found: Sequence[Evaluation]) -> None:
    """Refuse what cannot be compared."""
    first = found[0]
    for other in found[1:]:
        for name, value in first.alike.items():
            if other.alike[name] != value:
                raise ConfigError(
                    f"{first.name} has {name}={value} and {other.name} {other.alike[name]}: they "
                    "cannot be compared; evaluate them alike"
                )


def tables(found: Sequence[Evaluation]) -> list[Table]:
    """Quality, and latency."""
    policies = list(dict.fromkeys(policy for each in found for policy in each.points))
    unit = found[0].alike["unit"]
    return [
        Table(
            title,
            ["evaluation", *policies],
            [[each.name, *(_number(each, policy, place) for policy in policies)] for each in found],
        )
        for title, place in (("BLEU", 1), (f"LAAL, {unit}", 0))
    ]


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value


def _number(evaluation: Evaluation, policy: str, place: int) -> str:
    value = evaluation.points[policy][place] if policy in evaluation.points else math.nan
    return "" if math.isnan(value) else f"{value:.2f}"


def _lines(found: Sequence[Evaluation]) -> dict[str, dict[str, Point]]:
    """The points of each evaluation, apart by kinds of policy if it has several."""
    lines = {}
    for each in found:
        shown = {name: point for name, point in each.points.items() if not math.isnan(point[0])}
        kinds = families(list(shown))
        for family, names in kinds.items():
            label = each.name if len(kinds) == 1 else f"{each.name}, {family}"
            lines[label] = {name: shown[name] for name in names}
    return lines
