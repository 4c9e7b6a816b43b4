"""Training: from a prepared task to run folders with models, their results and learning curves.

    <output>/<task>/<attention>/seed-0/    the run folder of each, see `leap.training.folder`
    <output>/<task>/budget.json            how many steps a budget gave, for all that join later
    <output>/<task>/curves.png             the learning curves of all finished runs of the task

The validation set chooses the checkpoint; the test set is looked at once, when that is done.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from leap.errors import ConfigError
from leap.models import ATTENTIONS, LeapformerForSequenceClassification, usable_as
from leap.models.mechanisms import check_options
from leap.reports.plots import plot_curves
from leap.reports.progress import Progress, Say, named, silent
from leap.tasks.lra.budget import find_steps
from leap.tasks.lra.data import TASKS, Collator, TaskDataset, load_task
from leap.tasks.lra.evaluate import ACCURACY, computing, score
from leap.tasks.lra.runs import (
    RESULTS,
    RunConfig,
    Settings,
    Variant,
    build_model,
    digest,
    make_batch,
    new_model,
    open_splits,
    run_configs,
    some,
    started_from,
)
from leap.tasks.mechanism import parse_short_form
from leap.training import Fitted, PeakBytes, RunFolder, Work, check_size, train_run
from leap.training.folder import read_results

UNIT = "nats per example"
ALL_RESULTS = {**RESULTS, "seed": int, "history": [{"step": int}]}
"""What is read of metrics.json, for reports and to draw the learning curves."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Settings):
    """Train classifiers on a task of Long Range Arena, alike but for their attention.

    By default as in the LeaPformer paper. Runs that are done are kept, and one that was stopped
    goes on: run the same command again. leap lra report makes a table of them.
    """

    attention: tuple[str, ...] = ("leapformer",)
    """Attentions, a model for each, with options after colons, as leapformer:travelled:divided; or
    all."""

    def __post_init__(self) -> None:
        super().__post_init__()
        known = usable_as("bidirectional")
        for variant in self.variants():
            if variant.attention not in known:
                raise ConfigError(
                    f"attention={variant.attention!r} is not known in encoders; there are "
                    f"{', '.join(known)}"
                )

    def variants(self) -> list[Variant]:
        """The models to train."""
        names = usable_as("bidirectional") if self.attention == ("all",) else list(self.attention)
        if not names or len(set(names)) < len(names):
            raise ConfigError(f"attention={' '.join(names)}: give one or more, none of them twice")
        made = []
        for text in names:
            attention, changes = parse_short_form(text)
            if attention in ATTENTIONS:  # Others are refused by whoever asks for the variants.
                places = changes.get("proportion", "learned")
                check_options(changes, [attention], places, divides=True)
            name = text.replace(":", "-")
            made.append(Variant(name=name, attention=attention, changes=changes))
        return made


def train(
    config: TrainConfig,
    progress: Progress = silent,
    peak_bytes: PeakBytes | None = None,
    say: Say | None = None,
) -> list[dict[str, Any]]:
    """Train a model for each attention and seed, or take up where that was stopped.

    Args:
        config: what to train.
        progress: told how far the work is.
        peak_bytes: how to measure memory, as `leap.bench.measure.peak_bytes` does; None leaves it
            out.
        say: told what there is to know before the runs begin.

    Returns:
        The results of each run, as its metrics.json has them.
    """
    return train_variants(config, config.variants(), progress, peak_bytes, say)


def train_variants(
    config: Settings,
    variants: Sequence[Variant],
    progress: Progress = silent,
    peak_bytes: PeakBytes | None = None,
    say: Say | None = None,
) -> list[dict[str, Any]]:
    """Train each variant with each seed, in equal steps."""
    # Of every run, before the first takes its hours.
    for run in run_configs(config, variants, 1):
        check_size(partial(new_model, run, TASKS[config.task]), config.device)
    if config.start is not None:
        data = load_task(config.task, config.data)
        for run in run_configs(config, variants, 1):
            started_from(run)
            build_model(run, data)
    steps = find_steps(config, variants, say)
    results = []
    for run in run_configs(config, variants, steps):
        metrics = train_one(run, named(progress, f"{run.name} seed {run.seed}"), peak_bytes)
        if not metrics:
            continue  # Not the first of several processes.
        results.append(metrics)
        _draw_all(config.output / config.task)
    return results


def _draw_all(folder: Path) -> None:
    """The learning curves of every finished run in a task's folder, whichever command made it."""
    runs = [
        read_results(path, ALL_RESULTS) for path in sorted(folder.glob("*/seed-*/metrics.json"))
    ]
    histories = {f"{run['name']} seed {run['seed']}": run["history"] for run in runs}
    batches = " or ".join(map(str, sorted({run["batch"] for run in runs})))
    title = f"{folder.name}: steps of {batches} examples"
    path = folder / "curves.png"
    plot_curves(histories, path, title, unit=UNIT, measure=ACCURACY.name)


def train_one(
    run: RunConfig, progress: Progress = silent, peak_bytes: PeakBytes | None = None
) -> dict[str, Any]:
    """One run, or what it left behind if it is done."""
    settings = asdict(run)
    for name in ("data", "output", "device"):  # The data is told by its checksums.
        settings.pop(name)
    settings["start"] = started_from(run)
    folder = RunFolder(run.output, settings, run.extends)
    return train_run(folder, ALL_RESULTS, run, lambda: _work(run, peak_bytes), progress)


def _work(run: RunConfig, peak_bytes: PeakBytes | None) -> Work:
    data = open_splits(run)
    collate = Collator(data["train"].info)

    def results(model: LeapformerForSequenceClassification, fitted: Fitted) -> dict[str, Any]:
        tests = some(data["test"], run.test_examples)
        test = score(model, tests, collate, run.at_once, bf16=run.bf16)
        return {
            "task": run.task,
            "name": run.name,
            "attention": run.attention,
            "seed": run.seed,
            "accuracy": test.accuracy,
            "loss": test.loss,
            "test": asdict(test),
            "parameters": model.num_parameters(),
            "peak_bytes": _step_bytes(model, data["train"], collate, run, peak_bytes),
            "batch": run.batch,
            "start": started_from(run),
            "device": model.device.type,
            "threads": torch.get_num_threads(),
            **asdict(fitted),
        }

    return Work(
        name=run.name,
        title=f"{run.task}, {run.name}, seed {run.seed}",
        digests={"data": digest(data["train"])},
        build=lambda: build_model(run, data["train"]),
        train=data["train"],
        held_out=some(data["valid"], run.valid_examples),
        recipe=run,
        results=results,
        unit=UNIT,
        measure=ACCURACY,
        options={
            "collate": collate,
            "lengths": data["train"].lengths if run.group_by_length else None,
        },
    )


def _step_bytes(
    model: LeapformerForSequenceClassification,
    data: TaskDataset,
    collate: Collator,
    run: RunConfig,
    peak_bytes: PeakBytes | None,
) -> int | None:
    """Memory of a step forward and backward over the first examples, on top of the model."""
    if peak_bytes is None:
        return None
    batch = make_batch(data, collate, run.at_once)
    batch = {name: x.to(model.device) for name, x in batch.items()}
    model.train()

    def step() -> None:
        with computing(model.device, bf16=run.bf16):
            loss = model(**batch).loss
        loss.backward()

    step()  # The gradients, which stay, are not what is measured.
    found = peak_bytes(step, model.device)
    model.zero_grad()
    model.eval()
    return found
