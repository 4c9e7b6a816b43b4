"""What one run is: a model, how it is trained, on which examples, and where it goes."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.utils.data import Dataset, Subset
from transformers.utils import SAFE_WEIGHTS_NAME

from leap.errors import ConfigError, FileError
from leap.models import LeapformerForSequenceClassification
from leap.models.config import Pooling
from leap.reports.files import read_json
from leap.tasks.lra.cache import SPLITS
from leap.tasks.lra.data import DATA, TASKS, Collator, TaskDataset, TaskInfo, load_task
from leap.tasks.lra.model import EPSILON, encoder_config, paper
from leap.training import DeviceName, Recipe

RUNS = Path("runs/lra")
RESULTS = {
    "task": str,
    "name": str,
    "steps": int,
    "batch": int,
    "device": str,
    "accuracy": float,
    "parameters": int,
    "peak_bytes": float | None,
    "seconds_per_step": float | None,
    "cpu_seconds_per_step": float | None,
    "test": {"examples": int, "seconds": float, "cpu_seconds": float},
}
"""What reports read of a run's metrics.json."""
"""Where runs are kept, unless told otherwise."""
LOOKS = 20
"""Looks at the validation set in a run, unless told otherwise."""
FEWEST_STEPS_BETWEEN_LOOKS = 50
POSITIONS = "model.embed_positions.weight"
"""Weights that there are more of where texts are longer."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What training and its ablations have in common."""

    task: str = "listops"
    """Task: listops, text, retrieval, retrieval-standin, image, pathfinder; or an easier level, as
    listops-easy or pathfinder-intermediate. Made by leap lra prepare."""
    seeds: tuple[int, ...] = (0,)
    """Seeds of the weights and of the order of the data; a run for each."""
    steps: int | None = None
    """Optimiser steps; by default the paper's, 20,000 to 50,000."""
    budget: float | None = None
    """Minutes for all runs of this command together, in place of steps: a few are timed, and every
    run gets as many as fit. By default there is no limit."""
    batch: int | None = None
    """Examples in each step; by default the paper's, 16 to 256."""
    accumulate: int = 1
    """Parts each batch is computed in: less memory, the same result."""
    learning_rate: float | None = None
    """Peak learning rate of AdamW; by default the paper's, 1e-4 or 2e-4."""
    warmup: float | None = None
    """Share of the steps in which the learning rate rises; above 1, their number. By default
    the paper's share."""
    schedule: Literal["linear", "cosine", "constant"] = "linear"
    """Learning-rate schedule after the warm-up; in the paper linear."""
    pooling: Pooling = "mean"
    """How a text becomes one vector: mean, last, or cls, a token of its own."""
    dropout: float = 0.1
    """Of embeddings, attended values and feed-forward layers."""
    attention_dropout: float = 0.0
    """Of scores, or of what attentions without scores have instead. The authors' code has 0.1,
    which reaches only two of its attentions."""
    evaluate_every: int | None = None
    """Steps between evaluations on the validation set; by default 20 of them, at least 50 apart."""
    valid_examples: int | None = 1000
    """Examples of the validation set to evaluate on; None for all."""
    test_examples: int | None = None
    """Examples of the test set to evaluate on; by default all."""
    bf16: bool = False
    """Compute in bfloat16 where that is safe."""
    group_by_length: bool = True
    """Make batches of inputs of about one length, so that little is filled up: on texts, twice as
    fast and more."""
    device: DeviceName | None = None
    """Where to compute: cpu, cuda or mps; by default a GPU if there is one."""
    start: Path | None = None
    """Folder of finished runs of an easier level or of shorter texts, as runs/lra/listops-easy:
    each model begins with the weights that the run of its name and seed ended with, and positions
    beyond those with new ones. By default all weights are new."""
    data: Path = DATA
    """Folder of prepared tasks."""
    output: Path = RUNS
    """Folder for the runs; a run that is there is kept, and one that was stopped goes on."""

    def __post_init__(self) -> None:
        if self.task not in TASKS:
            raise ConfigError(f"task={self.task!r} is not known; there are {', '.join(TASKS)}")
        if self.steps is not None and self.budget is not None:
            raise ConfigError(f"steps={self.steps} and budget={self.budget}: give one of them")
        if self.budget is not None and not self.budget > 0:
            raise ConfigError(f"budget={self.budget} must be more than 0 minutes")
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise ConfigError(f"seeds={self.seeds}: give one or more, none of them twice")
        if not all(0 <= seed < 2**32 for seed in self.seeds):
            raise ConfigError(f"seeds={self.seeds} must be from 0 to less than 2^32")
        for name in ("evaluate_every", "valid_examples", "test_examples"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value} must be 1 or more")
        self.recipe(paper(self.task).steps if self.steps is None else self.steps, 0)

    def recipe(self, steps: int, seed: int) -> dict[str, Any]:
        """How to train for a number of steps, as fields of a checked `Recipe`."""
        known = paper(self.task)
        every = self.evaluate_every
        if every is None:
            every = max(min(max(steps // LOOKS, FEWEST_STEPS_BETWEEN_LOOKS), steps), 1)
        recipe = Recipe(
            steps=steps,
            batch=known.batch if self.batch is None else self.batch,
            accumulate=self.accumulate,
            learning_rate=known.learning_rate if self.learning_rate is None else self.learning_rate,
            schedule=self.schedule,
            warmup=known.warmup / known.steps if self.warmup is None else self.warmup,
            epsilon=EPSILON,
            bf16=self.bf16,
            device=self.device,
            seed=seed,
            evaluate_every=every,
            log_every=next(n for n in range(min(every, 10), 0, -1) if every % n == 0),
        )
        return asdict(recipe)


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A model to train: an attention, and what of its config is not the paper's."""

    name: str
    attention: str
    changes: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RunConfig(Recipe):
    """All that one run is defined by, and where its data and its folder are."""

    task: str
    name: str
    """What the attention is called in tables."""
    attention: str
    changes: dict[str, Any]
    """Of the model's config."""
    valid_examples: int | None
    test_examples: int | None
    group_by_length: bool
    start: Path | None
    """Folder of the run whose weights it begins with."""
    data: Path
    output: Path

    @property
    def at_once(self) -> int:
        """Examples that are computed at once."""
        return self.batch // self.accumulate


def run_configs(config: Settings, variants: Sequence[Variant], steps: int) -> list[RunConfig]:
    """Every run, the seeds of a variant one after another."""
    model = {
        "pooling": config.pooling,
        "hidden_dropout_prob": config.dropout,
        "attention_dropout": config.attention_dropout,
    }
    return [
        RunConfig(
            **config.recipe(steps, seed),
            task=config.task,
            name=variant.name,
            attention=variant.attention,
            changes=model | variant.changes,
            valid_examples=config.valid_examples,
            test_examples=config.test_examples,
            group_by_length=config.group_by_length and TASKS[config.task].pad_id is not None,
            start=None if config.start is None else config.start / variant.name / f"seed-{seed}",
            data=config.data,
            output=config.output / config.task / variant.name / f"seed-{seed}",
        )
        for variant in variants
        for seed in config.seeds
    ]


def new_model(run: RunConfig, info: TaskInfo) -> LeapformerForSequenceClassification:
    """The model of a run on a task, with new weights."""
    return LeapformerForSequenceClassification(encoder_config(info, run.attention, **run.changes))


def build_model(run: RunConfig, data: TaskDataset) -> LeapformerForSequenceClassification:
    """The model of a run, with new weights or those of the run it starts from."""
    model = new_model(run, data.info)
    if run.start is not None:
        _load_start(model, run.start)
    return model


def _load_start(model: LeapformerForSequenceClassification, start: Path) -> None:
    """Begin with a run's weights, and with as many of its positions as both have."""
    path = start / "model" / SAFE_WEIGHTS_NAME
    try:
        found = load_file(path)
    except (OSError, SafetensorError) as error:
        raise FileError(f"start: {path} cannot be read ({error})") from error
    own = model.state_dict()
    if POSITIONS in found and POSITIONS in own:
        n = min(len(found[POSITIONS]), len(own[POSITIONS]))
        found[POSITIONS] = torch.cat([found[POSITIONS][:n], own[POSITIONS][n:]])
    shapes, wanted = ({name: list(x.shape) for name, x in y.items()} for y in (found, own))
    for name in sorted(shapes.keys() | wanted.keys()):
        if shapes.get(name) != wanted.get(name):
            raise ConfigError(
                f"start: the model in {start} has {name} {shapes.get(name, 'not at all')}, where "
                f"this one has {wanted.get(name, 'nothing')}; start from a run of a like model"
            )
    model.load_state_dict(found)


def started_from(run: RunConfig) -> str | None:
    """What a run begins with, in words: `listops-easy, 1000 steps of 32`."""
    if run.start is None:
        return None
    path = run.start / "metrics.json"
    if not path.exists():
        raise FileError(f"start: there is no finished run in {run.start}; train it first")
    metrics = read_json(path)
    try:
        words = f"{metrics['task']}, {metrics['steps']} steps of {metrics['batch']}"
    except KeyError as error:
        raise FileError(f"{path} has no {error}: it is of no run of leap lra train") from error
    before = metrics.get("start")
    return words if before is None else f"{before}; {words}"


def some(data: TaskDataset, count: int | None) -> Dataset[dict[str, Tensor]]:
    """`count` of the examples, the same for every run; files may have them sorted by class.

    Short ones come first, so that batches of them have little to fill up.
    """
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(0))[:count]
    lengths = torch.from_numpy(data.lengths)[order]
    return Subset(data, order[lengths.argsort(stable=True)].tolist())


def open_splits(run: RunConfig) -> dict[str, TaskDataset]:
    """The examples of the task: train, valid and test."""
    found = {split: load_task(run.task, run.data, split) for split in SPLITS}
    if run.test_examples is not None and run.test_examples > len(found["test"]):
        raise ConfigError(
            f"test_examples={run.test_examples}: {run.task} has {len(found['test'])} tests"
        )
    return found


def make_batch(
    data: Dataset[dict[str, Tensor]], collate: Collator, size: int, start: int = 0
) -> dict[str, Tensor]:
    """`size` examples of the data from `start` on, beginning anew where it ends."""
    n = len(data)  # type: ignore[arg-type]
    return collate([data[i % n] for i in range(start, start + size)])


def digest(data: TaskDataset) -> str:
    """Of all splits, by the checksums that were written with them."""
    sums = "".join(file["sha256"] for _, file in sorted(data.facts["files"].items()))
    return sha256(sums.encode()).hexdigest()[:16]
