"""One run, from its folder to its results: what the trainings of all tasks have in common."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import PreTrainedModel, set_seed

from leap.reports.plots import plot_curves
from leap.reports.progress import Progress, silent
from leap.training.fit import Fitted, Measure, check_fit, fit, processes, quiet
from leap.training.folder import Like, RunFolder
from leap.training.recipe import Recipe

PeakBytes = Callable[[Callable[[], object], torch.device], int]
"""Measures the most memory that a call holds at once."""


def save_weights(model: PreTrainedModel, path: Path) -> None:
    """Write a model's weights and its config, without a word."""
    with quiet():
        model.save_pretrained(str(path))


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a run learns, from what, and what becomes of it."""

    name: str
    """Of the run in its learning curve."""
    title: str
    """Of the learning curve."""
    digests: Mapping[str, str]
    """Of the data, which must be the same whenever the run goes on."""
    build: Callable[[], Any]
    """Makes the model; random numbers begin with the recipe's seed."""
    train: Dataset[Any]
    held_out: Dataset[Any]
    recipe: Recipe
    """How to train: that of the run, or with what followed from the data."""
    results: Callable[[Any, Fitted], dict[str, Any]]
    """What to keep of the trained model and of how it went, for metrics.json."""
    save: Callable[[Any, Path], None] = save_weights
    """Writes the model to a new folder."""
    folders: Mapping[str, Callable[[Path], object]] = field(default_factory=dict)
    """What else the run folder holds from the start, as a tokenizer: writers by name."""
    unit: str = "nats per token"
    """Of the loss."""
    measure: Measure | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of `fit`."""


def train_run(
    folder: RunFolder,
    like: Like,
    recipe: Recipe,
    prepare: Callable[[], Work],
    progress: Progress = silent,
) -> dict[str, Any]:
    """Train, or go on with it, or, if that has been done, tell the results.

    Under `torchrun` every process calls this; the first one writes, the others are told nothing.

    Args:
        folder: of the run.
        like: what its results must hold.
        recipe: where to compute, and the random seed.
        prepare: reads the data; the first process does so before the others.
        progress: told how far the run is.

    Returns:
        The results, as metrics.json has them.
    """
    finished = folder.metrics(like)
    group = processes(recipe.device)
    # The first process alone makes the folder and what is in it; the others find them.
    with group.main_process_first():
        work = prepare()
        if finished is None:
            set_seed(recipe.seed)
            model = work.build()
            check_fit(model, work.train, work.recipe, folder)  # Before anything is written.
        folder.create(work.digests)  # Refuses other data.
        for name, write in work.folders.items():
            if not (folder.path / name).exists():
                folder.write_folder(name, write)
    if finished is not None:
        return finished if group.is_main_process else {}
    with folder.alone() if group.is_main_process else nullcontext():
        fitted = fit(
            model,
            work.train,
            work.held_out,
            work.recipe,
            folder,
            progress,
            measure=work.measure,
            **work.options,
        )
        if not group.is_main_process:
            return {}
        metrics = work.results(model, fitted)
        folder.write_folder("model", lambda path: work.save(model, path))
        plot_curves(
            {work.name: fitted.history},
            folder.path / "curve.png",
            work.title,
            unit=work.unit,
            measure=None if work.measure is None else work.measure.name,
        )
        metrics["history"] = metrics.pop("history")  # Long, so last.
        folder.write_metrics(metrics)
        return metrics
