"""How fast each attention is, and how much memory it takes, against torch's own softmax attention.

All mechanisms are measured in one run, by turns (see `leap.bench.run`).
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from leap.bench.measure import Call, keep_freed_memory, threads
from leap.bench.mechanisms import Mechanism, check_definition, make_inputs, mechanisms
from leap.bench.run import (
    Progress,
    Steps,
    TurnsConfig,
    check_at_least_one,
    describe_machine,
    measure_by_turns,
)
from leap.errors import ConfigError

Passes = Literal["forward", "forward+backward"]
PASSES: tuple[Passes, ...] = ("forward", "forward+backward")

N_TOKENS_CHECKED = 150  # Past two chunks of 64, and short enough for the definition.


@dataclass(frozen=True, kw_only=True)
class BenchConfig(TurnsConfig):
    """Measure the time and memory of every attention against torch's scaled_dot_product_attention.

    Forward, and forward with backward, over a range of lengths. Each attention is first compared
    with its definition. Prints tables; writes results.json, results.md and attention.png.
    """

    lengths: tuple[int, ...] = (256, 512, 1024, 2048, 4096, 8192, 16384)
    """Numbers of tokens to attend over."""
    mechanisms: tuple[str, ...] = ("all",)
    """Mechanisms to measure, by their names in the tables, or all of them."""
    windows: tuple[int, ...] = (4, 64, 1024, 16384)
    """Windows to measure LEAP with, besides none."""
    heads: int = 8
    """Number of heads."""
    width: int = 64
    """Width of a head."""
    batch: int = 1
    """Number of sequences."""
    dtype: Literal["float32", "float64", "bfloat16", "float16"] = "float32"
    """Precision of the inputs."""
    output: Path = Path("runs/bench-attention")
    """Folder to write the results to."""

    def __post_init__(self) -> None:
        super().__post_init__()
        counts = ("lengths", "windows", "heads", "width", "batch")
        check_at_least_one(**{name: getattr(self, name) for name in counts})
        if not self.lengths or not self.mechanisms:
            raise ConfigError("nothing to measure: give at least one length and one mechanism")
        self.chosen_mechanisms()

    def chosen_mechanisms(self) -> list[Mechanism]:
        """The mechanisms asked for and the baselines they are compared with."""
        known = {mechanism.name: mechanism for mechanism in mechanisms(self.windows)}
        wanted = tuple(known) if self.mechanisms == ("all",) else self.mechanisms
        for name in wanted:
            if name not in known:
                raise ConfigError(f"no mechanism is called {name!r}; there are {', '.join(known)}")
        baselines = {known[name].baseline for name in wanted}
        return [m for m in known.values() if m.name in wanted or m.name in baselines]


@dataclass(frozen=True, kw_only=True)
class Result:
    """What one mechanism took at one length."""

    mechanism: str
    baseline: str
    length: int
    passes: Passes
    seconds: float
    """The fastest turn."""
    speed: float
    """How many times as fast as the baseline."""
    peak_bytes: int
    """Most memory held at once, inputs not counted."""
    turns: tuple[float, ...]
    """Seconds of each turn."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """Everything one run measured, and on what."""

    config: BenchConfig
    machine: dict[str, str]
    results: list[Result]


def measure(config: BenchConfig, progress: Progress = lambda done, total, doing: None) -> Report:
    """Compare each mechanism with its definition, then measure them all."""
    chosen = config.chosen_mechanisms()
    lengths = sorted(set(config.lengths))
    n_cases = len(lengths) * len(PASSES) * len(chosen)
    steps = Steps(progress, total=len(chosen) + 2 * n_cases)

    results: list[Result] = []
    keep_freed_memory()
    with threads(config.threads):
        inputs = _make_inputs(config, N_TOKENS_CHECKED)
        for mechanism in chosen:
            steps.begin(f"checking {mechanism.name}")
            check_definition(mechanism, inputs)
            steps.end()
        for length in lengths:
            inputs = _make_inputs(config, length)
            for passes in PASSES:
                results += _measure_together(config, chosen, length, passes, inputs, steps)
    machine = describe_machine(config.chosen_device(), config.threads)
    return Report(config=config, machine=machine, results=results)


def _measure_together(
    config: BenchConfig,
    chosen: list[Mechanism],
    length: int,
    passes: Passes,
    inputs: dict[str, Tensor],
    steps: Steps,
) -> list[Result]:
    measured = measure_by_turns(
        {m.name: _call(m, passes, inputs) for m in chosen},
        steps,
        f"{length} tokens, {passes}",
        device=config.chosen_device(),
        n_threads=config.threads,
        repeats=config.repeats,
        budget=config.budget,
    )
    best = {name: min(turns) for name, (turns, _) in measured.items()}
    return [
        Result(
            mechanism=m.name,
            baseline=m.baseline,
            length=length,
            passes=passes,
            seconds=best[m.name],
            speed=best[m.baseline] / best[m.name],
            peak_bytes=measured[m.name][1],
            turns=measured[m.name][0],
        )
        for m in chosen
    ]


def _call(mechanism: Mechanism, passes: Passes, inputs: dict[str, Tensor]) -> Call:
    arguments = [inputs[name] for name in mechanism.arguments]
    if passes == "forward":
        return partial(_forward, mechanism, arguments)
    arguments = [x.detach().requires_grad_() for x in arguments]
    return partial(_forward_backward, mechanism, arguments, inputs["upstream"])


def _forward(mechanism: Mechanism, arguments: list[Tensor]) -> None:
    with torch.no_grad():
        mechanism.attend(*arguments)


def _forward_backward(mechanism: Mechanism, arguments: list[Tensor], upstream: Tensor) -> None:
    torch.autograd.grad(mechanism.attend(*arguments), arguments, upstream)


def _make_inputs(config: BenchConfig, tokens: int) -> dict[str, Tensor]:
    drawn = make_inputs(
        batch=config.batch,
        heads=config.heads,
        tokens=tokens,
        width=config.width,
        seed=config.seed,
    )
    options = {"device": config.chosen_device(), "dtype": getattr(torch, config.dtype)}
    return {name: x.to(**options) for name, x in drawn.items()}
