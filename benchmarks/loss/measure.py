"""Memory and time of the loss: a few tokens at a time against all logits at once.

    python benchmarks/loss/measure.py

Forward and backward of a linear head and its cross-entropy, gradients of both the hidden states and
the head included. Writes results.json and results.md beside this file, or to --output.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
import tyro
from torch import Tensor

from leap.bench.measure import clock_for, peak_bytes, seconds, threads
from leap.bench.report import where
from leap.bench.run import describe_machine
from leap.models.loss import IGNORED, linear_cross_entropy
from leap.reports.table import MIB


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Measure the loss in chunks against the plain form."""

    tokens: int = 2 * 2048
    """Tokens, of all sequences together."""
    vocabulary: int = 32100
    """Words to choose from."""
    width: int = 128
    """Width of the hidden states."""
    repeats: int = 3
    """Turns, of which the fastest counts."""
    output: Path = Path(__file__).parent
    """Folder for the results."""


def plain(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """The summed cross-entropy with all logits at hand."""
    return F.cross_entropy(x @ weight.mT, labels, ignore_index=IGNORED, reduction="sum")


FORMS = {"all logits at once": plain, "in chunks": linear_cross_entropy}


def main(settings: Settings) -> dict[str, dict[str, float]]:
    """Measure both forms by turns, write what came out, and return it."""
    device, n_threads = torch.device("cpu"), 1
    torch.manual_seed(0)
    x = torch.randn(settings.tokens, settings.width, requires_grad=True)
    weight = (0.02 * torch.randn(settings.vocabulary, settings.width)).requires_grad_()
    labels = torch.randint(settings.vocabulary, (settings.tokens,))
    calls = {
        name: lambda form=form: torch.autograd.grad(form(x, weight, labels), (x, weight))
        for name, form in FORMS.items()
    }
    _, clock = clock_for(device, n_threads)
    with threads(n_threads):
        times: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(settings.repeats):
            for name, call in calls.items():
                times[name].append(seconds(call, clock))
        found = {
            name: {"peak_bytes": peak_bytes(call, device), "seconds": min(times[name])}
            for name, call in calls.items()
        }
        machine = describe_machine(device, n_threads)
    write(settings, machine, found)
    return found


def write(settings: Settings, machine: dict[str, str], found: dict[str, dict[str, float]]) -> None:
    """Write the numbers, and a table of them."""
    most, least = (found[name]["peak_bytes"] for name in FORMS)
    rows = "\n".join(
        f"| {name} | {row['peak_bytes'] / MIB:,.0f} | {row['seconds']:.2f} |"
        for name, row in found.items()
    )
    page = f"""# The loss in chunks

`python benchmarks/loss/measure.py`: {settings.tokens:,} tokens, {settings.vocabulary:,} words,
width {settings.width}, float32; {where(machine)}.

| forward and backward | peak MiB | s |
| --- | --: | --: |
{rows}

Chunks take {most / least:.1f} times less memory. What the inputs and the head take is not counted;
the gradients of both are.
"""
    settings.output.mkdir(parents=True, exist_ok=True)
    (settings.output / "results.md").write_text(page)
    sizes = {name: value for name, value in asdict(settings).items() if name != "output"}
    numbers = {"settings": sizes, "machine": machine, "results": found}
    (settings.output / "results.json").write_text(json.dumps(numbers, indent=1) + "\n")


if __name__ == "__main__":
    main(tyro.cli(Settings))
