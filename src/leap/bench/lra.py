"""What a training step and a prediction cost in Long Range Arena, with every attention.

The models are the paper's, the texts random and as long as each task allows, so no data is needed.
All attentions take turns in one run (see `leap.bench.run`). Besides `softmax`, which is torch's
`scaled_dot_product_attention`, there is `softmax-naive`, which holds all scores in memory: what the
paper compared with.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from leap.bench.measure import Call
from leap.bench.run import Measured, Report, Steps, TurnsConfig, measure_by_turns, report_on
from leap.errors import ConfigError
from leap.models import LeapformerForSequenceClassification, usable_as
from leap.reports.progress import Progress, silent
from leap.tasks.lra.data import TASKS, TaskInfo
from leap.tasks.lra.model import encoder_config

Passes = Literal["training step", "inference"]
PASSES: tuple[Passes, ...] = ("training step", "inference")

NAIVE = "softmax-naive"
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    NAIVE: ("softmax", {"naive": True}),
    "bigbird-stored": ("bigbird", {"recompute": False}),
}
"""Attentions computed in the usual way, which holds their scores, beside ours, which do not."""


@dataclass(frozen=True, kw_only=True)
class SpeedConfig(TurnsConfig):
    """Measure the time and memory of a training step and of inference, without training.

    The paper's models and the full length of each task, all attentions interleaved in one run.
    Prints tables; writes results.json, results.md and speed.png.
    """

    tasks: tuple[str, ...] = ("listops", "text", "retrieval", "image", "pathfinder")
    """Tasks, of which only the sizes matter here."""
    attention: tuple[str, ...] = ("all",)
    """Attentions; all, or some. Softmax is measured in any case, naively and as torch has it."""
    batch: int = 1
    """Examples at once. The paper's are 16 to 256, for which a CPU is slow."""
    budget: float = 20.0
    """Seconds to spend on the turns of one attention on one task; there is always one turn."""
    output: Path = Path("runs/lra-speed")
    """Folder to write the results to."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_at_least_one("batch")
        if not self.tasks:
            raise ConfigError("nothing to measure: give at least one task")
        for task in self.tasks:
            if task not in TASKS:
                raise ConfigError(f"tasks={task!r} is not known; there are {', '.join(TASKS)}")
        self.attentions()

    def attentions(self) -> list[str]:
        """Names of what is measured, the two softmaxes first."""
        known = [*VARIANTS, *usable_as("bidirectional")]
        wanted = known if self.attention == ("all",) else list(self.attention)
        for name in wanted:
            if name not in known:
                raise ConfigError(
                    f"attention={name!r} is not known in encoders; there are {', '.join(known)}"
                )
        return list(dict.fromkeys([NAIVE, "softmax", *wanted]))


@dataclass(frozen=True, kw_only=True)
class Result(Measured):
    """What one attention took on one task."""

    task: str
    attention: str
    passes: Passes
    parameters: int


SpeedReport = Report[SpeedConfig, Result]


def measure(config: SpeedConfig, progress: Progress = silent) -> SpeedReport:
    """Measure every attention on every task."""
    return report_on(config, _results(config, progress))


def _results(config: SpeedConfig, progress: Progress) -> Iterator[Result]:
    names = config.attentions()
    steps = Steps(progress, total=2 * len(config.tasks) * len(PASSES) * len(names))
    for task in config.tasks:
        models = {name: build(TASKS[task], name, config) for name in names}
        inputs = make_inputs(TASKS[task], config)
        for passes in PASSES:
            yield from _measure_together(config, task, passes, models, inputs, steps)


def build(info: TaskInfo, name: str, config: SpeedConfig) -> LeapformerForSequenceClassification:
    """The paper's model for a task."""
    torch.manual_seed(config.seed)
    attention, options = VARIANTS.get(name, (name, {}))
    shape = encoder_config(info, attention, attention_options={attention: options})
    model = LeapformerForSequenceClassification(shape)
    return model.to(config.chosen_device())  # type: ignore[arg-type]


def make_inputs(info: TaskInfo, config: SpeedConfig) -> dict[str, Tensor]:
    """A batch of random examples of full length."""
    random = torch.Generator().manual_seed(config.seed)

    def draw(end: int, *shape: int) -> Tensor:
        return torch.randint(end, (config.batch, *shape), generator=random).to(
            config.chosen_device()
        )

    inputs = {"input_ids": draw(info.vocab_size, info.max_length), "labels": draw(info.n_classes)}
    if info.two_inputs:
        inputs["input_ids_b"] = draw(info.vocab_size, info.max_length)
    return inputs


def _measure_together(
    config: SpeedConfig,
    task: str,
    passes: Passes,
    models: dict[str, LeapformerForSequenceClassification],
    inputs: dict[str, Tensor],
    steps: Steps,
) -> Iterator[Result]:
    calls = {name: make_call(model, passes, inputs) for name, model in models.items()}
    for name, measured in measure_by_turns(calls, steps, f"{task}, {passes}", config).items():
        yield Result(
            task=task,
            attention=name,
            passes=passes,
            parameters=models[name].num_parameters(),
            **vars(measured),
        )


def make_call(
    model: LeapformerForSequenceClassification, passes: Passes, inputs: dict[str, Tensor]
) -> Call:
    """A training step, or a prediction, to be made as often as one likes."""
    if passes == "inference":
        texts = {name: x for name, x in inputs.items() if name != "labels"}
        return partial(_predict, model, texts)
    return training_step(model, inputs)


def training_step(model: nn.Module, inputs: dict[str, Tensor]) -> Call:
    """Forward, backward and AdamW's update, to be made as often as one likes."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    step = partial(_step, model, optimizer, inputs)
    step()  # Makes what stays: gradients, and the optimiser's state.
    return step


def _predict(model: LeapformerForSequenceClassification, inputs: dict[str, Tensor]) -> None:
    model.train(False)
    with torch.inference_mode():
        model(**inputs)


def _step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    inputs: dict[str, Tensor],
) -> None:
    model.train()
    optimizer.zero_grad(set_to_none=False)
    model(**inputs).loss.backward()
    optimizer.step()
