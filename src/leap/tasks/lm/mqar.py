"""How much a model remembers at once: multi-query associative recall (MQAR).

    k1 v1 k2 v2 ... kn vn  x k2 x x kn x k1 ...      the model is to go on with v2, vn and v1

"Zoology: Measuring and Improving Recall in Efficient Language Models", Arora et al. 2023, arXiv
2312.04927. Pairs of a key and a value come first, each key once. Then every key is asked for once,
in any order, at gaps drawn from a power law: most of them soon. What is left is filled with random
tokens. Loss and accuracy are of the answers alone.

Where we leave the paper: no filler is a key of its sequence, so that each question has one answer;
every batch is drawn anew; and the length follows from the number of pairs.

    results.json, results.md   share of right answers by number of pairs, for each model and width
    mqar.png                   the same as a picture
    <model>-<width>/seed-0/    the run folder of each
"""

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedModel, set_seed

from leap.errors import ConfigError
from leap.reports.plots import Line
from leap.reports.progress import Progress, Status, named, silent
from leap.reports.table import Table, markdown
from leap.tasks.lm.compare import folder_name, parse_model
from leap.tasks.lm.memory import (
    IGNORED,
    Remembered,
    ask,
    build_unbounded,
    write_results,
)
from leap.tasks.lm.model import SizeConfig
from leap.training import Recipe, RunFolder, check_size, fit

POWER = 0.01
"""Gaps g = 1, 2, ... are drawn in proportion to g^(POWER - 1), as in the paper."""
TRAIN, HELD_OUT, TEST = range(3)
"""Parts of the data; with the random seed, each has sequences of its own."""


@dataclass(frozen=True, kw_only=True)
class MqarConfig:
    """Measure how many pairs models recall at once (MQAR), by their width.

    Sequences hold pairs of a key and a value, then ask for the value of each key. Runs that are
    done are kept, and one that was stopped goes on: run the same command again.
    """

    models: tuple[str, ...] = (
        "softmax:rotary:conv4",
        "leapformer:travelled:gate:conv4",
        "gated-delta:conv4",
        "linear:gate:conv4",
    )
    """Models, by the short forms of leap lm compare; without positions unless they are named, and
    none of them with learned ones."""
    widths: tuple[int, ...] = (32, 64, 128)
    """Widths of each model."""
    n_layer: int = 2
    """Layers."""
    n_head: int = 1
    """Heads in each layer."""
    vocabulary: int = 8192
    """Different tokens: one half are keys, the other values."""
    pairs: tuple[int, ...] = (4, 8, 16, 32, 64)
    """Numbers of pairs to test with."""
    train_pairs: tuple[int, ...] = (4, 8, 16, 32, 64)
    """Numbers of pairs to train with, batch by batch in turn."""
    length: int = 64
    """Tokens in the shortest sequences."""
    tokens_per_pair: int = 8
    """Tokens in a sequence for each pair, where that is more than length; 4 or more."""
    sequences: int = 64
    """Sequences to test with, for each number of pairs."""
    steps: int = 900
    """Optimiser steps, at the most."""
    batch_tokens: int = 4096
    """Tokens in each step: many short sequences, or a few long ones."""
    learning_rate: float = 3e-3
    """Peak learning rate of AdamW."""
    schedule: Literal["linear", "cosine", "constant"] = "cosine"
    """Learning-rate schedule after the warm-up."""
    warmup: float = 0.05
    """Share of the steps in which the learning rate rises to its peak; above 1, their number."""
    weight_decay: float = 0.0
    """Weight decay of AdamW."""
    evaluate_every: int = 100
    """Steps between evaluations on held-out sequences, each of which writes a checkpoint."""
    enough: float = 0.99
    """Early stopping: once this share of answers is right at every number of pairs in training."""
    seeds: tuple[int, ...] = (0,)
    """Random seeds of weights and data, a run for each."""
    output: Path = Path("runs/mqar")
    """Folder for the table, the picture and the run folders."""

    def __post_init__(self) -> None:
        for name in ("models", "widths", "pairs", "train_pairs", "seeds"):
            given = getattr(self, name)
            if not given or len(set(given)) < len(given):
                text = " ".join(map(str, given))
                raise ConfigError(f"{name}={text}: give one or more, none of them twice")
        for name, least in (("tokens_per_pair", 4), ("sequences", 1), ("length", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name}={getattr(self, name)} must be {least} or more")
        for name in ("widths", "pairs", "train_pairs"):
            if min(getattr(self, name)) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}: give 1 or more for each")
        most = max(*self.pairs, *self.train_pairs)
        if self.vocabulary < 2 * most:
            raise ConfigError(
                f"vocabulary={self.vocabulary} is too small for {most} pairs, whose keys and "
                f"values all differ; give {2 * most} or more"
            )
        longest = self.length_of(max(self.train_pairs))
        if self.batch_tokens < longest:
            raise ConfigError(
                f"batch_tokens={self.batch_tokens} is less than the {longest} tokens of a sequence "
                f"of {max(self.train_pairs)} pairs"
            )
        if not 0 < self.enough <= 1:
            raise ConfigError(f"enough={self.enough} must be more than 0, and 1 or less")
        for seed in self.seeds:
            self.recipe(seed)
        for model in self.models:
            parse_model(model)

    def length_of(self, pairs: int) -> int:
        """Tokens in a sequence with this number of pairs."""
        return max(self.length, self.tokens_per_pair * pairs)

    def recipe(self, seed: int) -> Recipe:
        """How to train; the examples are whole batches."""
        return Recipe(
            steps=self.steps,
            batch=1,
            learning_rate=self.learning_rate,
            schedule=self.schedule,
            warmup=self.warmup,
            weight_decay=self.weight_decay,
            seed=seed,
            evaluate_every=self.evaluate_every,
            log_every=math.gcd(10, self.evaluate_every),
        )


@dataclass(frozen=True)
class Row:
    """How well a model of one width did."""

    model: str
    width: int
    parameters: int
    accuracy: dict[int, float]
    """Share of right answers by number of pairs, the mean over seeds."""
    spread: dict[int, float] | None
    """Its standard deviation over seeds, if there are several."""
    by_seed: dict[int, dict[int, float]]
    """The share by seed and number of pairs."""


@dataclass(frozen=True)
class Numbers:
    """A vocabulary of tokens that spell nothing."""

    vocab_size: int
    eos_id: int = 0
    fingerprint: str = "numbers"


def draw_sequences(
    draw: np.random.Generator, *, count: int, pairs: int, length: int, vocabulary: int
) -> dict[str, Tensor]:
    """Sequences with all their questions, as a model's forward takes them.

    `shift_labels` has the value of a key where the key is asked for, and -100 elsewhere.
    """
    half = vocabulary // 2
    slots = (length - 2 * pairs) // 2
    weights = np.arange(1, slots + 1) ** (POWER - 1)
    tokens = np.empty((count, length), np.int64)
    answers = np.full((count, length), IGNORED)
    for row, answer in zip(tokens, answers, strict=True):
        keys = draw.choice(half, pairs, replace=False)
        values = half + draw.choice(vocabulary - half, pairs, replace=False)
        filler = draw.integers(vocabulary - pairs, size=length)
        # The tokens that are no keys, numbered: each key leaves those from it on one further.
        row[:] = filler + np.searchsorted(np.sort(keys) - np.arange(pairs), filler, side="right")
        row[0 : 2 * pairs : 2], row[1 : 2 * pairs : 2] = keys, values
        gaps = draw.choice(slots, pairs, replace=False, p=weights / weights.sum())
        asked = 2 * pairs + 2 * gaps
        row[asked], answer[asked] = keys, values
    labels = torch.from_numpy(answers)
    return {"input_ids": torch.from_numpy(tokens), "labels": labels, "shift_labels": labels}


class Batches(Dataset[dict[str, Tensor]]):
    """Whole batches of sequences, each of one number of pairs, these in turn.

    Args:
        config: the settings.
        part: of the data.
        count: how many batches.
        seed: random seed.
    """

    def __init__(self, config: MqarConfig, part: int, count: int, seed: int) -> None:
        self.config, self.part, self.count, self.seed = config, part, count, seed

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        config = self.config
        pairs = config.train_pairs[index % len(config.train_pairs)]
        length = config.length_of(pairs)
        return draw_sequences(
            np.random.default_rng([self.seed, self.part, index]),
            count=config.batch_tokens // length,
            pairs=pairs,
            length=length,
            vocabulary=config.vocabulary,
        )


def mqar(config: MqarConfig, progress: Progress = silent) -> list[Row]:
    """Train and ask each model, and write the table after each; nothing is trained twice."""
    for name in config.models:  # Before anything is written.
        for width in config.widths:
            check_size(partial(_model, config, name, width))
    rows = []
    for name in config.models:
        for width in config.widths:
            runs = {seed: _one(config, name, width, seed, progress) for seed in config.seeds}
            rows.append(_row(config, width, runs))
            _write(config, rows)
    return rows


def _model(config: MqarConfig, name: str, width: int) -> PreTrainedModel:
    sizes = SizeConfig(
        position_embedding="none",
        hidden_size=width,
        n_layer=config.n_layer,
        n_head=config.n_head,
        dropout=0.0,
    )
    longest = config.length_of(max(config.train_pairs))
    return build_unbounded(name, sizes, Numbers(config.vocabulary), longest)


def _one(config: MqarConfig, name: str, width: int, seed: int, progress: Progress) -> Remembered:
    settings = asdict(config) | {"model": name, "width": width, "seed": seed}
    for other in ("models", "widths", "pairs", "seeds", "output"):
        settings.pop(other)
    path = config.output / f"{folder_name(name)}-{width}" / f"seed-{seed}"
    folder = RunFolder(path, settings)

    def train() -> PreTrainedModel:
        set_seed(seed)
        model = _model(config, name, width)
        folder.create({})
        with folder.alone():
            _fit(config, model, seed, folder, named(progress, f"{name} {width} seed {seed}"))
        return model

    return ask(
        folder,
        name,
        config.pairs,
        train,
        lambda model, pairs: accuracy_at(model, config, pairs=pairs, part=TEST, seed=seed),
    )


class _EnoughError(Exception):
    """The model has learned enough."""


def _fit(
    config: MqarConfig,
    model: PreTrainedModel,
    seed: int,
    folder: RunFolder,
    tell: Progress,
) -> None:
    """Train the model until it recalls enough, or for all steps."""
    seen: object = None

    def look(status: Status) -> None:
        nonlocal seen
        tell(status)
        if status.news == seen:
            return
        seen = status.news
        if all(
            accuracy_at(model, config, pairs=pairs, part=HELD_OUT, seed=seed) >= config.enough
            for pairs in config.train_pairs
        ):
            # The weights stay as they are. A run that goes on comes here again, from the checkpoint
            # before, so a stop right after this changes nothing.
            raise _EnoughError

    train = Batches(config, TRAIN, config.steps, seed)
    held_out = Batches(config, HELD_OUT, len(config.train_pairs), seed)
    recipe = config.recipe(seed)
    with suppress(_EnoughError):
        fit(model, train, held_out, recipe, folder, look, collate=lambda x: x[0], shuffle=False)


@torch.no_grad()
def accuracy_at(
    model: PreTrainedModel, config: MqarConfig, *, pairs: int, part: int, seed: int
) -> float:
    """Share of right answers in sequences with this number of pairs."""
    model.eval()
    length = config.length_of(pairs)
    at_once = max(1, config.batch_tokens // length)
    head = model.get_output_embeddings()
    right = 0
    for first in range(0, config.sequences, at_once):
        batch = draw_sequences(
            # Other sequences than those of the loss, whose numbers have no third part.
            np.random.default_rng([seed, part, pairs, first]),
            count=min(at_once, config.sequences - first),
            pairs=pairs,
            length=length,
            vocabulary=config.vocabulary,
        )
        answers = batch["shift_labels"].to(model.device)
        asked = answers != IGNORED
        x = model.base_model(batch["input_ids"].to(model.device)).last_hidden_state
        # Logits of the questions alone.
        right += int((head(x[asked]).argmax(-1) == answers[asked]).sum())
    return right / (config.sequences * pairs)


def _row(config: MqarConfig, width: int, runs: dict[int, Remembered]) -> Row:
    first = next(iter(runs.values()))
    shares = {pairs: [run.accuracy[pairs] for run in runs.values()] for pairs in config.pairs}
    return Row(
        model=first.model,
        width=width,
        parameters=first.parameters,
        accuracy={pairs: fmean(found) for pairs, found in shares.items()},
        spread=(
            {pairs: stdev(found) for pairs, found in shares.items()} if len(runs) > 1 else None
        ),
        by_seed={seed: run.accuracy for seed, run in runs.items()},
    )


def _write(config: MqarConfig, rows: Sequence[Row]) -> None:
    panels: dict[str, list[Line]] = {}
    for row in rows:
        spread = None if row.spread is None else list(row.spread.values())
        line = Line(row.model, list(row.accuracy.items()), spread)
        panels.setdefault(f"width {row.width}", []).append(line)
    write_results(
        config.output,
        config,
        rows,
        markdown(describe(config), table(config, rows)),
        panels,
        name="mqar",
        title="Pairs recalled at once",
        sizes="pairs",
        guessing=1 / (config.vocabulary - config.vocabulary // 2),
        trained=max(config.train_pairs),
    )


def describe(config: MqarConfig) -> str:
    """The settings in a few lines."""
    seeds = ", ".join(map(str, config.seeds))
    spread = ", mean and standard deviation of" if len(config.seeds) > 1 else ","
    return (
        f"Multi-query associative recall: share of right answers in {config.sequences} sequences, "
        f"by the number of pairs and of tokens. {config.n_layer} layers, {config.n_head} "
        f"head{'s' * (config.n_head > 1)}, a vocabulary of {config.vocabulary:,}; trained with "
        f"{', '.join(map(str, config.train_pairs))} pairs for at most {config.steps} steps of "
        f"{config.batch_tokens} tokens, AdamW {config.learning_rate:g} {config.schedule}{spread} "
        f"seed{'s' * (len(config.seeds) > 1)} {seeds}."
    )


def table(config: MqarConfig, rows: Sequence[Row]) -> Table:
    """Share of right answers of each model, by pairs."""
    counts = (f"{pairs} in {config.length_of(pairs)}" for pairs in config.pairs)
    return Table("", ["model", "width", "parameters", *counts], [_cells(row) for row in rows])


def _cells(row: Row) -> list[str]:
    shares = [f"{100 * share:.0f}" for share in row.accuracy.values()]
    if row.spread is not None:
        spreads = row.spread.values()
        shares = [f"{x} ± {100 * spread:.0f}" for x, spread in zip(shares, spreads, strict=True)]
    return [row.model, str(row.width), f"{row.parameters:,}", *(f"{share} %" for share in shares)]
