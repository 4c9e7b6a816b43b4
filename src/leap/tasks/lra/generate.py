"""Draw many examples by a rule, with several processes and the same outcome for any number."""

import multiprocessing
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b

import numpy as np

from leap.reports.progress import Progress, Status
from leap.tasks.lra.cache import SPLITS, Examples, Sequences

CHUNK = 500
"""Examples that are drawn from one seed: what a process does at a time."""

Make = Callable[[int, np.random.Generator], Examples]
"""Draws a number of examples of one input each."""
Seed = tuple[int, int, int]


@dataclass(frozen=True)
class Plan:
    """What is to be drawn."""

    sizes: Mapping[str, int]
    """Examples for train, valid and test."""
    seed: int
    workers: int | None = None
    """Processes; one for each core if None."""
    distinct: bool = False
    """Whether repeats are dropped, within a split and between them."""


def generate(make: Make, plan: Plan, progress: Progress) -> dict[str, Examples]:
    """Draw examples, telling `progress` how many are done of how many.

    The test set is drawn first and the training set last, each from seeds of its own, so that one
    who asks for fewer to train on is tested on the same.
    """
    total = sum(plan.sizes.values())
    seen: set[bytes] = set()
    made: dict[str, Examples] = {}
    n_chunks = sum(-(-size // CHUNK) for size in plan.sizes.values())
    with _processes(min(plan.workers or cores(), n_chunks)) as run:
        for split in reversed(SPLITS):
            size, before = plan.sizes[split], sum(map(len, made.values()))
            chunks: list[Examples] = []
            count = 0
            # Where repeats are dropped, one round of chunks may not be enough.
            while count < size:
                more = range(len(chunks), len(chunks) - (count - size) // CHUNK)
                seeds = [(plan.seed, SPLITS.index(split), i) for i in more]
                for examples in run(partial(_draw, make), seeds):
                    chunks.append(_take(examples, size - count, seen if plan.distinct else None))
                    count += len(chunks[-1])
                    progress(Status(before + count, total))
            made[split] = Examples.join(chunks)
    return {split: made[split] for split in SPLITS}


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def _draw(make: Make, seed: Seed) -> Examples:
    return make(CHUNK, np.random.default_rng(seed))


def _take(examples: Examples, count: int, seen: set[bytes] | None) -> Examples:
    """The first `count`; of those alone that were not seen before, if a record of that is kept."""
    if seen is None:
        return examples.part(0, count)
    kept: list[int] = []
    for i in range(len(examples)):
        digest = blake2b(examples.inputs[i].tobytes(), digest_size=16).digest()
        if digest not in seen and len(kept) < count:
            seen.add(digest)
            kept.append(i)
    inputs = Sequences.join([examples.inputs[i] for i in kept])
    return Examples(inputs, examples.labels[kept])


@contextmanager
def _processes(
    count: int,
) -> Iterator[Callable[[Callable[[Seed], Examples], Iterable[Seed]], Iterable[Examples]]]:
    """A `map` that keeps the order: over `count` processes, or within this one if it is 1."""
    if count == 1:
        yield map
        return
    # A copy of this process is there at once; a new one would import all of torch first.
    method = "fork" if sys.platform == "linux" else "spawn"
    with ProcessPoolExecutor(count, multiprocessing.get_context(method)) as pool:
        try:
            yield pool.map
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
