"""How many steps fit into a time: a few are timed, and all runs get equally many.

What a budget gave is kept in budget.json, so that a run that goes on, or joins later, gets as many.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median

import torch

from leap.errors import ConfigError, FileError
from leap.tasks.lra.data import Collator
from leap.tasks.lra.evaluate import now
from leap.tasks.lra.model import paper
from leap.tasks.lra.runs import (
    Settings,
    Variant,
    build_model,
    make_batch,
    open_splits,
    run_configs,
    some,
)
from leap.training import processes
from leap.training.folder import read_json, write_json

MOST_STEPS = 1_000_000
TIMED_STEPS = 5
"""Steps of each model that are timed; the first, which warms up, does not count."""


@dataclass(frozen=True)
class Times:
    """What one model takes."""

    step: float
    """Seconds of a training step."""
    look: float
    """Seconds of one look at the validation set."""
    test: float
    """Seconds of the look at the test set."""


def find_steps(config: Settings, variants: Sequence[Variant]) -> int:
    """The steps of every run: as given, the paper's, or as many as the budget allows."""
    if config.budget is None:
        return config.steps or paper(config.task).steps
    if processes().num_processes > 1:
        raise ConfigError("a budget is found out by one process; under torchrun give steps")
    path = config.output / config.task / "budget.json"
    if path.exists():
        found = read_json(path)
        if found.get("minutes") != config.budget:
            raise FileError(
                f"{path.parent} holds runs with budget={found.get('minutes')}, not "
                f"{config.budget}; give another output folder, or remove this one"
            )
        return int(found["steps"])
    times = {variant.name: _time(config, variant) for variant in variants}
    steps = steps_within(config, list(times.values()))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(
        path,
        {
            "minutes": config.budget,
            "steps": steps,
            "timed": {name: asdict(taken) for name, taken in times.items()},
        },
    )
    return steps


def steps_within(config: Settings, times: Sequence[Times]) -> int:
    """The most steps with which all runs, with their looks and tests, fit into the budget."""
    assert config.budget is not None

    def minutes(steps: int) -> float:
        looks = -(-steps // config.recipe(steps, 0)["evaluate_every"])
        seconds = sum(taken.step * steps + taken.look * looks + taken.test for taken in times)
        return seconds * len(config.seeds) / 60

    if minutes(1) > config.budget:
        raise ConfigError(
            f"budget={config.budget}: one step and the tests take {minutes(1):.1f} minutes "
            "already; give more, or fewer test_examples and valid_examples"
        )
    return bisect_right(range(1, MOST_STEPS + 1), config.budget, key=minutes)


def _time(config: Settings, variant: Variant) -> Times:
    (run, *_) = run_configs(config, [variant], 1)
    data = open_splits(run)
    collate = Collator(data["train"].info)
    device = processes().device
    model = build_model(run, data["train"]).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=run.learning_rate, fused=True)
    per_part = run.batch // run.accumulate
    steps, passes = [], []
    for i in range(TIMED_STEPS):
        batch = make_batch(data["train"], collate, per_part, start=i * per_part)
        batch = {name: x.to(device) for name, x in batch.items()}
        model.train()
        begun, _ = now(device)
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        trained, _ = now(device)
        model.eval()
        with torch.inference_mode():
            model(**batch)
        passed, _ = now(device)
        steps.append((trained - begun) * run.accumulate)
        passes.append((passed - trained) / per_part)
    an_example = median(passes[1:])
    looked_at = {
        split: len(some(data[split], count))  # type: ignore[arg-type]
        for split, count in (("valid", run.valid_examples), ("test", run.test_examples))
    }
    return Times(
        step=median(steps[1:]),
        look=an_example * looked_at["valid"],
        test=an_example * looked_at["test"],
    )
