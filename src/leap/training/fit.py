"""One run of `transformers.Trainer`, which a kill may interrupt anywhere."""

import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from pickle import UnpicklingError
from statistics import fmean, median
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import Dataset, Subset
from transformers import (
    EvalPrediction,
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
)
from transformers.trainer_callback import PrinterCallback
from transformers.utils import SAFE_WEIGHTS_NAME, logging

from leap.errors import ConfigError, FileError, TrainingError
from leap.ops.state import accumulator
from leap.reports.progress import Progress, Say, Status, silent
from leap.training.alarm import Alarm
from leap.training.checkpoints import Checkpoints
from leap.training.clock import now
from leap.training.folder import RunFolder
from leap.training.heap import trim_heap
from leap.training.recipe import DeviceName, Recipe

Example = dict[str, Tensor]
Collate = Callable[[list[Any]], dict[str, Any]]
"""Makes a batch of examples."""

LARGE_BATCH = 1024
"""Examples in a batch that it is worth finding out the memory of."""
GIB = 2**30


@dataclass(frozen=True)
class Measure:
    """What the best checkpoint is chosen by, in place of the held-out loss; more is better."""

    name: str
    compute: Callable[[Any, Any], float]
    """Of the model's logits and the labels, over all held-out examples, as NumPy arrays."""


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
    progress: Progress = silent,
    *,
    collate: Collate | None = None,
    measure: Measure | None = None,
    shuffle: bool = True,
    lengths: Int[np.ndarray, " n"] | None = None,
) -> Fitted:
    """Train a model, or go on with it from the folder's last checkpoint.

    A run that took fewer steps goes on likewise. From there on, its learning rate is that of a run
    which was to take as many from the start.

    The order of the data depends on the recipe's seed alone. Neither a stop, nor the number of
    processes (`torchrun`), nor accumulation changes what a step learns from.

    Args:
        model: changed in place; after it, that of the best checkpoint.
        train, held_out: examples, as the model's forward takes them, or as collate does.
        recipe: how.
        folder: where checkpoints and the log go; it must have been created.
        progress: told how far the run is after each step, and what there is to know besides: that
            a checkpoint was damaged, or that a learned part has degenerated, see `Alarm`.
        collate: makes batches of examples that are not all of one length, or are batches already.
        measure: what to choose the best checkpoint by, rather than the held-out loss.
        shuffle: take the training examples pass after pass, each in an order of its own. Without
            it they are those of the whole run, in order.
        lengths: of the training examples; those of a batch are then of about one length, so that
            little has to be filled up.

    Raises:
        TrainingError: if the loss is no longer a number.
        FileError: if there are checkpoints, but none to go on from, or one cannot be written.
    """
    arguments = check_fit(model, train, recipe, folder, measure)
    group, n_steps = processes(recipe.device), arguments.max_steps
    checkpoints = Checkpoints(folder.checkpoints)
    watch = _Watch(progress, measure, recipe, checkpoints)

    def say(note: str) -> None:
        if group.is_main_process:
            progress(Status(0, n_steps, note=note))

    with group.main_process_first():
        last = _find_last(checkpoints, folder, recipe, n_steps, say)
    if shuffle:
        train = Shuffled(train, n_steps, recipe.batch, recipe.seed, lengths)
    trainer = _Trainer(
        recipe,
        checkpoints,
        model=model,
        args=arguments,
        train_dataset=train,
        eval_dataset=held_out,
        data_collator=collate,
        compute_metrics=None if measure is None else partial(_score, measure),
        callbacks=[watch, Alarm(_first(held_out, collate), say), *_tensorboard(folder)],
    )
    trainer.remove_callback(PrinterCallback)
    with quiet():
        try:
            trainer.train(
                resume_from_checkpoint=None if last is None else str(checkpoints.at(last))
            )
        except UnpicklingError as error:  # Only of tensors and numbers: nothing of it was run.
            raise FileError(
                f"cannot go on from {checkpoints.path}/checkpoint-{last} ({_first_line(error)}); "
                "remove it"
            ) from error

    state = trainer.state
    assert state.best_metric is not None and state.best_global_step is not None
    best = next(
        row
        for row in state.log_history
        if row["step"] == state.best_global_step and "eval_loss" in row
    )
    mean = _try_mean(trainer, checkpoints, recipe.average, best)
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


def _first(data: Dataset[Any], collate: Collate | None) -> dict[str, Any]:
    """The first example, as a batch."""
    return (default_data_collator if collate is None else collate)([data[0]])


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


class _Trainer(Trainer):
    """Ends a run whose loss is no number, and seals its checkpoints with a manifest."""

    def __init__(self, recipe: Recipe, checkpoints: Checkpoints, **options: Any) -> None:
        super().__init__(**options)
        self.recipe = recipe
        self.checkpoints = checkpoints

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        loss = super().training_step(*args, **kwargs)
        _check_loss(float(loss), self.state.global_step + 1, self.recipe)
        return loss

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        step = self.state.global_step
        group = processes(self.recipe.device)
        try:
            if group.is_main_process:
                self.checkpoints.begin(step)
            group.wait_for_everyone()
            super()._save_checkpoint(model, trial)
            group.wait_for_everyone()
            if group.is_main_process:
                self.checkpoints.seal(step)
                self.checkpoints.rotate(self.recipe.average, self.state.best_global_step)
        except (OSError, RuntimeError, SafetensorError) as error:  # As torch and safetensors say.
            shutil.rmtree(self.checkpoints.at(step), ignore_errors=True)
            raise FileError(
                f"cannot write {self.checkpoints.at(step)} ({_first_line(error)}); once there is "
                "room for it, give the same command again: what was written before is whole"
            ) from error
        group.wait_for_everyone()


def _check_loss(loss: float, step: int, recipe: Recipe, kind: str = "loss") -> None:
    if not math.isfinite(loss):
        raise TrainingError(
            f"the {kind} is {loss} at step {step}, so there is nothing more to learn; try a "
            f"learning_rate below {recipe.learning_rate:g}, a longer warmup than "
            f"{recipe.warmup:g}, or a clip below {recipe.clip:g}, in another output folder"
        )


def _find_last(
    checkpoints: Checkpoints, folder: RunFolder, recipe: Recipe, n_steps: int, say: Say
) -> int | None:
    """The step to go on from; None to begin."""
    last = checkpoints.newest(say)
    if folder.is_longer:
        if last is None:
            raise FileError(
                f"the run in {folder.path} has no checkpoint to go on from to {n_steps} steps; "
                "give another output folder"
            )
        say(
            f"going on from step {last} to {n_steps}: from here on the learning rate is that of "
            f"the {recipe.schedule} schedule over {n_steps} steps"
        )
    if processes(recipe.device).is_main_process:
        folder.extend()
    return last


def check_fit(
    model: PreTrainedModel,
    train: Dataset[Any],
    recipe: Recipe,
    folder: RunFolder,
    measure: Measure | None = None,
) -> TrainingArguments:
    """What the Trainer is told; nothing is written.

    Raises:
        ConfigError: if there are no such steps, or a batch does not divide, or cannot fit.
    """
    processes(recipe.device)  # First: the Trainer takes a missing package ill.
    n_steps = recipe.n_steps(len(train))  # type: ignore[arg-type]
    arguments = _arguments(recipe, folder, n_steps, measure)
    _check_memory(model, train, recipe, arguments)
    return arguments


def _check_memory(
    model: PreTrainedModel, train: Dataset[Any], recipe: Recipe, arguments: TrainingArguments
) -> None:
    """Refuse a batch that cannot fit: to gather it would take long, and then all of the memory."""
    batch = arguments.per_device_train_batch_size
    if batch < LARGE_BATCH:
        return
    tensors = [x for x in tree_leaves(train[0]) if isinstance(x, Tensor)]
    tokens = max((len(x) for x in tensors if x.ndim), default=1)
    config: Any = model.config
    # At least what each layer is given, which its gradient needs.
    numbers = tokens * config.hidden_size * config.num_hidden_layers
    needed = batch * (sum(x.nbytes for x in tensors) + 4 * numbers)
    there_is = memory(arguments.device)
    if needed > there_is:
        raise ConfigError(
            f"batch={recipe.batch} in parts of {batch} takes {needed / GIB:,.0f} GiB and more, and "
            f"there are {there_is / GIB:,.0f}; give a smaller batch, or a larger accumulate"
        )


def memory(device: torch.device) -> int:
    """Bytes that there are, free or not."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    from psutil import virtual_memory  # Comes with accelerate, of an extra.

    return virtual_memory().total


def _try_mean(
    trainer: Trainer, checkpoints: Checkpoints, n: int, best: dict[str, Any]
) -> dict[str, Any] | None:
    """Give the model the mean of its last checkpoints' weights, if that does better; how well."""
    if n < 2:
        return None
    paths = [checkpoints.at(step) for step in checkpoints.whole()[-n:]]
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
    on_cpu = _on_cpu(recipe.device)
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
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss" if measure is None else f"eval_{measure.name}",
        greater_is_better=measure is not None,
        logging_steps=recipe.log_every,
        logging_first_step=True,
        logging_nan_inf_filter=False,
        prediction_loss_only=measure is None,
        remove_unused_columns=False,
        dataloader_pin_memory=torch.cuda.is_available() and not on_cpu,
        ddp_find_unused_parameters=False,
        disable_tqdm=True,
        report_to="none",
        use_cpu=on_cpu,
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


def processes(device: DeviceName | None = None) -> Any:
    """accelerate's state of the processes that `torchrun` started, or of just this one.

    Args:
        device: where they compute, as a recipe has it.
    """
    from accelerate import PartialState  # Of an extra, which settings alone do not need.

    return PartialState(cpu=_on_cpu(device))


def _on_cpu(device: DeviceName | None) -> bool:
    """Whether to compute on the CPU.

    Raises:
        ConfigError: if the device is not there.
    """
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if device is not None and device != "cpu" and not there[device]:
        listed = ", ".join(["cpu", *(name for name, is_there in there.items() if is_there)])
        raise ConfigError(f"device={device} is not there; this machine and its torch have {listed}")
    return device == "cpu" or not any(there.values())


def _tensorboard(folder: RunFolder) -> list[TrainerCallback]:
    if find_spec("tensorboard") is None:
        return []
    from torch.utils.tensorboard import SummaryWriter
    from transformers.integrations import TensorBoardCallback

    return [TensorBoardCallback(SummaryWriter(str(folder.path / "log")))]


class _Watch(TrainerCallback):
    """Tells the progress, puts the time that steps take into the history, and tidies up."""

    def __init__(
        self,
        progress: Progress,
        measure: Measure | None,
        recipe: Recipe,
        checkpoints: Checkpoints,
    ) -> None:
        self.progress = progress
        self.measure = measure
        self.recipe = recipe
        self.checkpoints = checkpoints
        self.numbers: dict[str, float] = {}
        self.start = (0.0, 0.0)
        self.times: list[tuple[float, float]] = []

    def on_train_begin(
        self, args: Any, state: Any, control: Any, lr_scheduler: Any = None, **_: Any
    ) -> None:
        if state.global_step == 0:
            return
        # The optimiser was stored with what the schedule of then had for this step.
        shares = [share(lr_scheduler.last_epoch) for share in lr_scheduler.lr_lambdas]
        rates = [x * share for x, share in zip(lr_scheduler.base_lrs, shares, strict=True)]
        for group, rate in zip(lr_scheduler.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        lr_scheduler._last_lr = rates
        self._find_best(args, state)

    def _find_best(self, args: Any, state: Any) -> None:
        """Set the best checkpoint: the folder may have been moved, or that one damaged."""
        before = state.best_global_step
        fault = self.checkpoints.fault(before)
        if fault is not None:
            name = args.metric_for_best_model
            scores = {row["step"]: row[name] for row in state.log_history if name in row}
            whole = [step for step in self.checkpoints.whole() if step in scores]
            choose = max if args.greater_is_better else min
            state.best_global_step = choose(whole, key=lambda step: scores[step])
            state.best_metric = scores[state.best_global_step]
            self._tell(
                state,
                f"{self.checkpoints.at(before)}, the best so far, is passed over for "
                f"checkpoint-{state.best_global_step}: {fault}",
            )
        state.best_model_checkpoint = str(self.checkpoints.at(state.best_global_step))

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
            self.numbers["loss"] = logs["loss"]
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
            self.numbers["held-out"] = metrics["eval_loss"]
            _check_loss(metrics["eval_loss"], state.global_step, self.recipe, "held-out loss")
            if self.measure is not None:
                self.numbers["scoring"] = metrics[f"eval_{self.measure.name}"]
            self._tell(state)

    def _tell(self, state: Any, note: str | None = None) -> None:
        if state.is_world_process_zero:
            self.progress(
                Status(
                    state.global_step,
                    state.max_steps,
                    numbers=dict(self.numbers),
                    news=self.numbers.get("held-out"),
                    note=note,
                )
            )


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


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
