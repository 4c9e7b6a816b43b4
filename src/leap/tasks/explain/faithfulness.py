"""Whether explanations of a trained model are faithful, measured on texts that it has not seen.

Of a language model only predictions that rest on the past are looked at: those in which the token
that came is more likely by e, one nat, after the whole text than after its last token alone.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from leap.errors import ConfigError, FileError
from leap.explain.faithfulness import (
    Case,
    Faithfulness,
    check_methods,
    curves_figure,
    measure,
    report_table,
)
from leap.explain.importance import METHODS, log_probabilities
from leap.reports.files import write_report
from leap.reports.progress import Progress, Status, silent
from leap.reports.table import csv_table, markdown
from leap.tasks.explain.runs import Run, open_run

GAIN = 1.0
"""Nats by which the past must help a prediction of a language model."""
CANDIDATES = 12
"""Texts of a language model to look at, for each that is wanted."""


@dataclass(frozen=True, kw_only=True)
class FaithfulnessConfig:
    """Measure whether what explanations call important is: strike it out, and see."""

    run: Path
    """Run folder of a language model or of a classifier of texts."""
    data: str | None = None
    """Texts: for a language model what leap lm train takes, by default what it was trained on, of
    which the test part is used; for a classifier a JSON Lines file, by default IMDb's tests in
    LEAP_DATA."""
    texts: int = 200
    """How many texts."""
    length: int = 64
    """Tokens of each; of a classifier, at most."""
    methods: tuple[str, ...] = tuple(METHODS)
    """Methods to compare."""
    output: Path = Path("runs/explain/faithfulness")
    """Folder for results.md, results.csv, results.json and curves.png."""

    def __post_init__(self) -> None:
        for name in ("texts", "length"):
            if getattr(self, name) < 2:
                raise ConfigError(f"{name}={getattr(self, name)} must be 2 or more")
        check_methods(self.methods)


def faithfulness(config: FaithfulnessConfig, progress: Progress = silent) -> Faithfulness:
    """Measure as the config says, and write tables and curves."""
    write_report(config.output, {})
    run = open_run(config.run)
    if run.kind == "translation":
        raise FileError(f"{config.run} translates; give a language model or a classifier")
    cases = find_cases(run, config, progress)
    found = measure(run.model, cases, config.methods, progress)
    title = f"{run.name}: {found.n_texts} texts of up to {config.length} tokens, in nats"
    files = {
        "results.md": markdown(report_table(found, title), "![curves](curves.png)"),
        "results.csv": csv_table(found.records()),
        "results.json": {"texts": found.n_texts, "best": found.best(), "rows": found.records()},
        "curves.png": curves_figure(found, title),
    }
    write_report(config.output, files)
    return found


@torch.no_grad()
def find_cases(run: Run, config: FaithfulnessConfig, progress: Progress = silent) -> list[Case]:
    """Texts, and what the model predicts for them: its class, or the token that did come."""
    cases: list[Case] = []
    n = config.texts * (CANDIDATES if run.kind == "lm" else 1)
    for ids in run.texts(config.data, config.length, n):
        if run.kind == "lm":
            text, target = ids[:, :-1], int(ids[0, -1])
            seen, unseen = (
                log_probabilities(run.model, input_ids=each)[0, target]
                for each in (text, text[:, -1:])
            )
            if float(seen - unseen) >= GAIN:
                cases.append(Case(text, target))
        else:
            cases.append(Case(ids, int(log_probabilities(run.model, input_ids=ids)[0].argmax())))
        progress(Status(len(cases), config.texts, doing="finding texts"))
        if len(cases) == config.texts:
            return cases
    if not cases:
        raise FileError(
            f"data={config.data or 'of the run'} has no text in which the past helps a prediction "
            f"by {GAIN} nat; give more text, or a model that has learned more"
        )
    return cases
