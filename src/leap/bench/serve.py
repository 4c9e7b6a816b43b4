"""What a server gives many users: tokens per second, latency, and memory per user.

Users ask the engine of `leap serve` in its own process, without HTTP; each asks again as soon as
its reply has ended. Prompts and replies have mixed lengths, the same for every model and number of
users. Each model serves them as one batch that users join and leave, and one user at a time, which
is the same engine with one slot. GPT-2 of the same sizes is served with its KV cache, a
`DynamicCache`, rows of a batch padded to the longest. Weights are random, which take as long as
trained ones.

With one CPU thread times are CPU time, of latencies too: the engine is never idle while users
wait, and what other processes take is left out.
"""

import gc
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from leap.bench.decode import GPT2, random_model, sizes
from leap.bench.measure import Clock, clock_for
from leap.bench.run import Report, Steps, Timed, TurnsConfig, report_on
from leap.errors import ConfigError, LeapError
from leap.models import usable_as
from leap.reports.progress import Progress, silent
from leap.serve.engine import Done, Engine, Event, Failed, Job, Piece, Watch
from leap.serve.models import KeyValueModel, StateModel
from leap.serve.sampling import Sampling
from leap.serve.text import Text
from leap.tasks.lm.tokenizer import byte_tokenizer

PERCENTS = (50, 95, 99)
N_DISTINCT = 24
"""Different requests of a soak, each of which is answered alone first."""
BREAKING_OFF = 0.25
"""Share of a soak's requests that are broken off."""
N_LOOKS = 4
"""How often a soak looks at memory."""


@dataclass(frozen=True, kw_only=True)
class ServeBenchConfig(TurnsConfig):
    """Measure tokens per second, latency and memory per user of the server, beside GPT-2.

    Users in one process ask the engine of leap serve, each again as soon as it has its reply, with
    prompts and replies of mixed lengths: as one batch, and one user at a time. Prints tables;
    writes results.json, results.md and serve.png.
    """

    users: tuple[int, ...] = (1, 8, 50)
    """Numbers of users at once."""
    models: tuple[str, ...] = ("leapformer", "leap", GPT2)
    """Models to serve: gpt2, or ours by the name of their attention."""
    preset: str = "small"
    """Sizes of all models: tiny, small, 140m, 247m or 350m."""
    prompts: tuple[int, int] = (16, 512)
    """Fewest and most tokens of a prompt; their logarithms are spread evenly."""
    replies: tuple[int, int] = (16, 96)
    """Fewest and most tokens of a reply."""
    requests: int = 16
    """Requests that are measured, and two per user if that is more."""
    soak: float = 0.0
    """Seconds to let users join, leave and break off besides, to see what is lost or leaks."""
    output: Path = Path("runs/bench-serve")
    """Folder to write the results to."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_at_least_one("users", "prompts", "replies", "requests")
        if not self.users or not self.models:
            raise ConfigError("nothing to measure: give at least one number of users and one model")
        for name in ("prompts", "replies"):
            least, most = getattr(self, name)
            if least > most:
                raise ConfigError(f"{name}={(least, most)}: give the fewest, then the most")
        if not 0 <= self.soak < float("inf"):
            raise ConfigError(f"soak={self.soak} must be 0 seconds or more")
        known = (*usable_as("causal"), GPT2)
        for name in self.models:
            if name not in known:
                raise ConfigError(f"no model is called {name!r}; there are {', '.join(known)}")
        sizes(self.preset, self.n_positions)

    @property
    def n_positions(self) -> int:
        """Tokens of the longest text."""
        return self.prompts[1] + self.replies[1] + 1


@dataclass(frozen=True, kw_only=True)
class Percentiles:
    """Percentiles of many durations, in seconds."""

    p50: float
    p95: float
    p99: float

    @classmethod
    def of(cls, values: list[float]) -> "Percentiles":
        """Those of some values, of which there is one at least."""
        p50, p95, p99 = (float(np.percentile(values, percent)) for percent in PERCENTS)
        return cls(p50=p50, p95=p95, p99=p99)


@dataclass(frozen=True, kw_only=True)
class ServeResult(Timed):
    """How one model served a number of users at once; `seconds` are those of all requests."""

    model: str
    users: int
    slots: int
    """1 if they were served one at a time."""
    n_requests: int
    n_read: int
    """Tokens of prompts."""
    n_written: int
    """Tokens of replies."""
    first: Percentiles
    """From a request to its first token."""
    between: Percentiles
    """From a token to the next."""
    whole: Percentiles
    """From a request to the end of its reply."""
    bytes_per_user: float
    """Most memory of the batch's states, divided by its users."""
    n_equal: int
    """Replies that are, token for token, those of one user at a time."""


@dataclass(frozen=True, kw_only=True)
class SoakResult:
    """What became of users who joined, left and broke off."""

    model: str
    users: int
    seconds: float
    n_replies: int
    n_broken_off: int
    n_wrong: int
    """Replies that differ from what was answered alone."""
    n_failed: int
    n_left: int
    """Slots that are taken, and requests that wait, after all have left."""
    resident_mib: tuple[float, ...]
    """Memory of the process, from an even share of the time to the next."""
    n_tensors: tuple[int, ...]
    """Tensors alive at the same times."""


@dataclass(frozen=True, kw_only=True)
class ServeReport(Report[ServeBenchConfig, ServeResult]):
    """What was measured, and of the soak."""

    soak: SoakResult | None = None


@dataclass
class Request:
    """One request, and what became of it."""

    prompt: list[int]
    n_new: int
    began: float = 0.0
    at: list[float] = field(default_factory=list)
    """When each token came."""
    written: list[int] = field(default_factory=list)


def measure(config: ServeBenchConfig, progress: Progress = silent) -> ServeReport:
    """Serve all users with all models, and let the first of them soak if that is asked for."""
    soaks: list[SoakResult] = []
    report = report_on(config, _results(config, progress, soaks))
    return ServeReport(**vars(report), soak=soaks[0] if soaks else None)


def _results(
    config: ServeBenchConfig, progress: Progress, soaks: list[SoakResult]
) -> Iterator[ServeResult]:
    names = list(dict.fromkeys(config.models))
    users = sorted(set(config.users))
    n_ways = sum(1 if n == 1 else 2 for n in users)
    steps = Steps(progress, total=len(names) * n_ways + bool(config.soak))
    _, clock = clock_for(config.chosen_device(), config.threads)
    for name in names:
        served = serve_random(name, config)
        for n in users:
            expected: list[list[int]] = []
            for slots in dict.fromkeys((1, n)):  # A single user is the whole batch.
                how = "as one batch" if slots == n else "one at a time"
                steps.begin(f"{name}: {n} users {how}")
                found, requests = _serve(served, name, n, slots, config, clock, expected)
                expected = expected or [request.written for request in requests]
                yield found
                steps.end()
    if config.soak:
        steps.begin(f"{names[0]}: soak")
        soaks.append(soak(serve_random(names[0], config), names[0], config))


def serve_random(name: str, config: ServeBenchConfig) -> Any:
    """A model of random weights as the engine takes it."""
    made = random_model(name, config.preset, config.n_positions, config.seed)
    made = made.to(config.chosen_device())
    kind: Any = KeyValueModel if name == GPT2 else StateModel
    served: Any = kind(made, byte_tokenizer(), name)
    served.end = None  # Replies have the length that is asked for.
    return served


def make_requests(config: ServeBenchConfig, n: int, vocab_size: int) -> list[Request]:
    """The requests of a run, always the same."""
    chance = random.Random(config.seed)
    found = []
    for _ in range(n):
        length = round(np.exp(chance.uniform(*np.log(config.prompts))))
        prompt = [chance.randrange(vocab_size) for _ in range(length)]
        found.append(Request(prompt, chance.randint(*config.replies)))
    return found


class Peak(Watch):
    """Looks at the memory of an engine's batch as it steps."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.bytes_per_user = 0.0
        self.n_rows = 0

    def stepped(self, n_rows: int, seconds: float) -> None:
        """A step was taken: what counts is the fullest batch, at its largest."""
        if n_rows >= self.n_rows:
            per_user = self.engine.model.n_bytes(self.engine._state) / n_rows
            fuller = n_rows > self.n_rows
            self.bytes_per_user = per_user if fuller else max(self.bytes_per_user, per_user)
            self.n_rows = n_rows


def _serve(
    served: Any,
    name: str,
    users: int,
    slots: int,
    config: ServeBenchConfig,
    clock: Clock,
    expected: list[list[int]],
) -> tuple[ServeResult, list[Request]]:
    n = max(config.requests, 2 * users)
    requests = make_requests(config, n, served.model.config.vocab_size)
    waiting, faults, ended = list(range(n)), [], threading.Event()
    engine = Engine(served, slots=slots, waiting=n, state_bytes=0, prefix_bytes=0)
    engine.watch = peak = Peak(engine)
    n_open = n

    def ask() -> None:
        if not waiting:
            return
        request = requests[waiting.pop(0)]
        request.began = clock()

        def take(event: Event) -> None:
            nonlocal n_open
            if isinstance(event, Piece):
                request.at.append(clock())
                return
            if isinstance(event, Failed):
                faults.append(event.message)
            request.written = job.written
            n_open -= 1
            ask()
            if not n_open:
                ended.set()

        job = _job(request, take)
        engine.submit(job)

    served.read([requests[0].prompt], served.empty())  # What the first call prepares is not timed.
    start = clock()
    for _ in range(users):
        ask()
    engine.start()
    ended.wait()
    seconds = clock() - start
    engine.stop()
    if faults:
        raise LeapError(f"{name} failed for {len(faults)} of {n} requests: {faults[0]}")
    between = [gap for request in requests for gap in np.diff(request.at).tolist()]
    alone = expected or [request.written for request in requests]
    result = ServeResult(
        model=name,
        users=users,
        slots=slots,
        seconds=seconds,
        turns=(seconds,),
        n_requests=n,
        n_read=sum(len(request.prompt) for request in requests),
        n_written=sum(len(request.written) for request in requests),
        first=Percentiles.of([request.at[0] - request.began for request in requests]),
        between=Percentiles.of(between or [0.0]),
        whole=Percentiles.of([request.at[-1] - request.began for request in requests]),
        bytes_per_user=peak.bytes_per_user,
        n_equal=sum(x.written == y for x, y in zip(requests, alone, strict=True)),
    )
    return result, requests


def _job(request: Request, take: Callable[[Event], None]) -> Job:
    """Greedy, and a piece of text for each token, so that its time is known."""
    return Job(
        tokens=request.prompt,
        text=Text(lambda token: "x"),
        deliver=take,
        sampling=Sampling(temperature=0.0),
        max_tokens=request.n_new,
    )


def soak(served: Any, name: str, config: ServeBenchConfig) -> SoakResult:
    """Let users come, go and break off for some time, and compare what they get."""
    users = max(config.users)
    # So few states are kept that those of the beginning soon give way.
    room = 64 * served.n_bytes(served.read([[0]], served.empty())[1])
    slots = max(1, users * 3 // 4)
    engine = Engine(served, slots=slots, waiting=users, state_bytes=room, prefix_bytes=room)
    known = make_requests(config, N_DISTINCT, served.model.config.vocab_size)
    alone = Engine(served, slots=1, waiting=N_DISTINCT)
    alone.start()
    expected = [_answer(alone, request) for request in known]
    alone.stop()
    engine.start()
    chance = random.Random(config.seed)
    counts = {"replies": 0, "broken off": 0, "wrong": 0, "failed": 0}
    is_over, n_open, ended = threading.Event(), users, threading.Event()

    def ask() -> None:
        which = chance.randrange(N_DISTINCT)
        after = chance.randrange(known[which].n_new) if chance.random() < BREAKING_OFF else None
        n_pieces = 0

        def take(event: Event) -> None:
            nonlocal n_pieces, n_open
            if isinstance(event, Piece):
                n_pieces += 1
                if n_pieces == after:
                    job.cancel()
                return
            if isinstance(event, Done) and event.reason == "cancelled":
                counts["broken off"] += 1
            else:
                counts["replies"] += 1
                counts["failed"] += isinstance(event, Failed)
                counts["wrong"] += isinstance(event, Done) and job.written != expected[which]
            if is_over.is_set():
                n_open -= 1
                if not n_open:
                    ended.set()
            else:
                ask()

        job = _job(known[which], take)
        if after == 0:
            job.cancel()  # Before it has a slot.
        engine.submit(job)

    for _ in range(users):
        ask()
    resident, tensors = [], []
    for _ in range(N_LOOKS):
        ended.wait(config.soak / N_LOOKS)
        gc.collect()
        resident.append(_resident_mib())
        tensors.append(sum(issubclass(type(x), torch.Tensor) for x in gc.get_objects()))
    is_over.set()
    ended.wait()
    result = SoakResult(
        model=name,
        users=users,
        seconds=config.soak,
        n_replies=counts["replies"],
        n_broken_off=counts["broken off"],
        n_wrong=counts["wrong"],
        n_failed=counts["failed"],
        n_left=engine.n_running + engine.n_waiting,
        resident_mib=tuple(resident),
        n_tensors=tuple(tensors),
    )
    engine.stop()
    return result


def _answer(engine: Engine, request: Request) -> list[int]:
    ended = threading.Event()
    job = _job(request, lambda event: None if isinstance(event, Piece) else ended.set())
    engine.submit(job)
    ended.wait()
    return job.written


def _resident_mib() -> float:
    """Memory of this process; 0 on systems that do not tell."""
    statm = Path("/proc/self/statm")
    if not statm.exists():
        return 0.0
    import resource

    return int(statm.read_text().split()[1]) * resource.getpagesize() / 2**20
