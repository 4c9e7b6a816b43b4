"""One run of `transformers.Trainer`, which a kill may interrupt anywhere."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from safetensors.torch import load_file
from torch import Tensor
from torch.utils.data import Dataset, Subset
from transformers import (
    EvalPrediction,
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.trainer_callback import PrinterCallback
from transformers.utils import SAFE_WEIGHTS_NAME, logging

from leap.errors import ConfigError
from leap.ops.state import accumulator
from leap.training.clock import now
from leap.training.folder import RunFolder
from leap.training.heap import trim_heap
from leap.training.recipe import Recipe

Example = dict[str, Tensor]
Collate = Callable[[list[Any]], dict[str, Any]]
"""Makes a batch of examples."""


@dataclass(frozen=True)
class Measure:
    """What the best checkpoint is chosen by, in place of the held-out loss; more is better."""

    name: str
    compute: Callable[[Any, Any], float]
    """Of the model's logits and the labels, over all held-out examples, as NumPy arrays."""


@dataclass(frozen=True)
class Status:
    """How far a run is."""

    step: int
    steps: int
    loss: float | None = None
    """On the training data, over the last few steps."""
    held_out_loss: float | None = None
    """On the held-out data, when last looked at."""
    held_out_score: float | None = None
    """The measure there, if there is one."""


Progress = Callable[[Status], None]


@dataclass(frozen=True)
class Fitted:
    """What came of a run; its model holds the weights that did best on held-out data."""

    steps: int
    best_step: int
    best_loss: float
    """On held-out data, at the best step."""
    best_score: float | None
    """The measure there, if there is one."""
    averaged: bool
    """Whether that is the mean of the last checkpoints, which did better than each."""
    seconds_per_step: float | None
    """Wall time, the median; None if no step was timed."""
    cpu_seconds_per_step: float | None
    """This process's CPU time, over all its threads: the mean, as batches may be of any length and
    what other programs take is not in it."""
    history: list[dict[str, Any]]
    """Points of the learning curve: `step` with `loss`, or with `eval_loss`."""


def fit(
    model: PreTrainedModel,
    train: Dataset[Any],
    held_out: Dataset[Any],
    recipe: Recipe,
    folder: RunFolder,
    progress: Progress | None = None,
    *,
    collate: Collate | None = None,
    measure: Measure | None = None,
    shuffle: bool = True,
    lengths: Int[np.ndarray, " n"] | None = None,
) -> Fitted:
    """Train a model, or go on with it from the folder's last checkpoint.

    The order of the data depends on the recipe's seed alone. Neither a stop, nor the number of
    processes (`torchrun`), nor accumulation changes what a step learns from.

    Args:
        model: changed in place; after it, that of the best checkpoint.
        train, held_out: examples, as the model's forward takes them, or as collate does.
        recipe: how.
        folder: where checkpoints and the log go; it must have been created.
        progress: told how far the run is after each step.
        collate: makes batches of examples that are not all of one length, or are batches already.
        measure: what to choose the best checkpoint by, rather than the held-out loss.
        shuffle: take the training examples pass after pass, each in an order of its own. Without
            it they are those of the whole run, in order.
        lengths: of the training examples; those of a batch are then of about one length, so that
            little has to be filled up.
    """
    n_items = len(train)  # type: ignore[arg-type]
    n_steps = recipe.n_steps(n_items)
    arguments = _arguments(recipe, folder, n_steps, measure)
    watch = _Watch(progress, measure)
    if shuffle:
        train = Shuffled(train, n_steps, recipe.batch, recipe.seed, lengths)
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=train,
        eval_dataset=held_out,
        data_collator=collate,
        compute_metrics=None if measure is None else partial(_score, measure),
        callbacks=[watch, *_tensorboard(folder)],
    )
    trainer.remove_callback(PrinterCallback)
    checkpoint = folder.last_checkpoint()
    with quiet():
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))

    state = trainer.state
    assert state.best_metric is not None and state.best_global_step is not None
    best = next(
        row
        for row in state.log_history
        if row["step"] == state.best_global_step and "eval_loss" in row
    )
    mean = _try_mean(trainer, folder, recipe.average, best)
    best = mean or best
    return Fitted(
        steps=state.global_step,
        best_step=state.global_step if mean else state.best_global_step,
        best_loss=best["eval_loss"],
        best_score=None if measure is None else best[f"eval_{measure.name}"],
        averaged=mean is not None,
        seconds_per_step=_median(state.log_history, "seconds_per_step"),
        cpu_seconds_per_step=_mean(state.log_history, "cpu_seconds_per_step"),
        history=state.log_history,
    )


def whole_batches(data: Dataset[Example], batch: int) -> Subset[Example]:
    """The data as far as it fills batches, or all of it if there is not one.

    Trainer's held-out loss would give a smaller last batch as much weight as the others.
    """
    size = len(data)  # type: ignore[arg-type]
    return Subset(data, range(size // batch * batch or size))


class Shuffled(Dataset[Example]):
    """A whole run's examples in a row: pass after pass over the data, each in an order of its own.

    With it, one pass of `Trainer` is the whole run, and no batch is cut short where the data ends.

    Args:
        data: the examples of one pass.
        n_steps: how many batches the run takes.
        batch: examples in each.
        seed: of the orders.
        lengths: of the examples, to make batches of about one length: the examples of `SPAN`
            batches are sorted among them, and the batches shuffled again.
    """

    SPAN = 64

    def __init__(
        self,
        data: Dataset[Example],
        n_steps: int,
        batch: int,
        seed: int,
        lengths: Int[np.ndarray, " n"] | None = None,
    ) -> None:
        self.data = data
        self.n_steps = n_steps
        self.batch = batch
        self.seed = seed
        self.lengths = lengths
        self._span: tuple[int, list[int]] = (-1, [])

    def __len__(self) -> int:
        return self.n_steps * self.batch

    def __getitem__(self, index: int) -> Example:
        n_span, place = divmod(index, self.SPAN * self.batch)
        if self._span[0] != n_span:
            self._span = n_span, self._choose(n_span)
        return self.data[self._span[1][place]]

    def _choose(self, n_span: int) -> list[int]:
        """The examples of some batches, as one after another takes them."""
        start = n_span * self.SPAN * self.batch
        stop = min(start + self.SPAN * self.batch, len(self))
        size = len(self.data)  # type: ignore[arg-type]
        passes = range(start // size, (stop - 1) // size + 1)
        chosen = torch.cat([self._order(i, size) for i in passes])
        chosen = chosen[start - passes[0] * size :][: stop - start]
        if self.lengths is not None:
            lengths = torch.from_numpy(self.lengths)[chosen]
            batches = chosen[lengths.argsort(stable=True)].view(-1, self.batch)
            mixed = torch.randperm(len(batches), generator=self._generator(-1 - n_span))
            chosen = batches[mixed].flatten()
        return chosen.tolist()

    def _order(self, n_pass: int, size: int) -> Tensor:
        return torch.randperm(size, generator=self._generator(n_pass))

    def _generator(self, n: int) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed * 1_000_003 + n)


def _try_mean(
    trainer: Trainer, folder: RunFolder, n: int, best: dict[str, Any]
) -> dict[str, Any] | None:
    """Give the model the mean of its last checkpoints' weights, if that does better; how well."""
    paths = folder.all_checkpoints()[-n:]
    if len(paths) < 2:
        return None
    model: Any = trainer.accelerator.unwrap_model(trainer.model)
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    mean = mean_weights([path / SAFE_WEIGHTS_NAME for path in paths])
    # Of tied weights, files hold one.
    model.load_state_dict(mean, strict=False)
    model.tie_weights()
    held_out = trainer.get_eval_dataloader()
    found = trainer.evaluation_loop(
        held_out, "evaluation of the mean", trainer.args.prediction_loss_only or None
    )
    metrics = found.metrics or {}
    name = str(trainer.args.metric_for_best_model)
    gain = metrics[name] - best[name]
    if gain > 0 if trainer.args.greater_is_better else gain < 0:
        return metrics
    model.load_state_dict(kept)
    return None


def mean_weights(paths: Sequence[Path]) -> dict[str, Tensor]:
    """The mean of the weights in several safetensors files; what is not a weight is the last's."""
    mean: dict[str, Tensor] = {}
    for path in paths:
        for name, value in load_file(path).items():
            if value.is_floating_point():
                value = mean.get(name, 0) + value.to(accumulator(value)) / len(paths)
            mean[name] = value
    return mean


def _score(measure: Measure, held_out: EvalPrediction) -> dict[str, float]:
    return {measure.name: measure.compute(held_out.predictions, held_out.label_ids)}


def _arguments(
    recipe: Recipe, folder: RunFolder, n_steps: int, measure: Measure | None
) -> TrainingArguments:
    gpu = torch.cuda.is_available()
    arguments = TrainingArguments(
        output_dir=str(folder.checkpoints),
        max_steps=n_steps,
        gradient_accumulation_steps=recipe.accumulate,
        learning_rate=recipe.learning_rate,
        lr_scheduler_type={"constant": "constant_with_warmup"}.get(
            recipe.schedule, recipe.schedule
        ),
        warmup_steps=recipe.n_warmup(n_steps),
        weight_decay=recipe.weight_decay,
        adam_beta1=recipe.betas[0],
        adam_beta2=recipe.betas[1],
        adam_epsilon=recipe.epsilon,
        max_grad_norm=recipe.clip,
        bf16=recipe.bf16,
        seed=recipe.seed,
        train_sampling_strategy="sequential",
        eval_strategy="steps",
        eval_steps=recipe.evaluate_every,
        save_strategy="steps",
        save_steps=recipe.evaluate_every,
        save_total_limit=recipe.average + (recipe.average > 1),  # And the best one.
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss" if measure is None else f"eval_{measure.name}",
        greater_is_better=measure is not None,
        logging_steps=recipe.log_every,
        logging_first_step=True,
        logging_nan_inf_filter=False,
        prediction_loss_only=measure is None,
        remove_unused_columns=False,
        dataloader_pin_memory=gpu,
        ddp_find_unused_parameters=False,
        disable_tqdm=True,
        report_to="none",
        use_cpu=_no_accelerator(),
    )
    n_parts = arguments.world_size * max(1, arguments.n_gpu) * recipe.accumulate
    if recipe.batch % n_parts:
        raise ConfigError(
            f"batch={recipe.batch} does not divide among {n_parts} parts (processes, devices and "
            f"accumulated parts); the nearest that does is {-(-recipe.batch // n_parts) * n_parts}"
        )
    arguments.per_device_train_batch_size = recipe.batch // n_parts
    arguments.per_device_eval_batch_size = recipe.batch // n_parts
    return arguments


def processes() -> Any:
    """accelerate's state of the processes that `torchrun` started, or of just this one."""
    from accelerate import PartialState  # Of an extra, which settings alone do not need.

    return PartialState(cpu=_no_accelerator())


def _no_accelerator() -> bool:
    return not (torch.cuda.is_available() or torch.backends.mps.is_available())


def _tensorboard(folder: RunFolder) -> list[TrainerCallback]:
    if find_spec("tensorboard") is None:
        return []
    from torch.utils.tensorboard import SummaryWriter
    from transformers.integrations import TensorBoardCallback

    return [TensorBoardCallback(SummaryWriter(str(folder.path / "log")))]


class _Watch(TrainerCallback):
    """Tells the progress, puts the time that steps take into the history, and tidies up."""

    def __init__(self, progress: Progress | None, measure: Measure | None) -> None:
        self.progress = progress
        self.measure = measure
        self.loss: float | None = None
        self.held_out_loss: float | None = None
        self.held_out_score: float | None = None
        self.start = (0.0, 0.0)
        self.times: list[tuple[float, float]] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.start = now(args.device)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        (begun, begun_cpu), (wall, cpu) = self.start, now(args.device)
        self.times.append((wall - begun, cpu - begun_cpu))
        self._tell(state)

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any
    ) -> None:
        if args.device.type == "cpu":
            trim_heap()
        if logs and "loss" in logs:
            self.loss = logs["loss"]
            if self.times:
                wall, cpu = zip(*self.times, strict=True)
                state.log_history[-1] |= {
                    "seconds_per_step": median(wall),
                    "cpu_seconds_per_step": fmean(cpu),
                }
            self.times = []

    def on_evaluate(
        self, args: Any, state: Any, control: Any, metrics: dict[str, Any] | None = None, **_: Any
    ) -> None:
        if metrics:
            self.held_out_loss = metrics["eval_loss"]
            if self.measure is not None:
                self.held_out_score = metrics[f"eval_{self.measure.name}"]
            self._tell(state)

    def _tell(self, state: Any) -> None:
        if self.progress is not None and state.is_world_process_zero:
            self.progress(
                Status(
                    state.global_step,
                    state.max_steps,
                    self.loss,
                    self.held_out_loss,
                    self.held_out_score,
                )
            )


@contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers from bars and hints of its own: progress goes through callbacks."""
    drawn, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if drawn:
            logging.enable_progress_bar()


def _mean(history: list[dict[str, Any]], name: str) -> float | None:
    """Of all steps, where each row has that of the steps since the row before."""
    rows = [row for row in history if name in row]
    if not rows:
        return None
    steps = np.diff([row["step"] for row in rows], prepend=0)
    return float(np.average([row[name] for row in rows], weights=steps))


def _median(history: list[dict[str, Any]], name: str) -> float | None:
    values = [row[name] for row in history if name in row]
    return median(values) if values else None
