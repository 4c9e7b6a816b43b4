"""Threads of an op, with free cores and with cores that another program keeps busy.

    python benchmarks/threads/measure.py

Forward and backward of causal linear attention, with each matrix shared out among threads, as torch
does by itself, and with none (`leap.ops.threads`), by turns. Writes results.json and results.md
beside this file, or to --output.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import torch
import tyro
from torch import Tensor

from leap.bench.run import describe_machine
from leap.ops import causal_linear_attention
from leap.ops.linear import chunked
from leap.ops.threads import on_one_thread

CONTEXTS: dict[str, Callable[[Tensor], AbstractContextManager[Any]]] = {
    "of each matrix": lambda _x: nullcontext(),
    "none": on_one_thread,
}


@contextmanager
def busy(n: int) -> Iterator[None]:
    """`n` processes that do nothing but compute."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(n)]
    try:
        yield
    finally:
        for each in others:
            each.terminate()
            each.wait()


def train(inputs: list[Tensor]) -> tuple[float, float]:
    """CPU and wall time of a forward and a backward pass, in ms."""
    cpu, wall = time.process_time(), time.perf_counter()
    o, _ = causal_linear_attention(*inputs)
    torch.autograd.grad(o, inputs, o.detach())
    return 1e3 * (time.process_time() - cpu), 1e3 * (time.perf_counter() - wall)


def main(*, rounds: int = 3, others: int = 2, output: Path = Path(__file__).parent) -> None:
    """Measure, and write the tables.

    Args:
        rounds: measurements of each; medians are told.
        others: processes that keep the cores busy.
        output: folder to write to.
    """
    inputs = [torch.rand(8, 8, 512, 64, requires_grad=True) for _ in "qkv"]
    rows = []
    for n_others in (0, others):
        found: dict[tuple[str, int], list[tuple[float, float]]] = {}
        with busy(n_others):
            for _ in range(rounds + 1):
                for threads in (1, 2):
                    for cut, context in CONTEXTS.items():
                        torch.set_num_threads(threads)
                        chunked.on_one_thread = context
                        found.setdefault((cut, threads), []).append(train(inputs))
        for (cut, threads), times in found.items():
            cpu, wall = (median(each) for each in zip(*times[1:], strict=True))
            row = {"others": n_others, "threads": threads, "cut": cut}
            rows.append(row | {"cpu_ms": cpu, "wall_ms": wall})
    chunked.on_one_thread = on_one_thread
    machine = describe_machine(torch.device("cpu"), 2)
    (output / "results.json").write_text(
        json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n"
    )
    lines = [
        "# Threads of causal linear attention",
        "",
        f"`python benchmarks/threads/measure.py --rounds {rounds} --others {others}`: forward and",
        "backward of 8 sequences of 512 tokens, 8 heads of 64, in ms; medians.",
        "",
        "| busy processes besides | threads | work shared among threads | CPU time | wall time |",
        "|---|---|---|---|---|",
        *(
            f"| {r['others']} | {r['threads']} | {r['cut']} "
            f"| {r['cpu_ms']:.0f} | {r['wall_ms']:.0f} |"
            for r in rows
        ),
        "",
        f"{machine['processor']}, {os.cpu_count()} cores, torch {machine['torch']}.",
    ]
    (output / "results.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    tyro.cli(main)
