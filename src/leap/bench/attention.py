"""How fast each attention is, and how much memory it takes, against torch's own softmax attention.

All mechanisms are measured in one run, by turns (see `leap.bench.run`). So is what the machine can
do: the speed of torch's matrix product, and that of a copy.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from leap.bench.measure import Call
from leap.bench.mechanisms import (
    check_definition,
    make_inputs,
    mechanisms,
    missing_peers,
    peers,
)
from leap.bench.run import Measured, Report, Steps, TurnsConfig, measure_by_turns, report_on
from leap.errors import ConfigError, LeapError
from leap.layers.definitions import Definition
from leap.ops.backends import check_name, using
from leap.reports.progress import Progress, silent

Passes = Literal["forward", "forward+backward"]
PASSES: tuple[Passes, ...] = ("forward", "forward+backward")

SGEMM, COPY = "sgemm", "copy"
SIDE = 1024  # Of the matrices that are multiplied.
COPIED = 2**26  # Bytes: more than caches hold of one core's own.
N_TOKENS_CHECKED = 150  # Past two chunks of 64, and short enough for the definition.


@dataclass(frozen=True, kw_only=True)
class BenchConfig(TurnsConfig):
    """Measure the time and memory of every attention against torch's scaled_dot_product_attention.

    Forward, and forward with backward, over a range of lengths. Each attention is first compared
    with its definition. On a GPU, SDPA's flash kernel and, where it is installed,
    flash-linear-attention are measured on the same inputs. Prints tables; writes results.json,
    results.md, attention.png and roofline.png.
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
    backend: str | None = None
    """Backend to measure, by its name in `leap backends`; by default what answers each call."""
    output: Path = Path("runs/bench-attention")
    """Folder to write the results to."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_at_least_one("lengths", "windows", "heads", "width", "batch")
        if not self.lengths or not self.mechanisms:
            raise ConfigError("nothing to measure: give at least one length and one mechanism")
        self.chosen_mechanisms()
        if self.backend is not None:
            check_name(self.backend)

    def chosen_mechanisms(self) -> list[Definition]:
        """The mechanisms asked for and the baselines they are compared with."""
        there = [*mechanisms(self.windows), *self.peers()]
        known = {mechanism.name: mechanism for mechanism in there}
        wanted = tuple(known) if self.mechanisms == ("all",) else self.mechanisms
        for name in wanted:
            if name not in known:
                raise ConfigError(f"no mechanism is called {name!r}; there are {', '.join(known)}")
        baselines = {known[name].baseline for name in wanted}
        return [m for m in known.values() if m.name in wanted or m.name in baselines]

    def peers(self) -> list[Definition]:
        """What others have on this device."""
        return peers(self.chosen_device(), getattr(torch, self.dtype))


@dataclass(frozen=True, kw_only=True)
class Result(Measured):
    """What one mechanism took at one length."""

    mechanism: str
    baseline: str
    length: int
    passes: Passes
    speed: float
    """Speed-up over the baseline."""
    operations: int | None
    """Floating-point operations of linear attention; None of all others."""
    touched: int
    """Bytes of inputs, outputs and their gradients, each counted once."""
    sgemm: float
    """Operations per second of a matrix product in float32, in the same turns."""
    copy: float
    """Bytes per second, read and written, of a copy, in the same turns."""

    @property
    def of_sgemm(self) -> float | None:
        """Operations per second as a share of those of a matrix product."""
        if self.operations is None:
            return None
        return self.operations / self.seconds / self.sgemm


BenchReport = Report[BenchConfig, Result]


def measure(config: BenchConfig, progress: Progress = silent) -> BenchReport:
    """Compare each mechanism with its definition, then measure them all."""
    chosen = config.chosen_mechanisms()
    left_out = missing_peers(config.chosen_device(), getattr(torch, config.dtype))
    with using(config.backend) if config.backend else nullcontext():
        report = report_on(config, _results(config, chosen, left_out, progress))
    if left_out:
        report.machine["not measured"] = "; ".join(left_out)
    return report


def _results(
    config: BenchConfig, chosen: list[Definition], left_out: list[str], progress: Progress
) -> Iterator[Result]:
    """Measure those of the chosen that agree with their definition; others' that do not are told.

    Ours must.
    """
    others = {peer.name for peer in config.peers()}
    lengths = sorted(set(config.lengths))
    n_cases = len(lengths) * len(PASSES) * (len(chosen) + len(_ceilings(config)))
    steps = Steps(progress, total=len(chosen) + 2 * n_cases)
    inputs = _make_inputs(config, N_TOKENS_CHECKED)
    for mechanism in list(chosen):
        steps.begin(f"checking {mechanism.name}")
        try:
            check_definition(mechanism, inputs)
        except LeapError as error:
            if mechanism.name not in others:
                raise
            chosen.remove(mechanism)
            left_out.append(str(error))
        steps.end()
    for length in lengths:
        inputs = _make_inputs(config, length)
        for passes in PASSES:
            yield from _measure_together(config, chosen, length, passes, inputs, steps)


def _measure_together(
    config: BenchConfig,
    chosen: list[Definition],
    length: int,
    passes: Passes,
    inputs: dict[str, Tensor],
    steps: Steps,
) -> Iterator[Result]:
    ceilings = _ceilings(config)
    calls = {m.name: _call(m, passes, inputs) for m in chosen} | ceilings
    measured = measure_by_turns(calls, steps, f"{length} tokens, {passes}", config)
    backward = passes == "forward+backward"
    for m in chosen:
        operations = m.operations(length, config.width, backward=backward)
        arguments = sum(inputs[name].nbytes for name in (*m.arguments, "upstream"))
        yield Result(
            mechanism=m.name,
            baseline=m.baseline,
            length=length,
            passes=passes,
            speed=measured[m.baseline].seconds / measured[m.name].seconds,
            operations=None if operations is None else config.batch * config.heads * operations,
            touched=2 * arguments if backward else arguments,
            sgemm=2 * SIDE**3 / measured[SGEMM].seconds,
            copy=2 * COPIED / measured[COPY].seconds,
            **vars(measured[m.name]),
        )


def _ceilings(config: BenchConfig) -> dict[str, Call]:
    """What nothing is faster than, as a rule: a matrix product, and a copy."""
    device = config.chosen_device()
    a, b = (torch.ones(SIDE, SIDE, device=device) for _ in "ab")
    one, other = (torch.zeros(COPIED // 4, device=device) for _ in "ab")
    return {SGEMM: partial(torch.mm, a, b), COPY: partial(one.copy_, other)}


def _call(mechanism: Definition, passes: Passes, inputs: dict[str, Tensor]) -> Call:
    arguments = [inputs[name] for name in mechanism.arguments]
    if passes == "forward":
        return partial(_forward, mechanism, arguments)
    arguments = [x.detach().requires_grad_() for x in arguments]
    return partial(_forward_backward, mechanism, arguments, inputs["upstream"])


def _forward(mechanism: Definition, arguments: list[Tensor]) -> None:
    with torch.no_grad():
        mechanism.attend(*arguments)


def _forward_backward(mechanism: Definition, arguments: list[Tensor], upstream: Tensor) -> None:
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
