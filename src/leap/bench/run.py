"""What every bench does around its measurements: the machine, the turns, and telling how far it is.

Whatever is compared takes turns in one run, so that whatever else the machine does hits all of it
alike; the fastest turn counts, being the one least disturbed.
"""

import math
import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Generic, TypeVar

import torch

from leap.bench.measure import (
    Call,
    Clock,
    clock_for,
    keep_freed_memory,
    peak_bytes,
    seconds,
    threads,
)
from leap.errors import ConfigError, check_seed
from leap.reports.progress import Progress, Status

SHORTEST_TURN = 0.01  # Seconds; calls quicker than this are timed several in a row.


@dataclass(frozen=True, kw_only=True)
class TurnsConfig:
    """How to measure: the settings that every bench has in common."""

    device: str = "cpu"
    """Where to run: cpu, cuda, cuda:1, and so on. A GPU is timed by its own events."""
    threads: int = 1
    """CPU threads; one is timed in CPU time, more in wall time."""
    repeats: int = 10
    """Repetitions of each measurement, interleaved, of which the fastest counts."""
    budget: float = 10.0
    """Seconds to spend on the repetitions of one measurement; there is always one."""
    seed: int = 0
    """Random seed of the weights and inputs."""

    def __post_init__(self) -> None:
        self.check_at_least_one("threads", "repeats")
        if not 0 < self.budget < math.inf:
            raise ConfigError(f"budget={self.budget} must be more than 0 seconds")
        check_seed(self.seed)
        self.chosen_device()

    def check_at_least_one(self, *settings: str) -> None:
        """Raise an error that names the first of the settings to hold a number below 1."""
        for name in settings:
            value = getattr(self, name)
            if any(number < 1 for number in (value if isinstance(value, tuple) else (value,))):
                raise ConfigError(f"{name}={value} must be at least 1")

    def chosen_device(self) -> torch.device:
        """The device, if it is one that can be measured here."""
        return find_device(self.device)


C = TypeVar("C", bound=TurnsConfig)
R = TypeVar("R", bound="Timed")


@dataclass(frozen=True, kw_only=True)
class Timed:
    """How long something took; a bench adds what it was."""

    seconds: float
    """The fastest turn."""
    turns: tuple[float, ...]
    """Seconds of each turn."""


@dataclass(frozen=True, kw_only=True)
class Measured(Timed):
    """How long something took, and how much memory."""

    peak_bytes: int
    """Most memory held at once on top of what stays: inputs, weights, gradients, optimiser."""


@dataclass(frozen=True, kw_only=True)
class Report(Generic[C, R]):
    """Everything one run measured, and on what."""

    config: C
    machine: dict[str, str]
    results: list[R]


def report_on(config: C, results: Iterator[R]) -> Report[C, R]:
    """Take the results, each measured as it is asked for, under the settings of a run."""
    keep_freed_memory()
    with threads(config.threads):
        taken = list(results)
    machine = describe_machine(config.chosen_device(), config.threads)
    return Report(config=config, machine=machine, results=taken)


def find_device(name: str) -> torch.device:
    """The device of this name, if it is one that can be measured here."""
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device={name!r} cannot be measured; give cpu or cuda:0")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        n = torch.cuda.device_count()
        found = f"{n} of them" if n else "none; without --device the CPU is measured"
        raise ConfigError(f"no GPU {name!r} is here: torch finds {found}")
    return device


def describe_machine(device: torch.device, n_threads: int) -> dict[str, str]:
    """What the numbers depend on besides the settings."""
    clock, _ = clock_for(device, n_threads)
    described = {
        "processor": _processor(),
        "threads": str(n_threads),
        "clock": clock,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "leapformer": version("leapformer"),
    }
    if device.type == "cuda":
        described["gpu"] = torch.cuda.get_device_name(device)
    return described


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


@dataclass
class Steps:
    """How far a bench is, told to `progress` as each step begins."""

    progress: Progress
    total: int
    done: int = 0

    def begin(self, doing: str) -> None:
        """Tell what is under way, which may be a step that was begun before."""
        stage, colon, _ = doing.partition(":")
        self.progress(Status(self.done, self.total, doing=doing, news=stage if colon else None))

    def end(self) -> None:
        """Count a step as done."""
        self.done += 1


@dataclass(frozen=True)
class Plan:
    """How often a call is timed: turns, and calls in a row in each."""

    n_turns: int
    n_calls: int


def plan(call: Call, clock: Clock, config: TurnsConfig, first: float | None = None) -> Plan:
    """As many of the config's turns as fit into its budget, and always one.

    Args:
        call, clock: what is to be timed, and by what.
        config: its `repeats` and `budget`.
        first: seconds of a call that was made already. If short, another is made to tell better,
            the first having carried the cost of warming up or of a profiler.
    """
    estimate = first if first is not None and first > 1.0 else seconds(call, clock)
    n_calls = math.ceil(SHORTEST_TURN / max(estimate, 1e-6))
    n_turns = int(config.budget / max(n_calls * estimate, 1e-6))
    return Plan(n_turns=min(max(n_turns, 1), config.repeats), n_calls=n_calls)


def time_by_turns(
    calls: Mapping[str, Call], steps: Steps, doing: str, config: TurnsConfig
) -> dict[str, Timed]:
    """How long each call takes after another of its own kind: a step of the progress for each."""
    _, clock = clock_for(config.chosen_device(), config.threads)
    plans = {
        name: plan(call, clock, config, first=seconds(call, clock)) for name, call in calls.items()
    }
    return take_turns(calls, plans, clock, steps, doing, warm_up=True)


def measure_by_turns(
    calls: Mapping[str, Call], steps: Steps, doing: str, config: TurnsConfig
) -> dict[str, Measured]:
    """How long each call takes, and its memory: two steps of the progress for each."""
    device = config.chosen_device()
    _, clock = clock_for(device, config.threads)
    # The call whose memory is counted warms the timed ones up, and tells how many fit the budget.
    peaks: dict[str, int] = {}
    plans: dict[str, Plan] = {}
    for name, call in calls.items():
        steps.begin(f"{doing}: memory of {name}")
        start = clock()
        peaks[name] = peak_bytes(call, device)
        plans[name] = plan(call, clock, config, first=clock() - start)
        steps.end()
    timed = take_turns(calls, plans, clock, steps, doing)
    return {name: Measured(**vars(timed[name]), peak_bytes=peaks[name]) for name in calls}


def take_turns(
    calls: Mapping[str, Call],
    plans: Mapping[str, Plan],
    clock: Clock,
    steps: Steps,
    doing: str,
    *,
    warm_up: bool = False,
) -> dict[str, Timed]:
    """Time each call, a step of the progress for each.

    With `warm_up` a turn begins with a call that is not timed.
    """
    turns: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(max(plan.n_turns for plan in plans.values())):
        for name, call in calls.items():
            if turn >= plans[name].n_turns:
                continue
            steps.begin(f"{doing}: time of {name}")
            if warm_up:
                call()
            turns[name].append(seconds(call, clock, n_calls=plans[name].n_calls))
            if len(turns[name]) == plans[name].n_turns:
                steps.end()
    return {name: Timed(seconds=min(taken), turns=tuple(taken)) for name, taken in turns.items()}
