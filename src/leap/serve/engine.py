"""Continuous batching on constant states: one thread, a fixed pool of slots, nothing paged.

Between any two steps users join the batch and leave it. A step reads one token of every text that
is being written; beside it, a bounded number of tokens of prompts is read, so that a long prompt
delays nobody by more than that. What was read of a prompt is kept at the end of every block, and
texts with the same beginning, one after another or at once, read it once.

Each text gets the tokens that it would get alone: rows do not see one another, and random numbers
belong to a text. Only the rounding of sums may differ with the size of the batch.
"""

import hashlib
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from leap.errors import LeapError, lacking
from leap.serve.protocol import Kept, Model
from leap.serve.sampling import Sampler, Sampling, log_probabilities
from leap.serve.store import Store
from leap.serve.text import Text

Reason = Literal["stop", "length", "cancelled"]
MIB = 2**20
TAIL = 8
"""Tokens that a kept text ends with, for the spelling of what follows: no character has more."""
log = logging.getLogger("leap.serve")


@dataclass(frozen=True)
class Chosen:
    """A token of a reply, with its probability and those of the likeliest."""

    spelled: str
    offset: int
    """Characters before it."""
    log_probability: float
    likeliest: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Piece:
    """Text that became certain with a token; none if the token completes none."""

    text: str
    chosen: Chosen | None = None


@dataclass(frozen=True)
class Done:
    """The end of a reply."""

    reason: Reason
    n_prompt: int
    """Tokens read, where a text goes on its last token among them."""
    n_shared: int
    """Those that had been read before for another text."""
    n_written: int
    state: str | None
    """Where it can be gone on from; None if there was no room to keep it."""


@dataclass(frozen=True)
class Failed:
    """A reply that came to nothing."""

    message: str
    is_late: bool = False
    """Whether it waited for longer than it may."""


Event = Piece | Done | Failed


class Busy(LeapError):
    """There is no room for another text, not even to wait."""

    def __init__(self, seconds: int) -> None:
        super().__init__(f"all slots are taken, and the queue is full; try again in {seconds} s")
        self.seconds = seconds


@dataclass(eq=False, kw_only=True)
class Job:
    """A reply to be written."""

    tokens: Sequence[int]
    """To be read before the first is written; one or more."""
    text: Text
    deliver: Callable[[Event], None]
    """Called in the engine's thread; must not wait."""
    sampling: Sampling = field(default_factory=Sampling)
    max_tokens: int = 16
    after: str | None = None
    """State to go on from."""
    log_probabilities: int | None = None
    """Of how many likeliest tokens to tell the probabilities, besides that of the chosen one."""
    seconds: float = float("inf")
    """How long it may take in all, waiting included."""

    def __post_init__(self) -> None:
        self.sampler = Sampler(self.sampling)
        self.began = time.monotonic()
        self.first: float | None = None
        self.is_cancelled = False
        self.n_read = self.n_shared = 0
        self.n_before = 0
        self.written: list[int] = []
        self.state: Any = None
        self.keys: dict[int, bytes] = {}
        """What the state is known by after a number of tokens, at the ends of blocks."""

    def cancel(self) -> None:
        """Let it end before the next step."""
        self.is_cancelled = True

    @property
    def is_late(self) -> bool:
        """Whether its time is over."""
        return time.monotonic() - self.began > self.seconds


class Watch:
    """Is told what an engine does, to count it; this one counts nothing."""

    def read(self, n_tokens: int, n_shared: int) -> None:
        """A prompt was read."""

    def stepped(self, n_rows: int, seconds: float) -> None:
        """A step was taken."""

    def ended(self, job: Job, event: Done | Failed) -> None:
        """A reply has ended."""


class Engine:
    """Writes replies for many users as one batch.

    Args:
        model: by the protocol.
        slots: texts that are read and written at once.
        waiting: texts that may wait for a slot.
        block: tokens of a prompt that are read at once in a row.
        budget: tokens of prompts, pads counted, that are read between two steps.
        state_bytes: memory for states of finished replies, of which the oldest give way.
        prefix_bytes: memory for states of prompts' beginnings, likewise.
    """

    def __init__(
        self,
        model: Model,
        *,
        slots: int = 64,
        waiting: int = 256,
        block: int = 128,
        budget: int = 512,
        state_bytes: int = 256 * MIB,
        prefix_bytes: int = 256 * MIB,
    ) -> None:
        self.model = model
        self.slots, self.max_waiting = slots, waiting
        self.block, self.budget = block, max(budget, block)
        self.states: Store[str, Kept] = Store(state_bytes)
        self.prefixes: Store[bytes, Any] = Store(prefix_bytes)
        self.watch = Watch()
        self._empty = model.empty()
        self._waiting: deque[Job] = deque()
        self._reading: list[Job] = []
        self._writing: list[Job] = []
        self._state: Any = None
        """Of those that are writing, a row for each."""
        self._pace = 1.0
        """Mean seconds of a reply."""
        self._wake = threading.Condition()
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="leap-engine", daemon=True)

    def start(self) -> None:
        """Begin to work."""
        self._thread.start()

    def stop(self, *, finish: bool = False) -> None:
        """End: what is under way is cancelled, or finished first."""
        with self._wake:
            self._is_stopping = True
            if not finish:
                for job in (*self._waiting, *self._reading, *self._writing):
                    job.cancel()
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join()

    def submit(self, *jobs: Job) -> None:
        """Take replies to be written: all of them, or none and an error."""
        with self._wake:
            if self._is_stopping or len(jobs) + self.n_waiting > self.max_waiting + max(
                0, self.slots - self.n_running
            ):
                raise Busy(self.retry_after)
            self._waiting.extend(jobs)
            self._wake.notify()

    @property
    def n_waiting(self) -> int:
        """Texts that wait for a slot."""
        return len(self._waiting)

    @property
    def n_running(self) -> int:
        """Slots that are taken."""
        return len(self._reading) + len(self._writing)

    @property
    def is_alive(self) -> bool:
        """Whether it works."""
        return self._thread.is_alive()

    @property
    def retry_after(self) -> int:
        """Seconds after which there may be room."""
        return int(min(max(self._pace * (1 + self.n_waiting / self.slots), 1), 60))

    def keep(self, kept: Kept) -> str | None:
        """Keep a text to go on from: its id, None if it is too large to be kept."""
        name = f"state-{secrets.token_hex(12)}"
        is_kept = self.states.put(name, kept, self.model.n_bytes(kept.state))
        return name if is_kept else None

    def _run(self) -> None:
        try:
            while self._admitted():
                self._drop_cancelled()
                if self._writing:
                    self._write()
                if self._reading:
                    self._read()
        finally:  # If it is by an error of ours, nobody is left to wait.
            self._is_stopping = True
            for job in (*self._waiting, *self._reading, *self._writing):
                self._fail(job, "the server has failed; its log says why")

    def _admitted(self) -> bool:
        """Wait for work, and give those who wait a slot; false if it is time to end."""
        with self._wake:
            while not (self._waiting or self._reading or self._writing):
                if self._is_stopping:
                    return False
                self._wake.wait()
            late = [job for job in self._waiting if job.is_cancelled or job.is_late]
            for job in late:
                self._waiting.remove(job)
            new = []
            while self._waiting and self.n_running < self.slots:
                new.append(self._waiting.popleft())
                self._reading.append(new[-1])
        for job in late:
            if job.is_cancelled:
                self._end(job, "cancelled")
            else:
                self._fail(job, "no slot came free in time; try again later", is_late=True)
        for job in new:
            self._begin(job)
        return True

    def _begin(self, job: Job) -> None:
        job.state, key = self._empty, b""
        if job.after is not None:
            kept = self.states.get(job.after)
            if kept is None:
                self._reading.remove(job)
                self._fail(job, f"the state {job.after} is no longer kept; send the whole text")
                return
            job.state, key, job.n_before = kept.state, job.after.encode(), kept.n_read
        # One token is always left to be read, for the logits after it.
        for end in range(self.block, len(job.tokens), self.block):
            piece = np.asarray(job.tokens[end - self.block : end], np.int32).tobytes()
            key = hashlib.blake2b(key + piece, digest_size=16).digest()
            job.keys[end] = key

    def _drop_cancelled(self) -> None:
        for job in [job for job in self._reading if job.is_cancelled or job.is_late]:
            self._reading.remove(job)
            if job.is_cancelled:
                self._end(job, "cancelled")
            else:
                self._fail(job, "the prompt was not read in time; send a shorter one", is_late=True)
        self._leave({i: "cancelled" for i, job in enumerate(self._writing) if job.is_cancelled})

    def _write(self) -> None:
        """One more token in every row."""
        began = time.perf_counter()
        tokens = [[job.written[-1]] for job in self._writing]
        try:
            logits, self._state = self.model.read(tokens, self._state)
        except Exception as error:
            failed, self._writing, self._state = self._writing, [], None
            self._fail_all(failed, error)
            return
        ended: dict[int, Reason | LeapError] = {}
        for i, job in enumerate(self._writing):
            reason = self._choose(job, logits[i])
            if reason is not None:
                ended[i] = reason
        self.watch.stepped(len(tokens), time.perf_counter() - began)
        self._leave(ended)

    def _leave(self, reasons: Mapping[int, Reason | LeapError]) -> None:
        """Take rows out of the batch, and end their replies."""
        if not reasons:
            return
        jobs, state = self._writing, self._state
        others = [i for i in range(len(jobs)) if i not in reasons]
        self._writing = [jobs[i] for i in others]
        self._state = self.model.select(state, others) if others else None
        for i, reason in reasons.items():
            if reason in ("stop", "length"):
                jobs[i].state = self.model.select(state, [i])
            self._end(jobs[i], reason)

    def _read(self) -> None:
        """Read on in prompts, as much as the budget allows, and let those that are read join."""
        groups: dict[tuple[bytes, int, tuple[int, ...]], list[Job]] = {}
        width = 0
        for job in self._reading:
            self._skip(job)
            end = min((job.n_read // self.block + 1) * self.block, len(job.tokens))
            piece = tuple(job.tokens[job.n_read : end])
            before = job.keys.get(job.n_read, (job.after or "").encode())
            group = before, job.n_read, piece
            if group not in groups and (len(groups) + 1) * max(width, len(piece)) > self.budget:
                break  # In the order of their arrival.
            width = max(width, len(piece))
            groups.setdefault(group, []).append(job)
        states = [jobs[0].state for jobs in groups.values()]
        try:
            begun = self.model.join(states) if len(states) > 1 else states[0]
            logits, after = self.model.read([piece for *_, piece in groups], begun)
        except Exception as error:
            failed = [job for jobs in groups.values() for job in jobs]
            self._reading = [job for job in self._reading if job not in failed]
            self._fail_all(failed, error)
            return
        joining: dict[int, list[Job]] = {}
        for i, ((*_, piece), jobs) in enumerate(groups.items()):
            for order, job in enumerate(jobs):
                job.n_read += len(piece)
                job.n_shared += len(piece) if order else 0
            going_on, ended = self._started(jobs, logits[i])
            if going_on:
                joining[i] = going_on
            if len(going_on) < len(jobs) or jobs[0].n_read in jobs[0].keys:
                state = self.model.select(after, [i]) if len(groups) > 1 else after
                for job in jobs:
                    job.state = state
                self._remember(jobs[0])
            for job, reason in ended:
                self._end(job, reason)
        self._join(joining, after)

    def _skip(self, job: Job) -> None:
        """Pass over what was read for another text."""
        for end in sorted(job.keys, reverse=True):
            if end <= job.n_read:
                return
            state = self.prefixes.get(job.keys[end])
            if state is not None:
                job.n_shared += end - job.n_read
                job.state, job.n_read = state, end
                return

    def _remember(self, job: Job) -> None:
        """Keep what was read of a prompt at the end of a block."""
        key = job.keys.get(job.n_read)
        if key is not None:
            self.prefixes.put(key, job.state, self.model.n_bytes(job.state))

    def _started(
        self, jobs: list[Job], logits: NDArray[np.float32]
    ) -> tuple[list[Job], list[tuple[Job, Reason | LeapError]]]:
        """Write the first token of those whose prompt is read: those that go on, or end with it."""
        going_on, ended = [], []
        for job in jobs:
            if job.n_read < len(job.tokens):
                continue
            self._reading.remove(job)
            self.watch.read(len(job.tokens), job.n_shared)
            reason = self._choose(job, logits)
            if reason is None:
                going_on.append(job)
            else:
                ended.append((job, reason))
        return going_on, ended

    def _join(self, jobs: Mapping[int, Sequence[Job]], state: Any) -> None:
        """Put rows of a state into the batch, each as often as it has jobs, all in one copy."""
        rows = [i for i, found in jobs.items() for _ in found]
        if not rows:
            return
        joining = self.model.select(state, rows)
        self._state = joining if self._state is None else self.model.join([self._state, joining])
        for job in (job for found in jobs.values() for job in found):
            job.state = None  # It is in the batch.
            self._writing.append(job)

    def _choose(self, job: Job, logits: NDArray[np.float32]) -> Reason | LeapError | None:
        """Write one more token: why the reply ends with it, if it does."""
        try:
            token = job.sampler.choose(logits)
        except LeapError as error:
            return error
        job.first = job.first or time.monotonic()
        job.written.append(token)
        if token == self.model.end:
            return "stop"
        offset = job.text.n_characters
        spelled, certain, is_stopped = job.text.push(token)
        chosen = None
        if job.log_probabilities is not None:
            chosen = _chosen(job.log_probabilities, logits, token, spelled, offset)
        if certain or chosen is not None:
            self._deliver(job, Piece(certain, chosen))
        if is_stopped:
            return "stop"
        return "length" if len(job.written) >= job.max_tokens or job.is_late else None

    def _end(self, job: Job, reason: Reason | LeapError) -> None:
        if isinstance(reason, LeapError):
            self._fail(job, str(reason))
            return
        name = None
        if reason != "cancelled":
            if rest := job.text.finish():
                self._deliver(job, Piece(rest))
            tail = (*job.tokens, *job.written)[-TAIL:]
            n_read = job.n_before + len(job.tokens) + len(job.written) - 1
            name = self.keep(Kept(job.state, tail, n_read))
        job.state = None
        done = Done(reason, len(job.tokens), job.n_shared, len(job.written), name)
        self._pace += 0.1 * (time.monotonic() - job.began - self._pace)
        self.watch.ended(job, done)
        self._deliver(job, done)

    def _fail(self, job: Job, message: str, *, is_late: bool = False) -> None:
        job.state = None
        failed = Failed(message, is_late)
        self.watch.ended(job, failed)
        self._deliver(job, failed)

    def _fail_all(self, jobs: Sequence[Job], error: Exception) -> None:
        """Let those fail whose batch did, and nobody else."""
        log.error("a batch of %d texts failed", len(jobs), exc_info=error)
        reason = lacking(error) or "the model could not go on with this text"
        for job in jobs:
            self._fail(job, reason)

    def _deliver(self, job: Job, event: Event) -> None:
        try:
            job.deliver(event)
        except Exception:  # Nobody listens any more.
            job.cancel()


def _chosen(n: int, logits: NDArray[np.float32], token: int, spelled: str, offset: int) -> Chosen:
    found = log_probabilities(logits)
    likeliest = np.argsort(-found, kind="stable")[:n]
    return Chosen(
        spelled, offset, float(found[token]), tuple((int(i), float(found[i])) for i in likeliest)
    )
