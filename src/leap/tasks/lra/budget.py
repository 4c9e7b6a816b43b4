"""How many steps fit into a time: a few are timed, and all runs get equally many.

What a budget gave is kept in budget.json, with what it was for, so that a run that goes on, or
joins later, gets as many. Of commands that begin together, the first that has timed its steps
decides.
"""

import os
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from leap.errors import ConfigError, FileError
from leap.reports.files import read_json, write_json, writing_to
from leap.reports.progress import Say
from leap.tasks.lra.data import Collator, TaskDataset, load_task
from leap.tasks.lra.evaluate import computing
from leap.tasks.lra.model import paper
from leap.tasks.lra.runs import (
    RunConfig,
    Settings,
    Variant,
    build_model,
    digest,
    make_batch,
    open_splits,
    run_configs,
    some,
)
from leap.training import now, processes

MOST_STEPS = 1_000_000
TIMED_STEPS = 8
"""Steps of each model that are timed, after one that warms up."""


@dataclass(frozen=True)
class Times:
    """What one model takes."""

    step: float
    """Seconds of a training step."""
    look: float
    """Seconds of one look at the validation set."""
    test: float
    """Seconds of the look at the test set."""


def find_steps(config: Settings, variants: Sequence[Variant], say: Say | None = None) -> int:
    """The steps of every run: as given, the paper's, or as many as the budget allows.

    Args:
        config: what the runs have in common.
        variants: what they differ in.
        say: told if runs that join others will take longer than the budget.
    """
    if config.budget is None:
        return paper(config.task).steps if config.steps is None else config.steps
    if processes(config.device).num_processes > 1:
        raise ConfigError("a budget is found out by one process; under torchrun give steps")
    path = config.output / config.task / "budget.json"
    settings = _settings(config)
    times: dict[str, Times] = {}
    if not path.exists():
        times = {variant.name: _time(config, variant) for variant in variants}
        steps = steps_within(config, list(times.values()))
        _create(path, settings | {"steps": steps, "timed": _as_json(times)})
    found = read_json(path)
    for name, ours in settings.items():
        if found.get(name) != ours:
            raise FileError(
                f"{path.parent} holds runs with {name}={found.get(name)}, not {ours}; give "
                "another output folder, or remove this one"
            )
    steps = int(found["steps"])
    times |= {name: Times(**taken) for name, taken in found["timed"].items()}
    ahead = [
        variant
        for variant in variants
        for run in run_configs(config, [variant], steps)
        if not (run.output / "metrics.json").exists()
    ]
    for variant in ahead:
        if variant.name not in times:
            times[variant.name] = _time(config, variant)
    if set(times) != set(found["timed"]):
        write_json(path, found | {"timed": _as_json(times)})
    minutes = _minutes(config, steps, [times[variant.name] for variant in ahead])
    if minutes > config.budget and say is not None:
        say(
            f"budget={config.budget}: these runs take {steps} steps, as those that are there, and "
            f"so about {minutes:.3g} minutes"
        )
    return steps


def steps_within(config: Settings, times: Sequence[Times]) -> int:
    """The most steps with which all runs, with their looks and tests, fit into the budget."""
    assert config.budget is not None

    def minutes(steps: int) -> float:
        return _minutes(config, steps, times) * len(config.seeds)

    if minutes(1) > config.budget:
        raise ConfigError(
            f"budget={config.budget}: one step and the tests take {minutes(1):.1f} minutes "
            "already; give more, or fewer test_examples and valid_examples"
        )
    return bisect_right(range(1, MOST_STEPS + 1), config.budget, key=minutes)


def _minutes(config: Settings, steps: int, runs: Sequence[Times]) -> float:
    looks = -(-steps // config.recipe(steps, 0)["evaluate_every"])
    return sum(taken.step * steps + taken.look * looks + taken.test for taken in runs) / 60


def _settings(config: Settings) -> dict[str, Any]:
    """What the time of a step, a look or a test depends on, besides the model."""
    names = ("budget", "accumulate", "evaluate_every", "valid_examples", "test_examples", "bf16")
    return {
        **{name: getattr(config, name) for name in (*names, "group_by_length")},
        "batch": config.recipe(1, 0)["batch"],
        "data": digest(load_task(config.task, config.data)),
    }


def _create(path: Path, facts: dict[str, Any]) -> None:
    """Write a file, unless another command was faster."""
    with writing_to(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        own = path.with_name(f".{path.name}.{os.getpid()}")
        write_json(own, facts)
        try:
            path.hardlink_to(own)  # Unlike a new name, a link never takes another file's place.
        except FileExistsError:
            pass
        finally:
            own.unlink()


def _as_json(times: dict[str, Times]) -> dict[str, Any]:
    return {name: asdict(taken) for name, taken in times.items()}


def _spread(run: RunConfig, data: TaskDataset, collate: Collator) -> list[dict[str, Tensor]]:
    """Batches as the run will have them: if they are grouped by length, of all lengths alike."""
    starts: Sequence[int] = range(0, TIMED_STEPS * run.at_once, run.at_once)
    examples: Dataset[dict[str, Tensor]] = data
    if run.group_by_length:
        examples = some(data, None)
        starts = [(2 * i + 1) * len(data) // (2 * TIMED_STEPS) for i in range(TIMED_STEPS)]
    return [make_batch(examples, collate, run.at_once, start) for start in starts]


def _time(config: Settings, variant: Variant) -> Times:
    (run, *_) = run_configs(config, [variant], 1)
    data = open_splits(run)
    collate = Collator(data["train"].info)
    device = processes(config.device).device
    model = build_model(run, data["train"]).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=run.learning_rate, fused=True)
    batches = _spread(run, data["train"], collate)
    steps, passes = [], []
    for batch in [batches[0], *batches]:
        batch = {name: x.to(device) for name, x in batch.items()}
        model.train()
        begun, _ = now(device)
        with computing(device, bf16=run.bf16):
            loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        trained, _ = now(device)
        model.eval()
        with torch.inference_mode(), computing(device, bf16=run.bf16):
            model(**batch)
        passed, _ = now(device)
        steps.append((trained - begun) * run.accumulate)
        passes.append((passed - trained) / run.at_once)
    an_example = mean(passes[1:])
    looked_at = {
        split: len(some(data[split], count))  # type: ignore[arg-type]
        for split, count in (("valid", run.valid_examples), ("test", run.test_examples))
    }
    return Times(
        step=mean(steps[1:]),
        look=an_example * looked_at["valid"],
        test=an_example * looked_at["test"],
    )
