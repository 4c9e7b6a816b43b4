"""How long one more word of a stream takes, against how many have been read.

A step reads one piece of the source and writes one of the target. Our translation model does it on
states of constant size. Beside it is the same model with softmax attention in two ways: with its
keys and values kept (`softmax-cache`), and with the source encoded anew at each step by an encoder
that sees all of it (`softmax-reencode`), as the authors' system does. All have random weights,
which take as long as trained ones. Nothing has been written before, so that what differs is the
source's share.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

from leap.bench.measure import Call, clock_for, keep_freed_memory, seconds, threads
from leap.bench.report import Page, Table, add_legend, digits, draw, where
from leap.bench.run import (
    Progress,
    Steps,
    TurnsConfig,
    check_at_least_one,
    describe_machine,
    plan,
    take_turns,
)
from leap.errors import ConfigError
from leap.models import LeapformerForSeq2SeqLM, LeapformerSeq2SeqConfig, States

OURS, CACHE, REENCODE = "leapformer", "softmax-cache", "softmax-reencode"
CHUNK = 1000
"""Pieces read at once on the way to a length; no matter to what is timed."""


@dataclass(frozen=True, kw_only=True)
class StreamBenchConfig(TurnsConfig):
    """Measure the time of one more word of a stream of text, beside softmax and re-encoding.

    Prints tables; writes results.json, results.md and stream.png.
    """

    lengths: tuple[int, ...] = (100, 1000, 10_000, 100_000)
    """Pieces of the source read before the one that is timed."""
    longest_reencoded: int = 10_000
    """Beyond so many pieces the source is not encoded anew: it would take too long."""
    hidden_size: int = 128
    """Width of the models."""
    layers: int = 3
    """Layers of the encoder, and of the decoder."""
    heads: int = 4
    """Heads of each attention."""
    vocabulary: int = 6000
    """Pieces that the models know."""
    output: Path = Path("runs/bench-stream")
    """Folder to write the results to."""

    def __post_init__(self) -> None:
        super().__post_init__()
        names = ("lengths", "hidden_size", "layers", "heads", "vocabulary")
        check_at_least_one(**{name: getattr(self, name) for name in names})
        if not self.lengths:
            raise ConfigError("nothing to measure: give at least one length")


@dataclass(frozen=True, kw_only=True)
class StreamResult:
    """What one model took for a word after one length."""

    model: str
    length: int
    seconds: float
    """The fastest turn."""
    state_bytes: int
    """Memory of what is kept of the stream; of one that encodes anew, what it makes each time."""
    turns: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class StreamReport:
    """Everything one run measured, and on what."""

    config: StreamBenchConfig
    machine: dict[str, str]
    results: list[StreamResult]


@torch.no_grad()
def measure(
    config: StreamBenchConfig, progress: Progress = lambda done, total, doing: None
) -> StreamReport:
    """Measure all models, by turns, at each length."""
    device = config.chosen_device()
    _, clock = clock_for(device, config.threads)
    lengths = sorted(set(config.lengths))
    models = {name: _model(name, config) for name in (OURS, "softmax")}
    total = sum(2 + (length <= config.longest_reencoded) for length in lengths)
    steps = Steps(progress, total=total)
    results: list[StreamResult] = []
    kept = {name: States({}) for name in models}
    source = torch.randint(4, config.vocabulary, (1, lengths[-1])).to(device)
    keep_freed_memory()
    with threads(config.threads):
        before = 0
        for length in lengths:
            for name, model in models.items():
                for part in source[:, before:length].split(CHUNK, dim=1):
                    kept[name] = model.read(part, kept[name])
            before = length
            calls: dict[str, Call] = {
                OURS: partial(_step, models[OURS], source[:, :1], kept[OURS]),
                CACHE: partial(_step, models["softmax"], source[:, :1], kept["softmax"]),
            }
            sizes = {OURS: kept[OURS].n_bytes, CACHE: kept["softmax"].n_bytes}
            if length <= config.longest_reencoded:
                calls[REENCODE] = partial(_step, models["softmax"], source[:, :length], None)
                sizes[REENCODE] = sizes[CACHE]
            plans = {
                name: plan(
                    call,
                    clock,
                    repeats=config.repeats,
                    budget=config.budget,
                    first=seconds(call, clock),
                )
                for name, call in calls.items()
            }
            turns = take_turns(calls, plans, clock, steps, f"after {length}", warm_up=True)
            results += [
                StreamResult(
                    model=name,
                    length=length,
                    seconds=min(taken),
                    state_bytes=sizes[name],
                    turns=taken,
                )
                for name, taken in turns.items()
            ]
    return StreamReport(
        config=config, machine=describe_machine(device, config.threads), results=results
    )


def page(report: StreamReport) -> Page:
    """The tables, the plot and the sentences that go with the report."""
    config = report.config
    milliseconds = {(r.model, r.length): 1e3 * r.seconds for r in report.results}
    kib = {(r.model, r.length): r.state_bytes / 2**10 for r in report.results}
    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axes = figure.subplots()
    draw(axes, milliseconds)
    axes.set_xlabel("source so far (pieces)")
    axes.set_ylabel(f"{report.machine['clock']} a word (ms)")
    figure.suptitle("One more word of a stream", fontsize=11)
    axes.set_title(where(report.machine), fontsize=8)
    add_legend(figure)
    return Page(
        name="stream",
        report=report,
        description=(
            f"{config.layers} + {config.layers} layers of width {config.hidden_size}, "
            f"{config.heads} heads, {config.vocabulary} pieces, random weights, one stream, "
            f"float32; {where(report.machine)}. A step reads one piece and writes one; "
            f"{REENCODE} encodes all of the source at each step."
        ),
        tables=[
            _table(f"milliseconds of {report.machine['clock']} a word", milliseconds),
            _table("state kept of the stream, KiB", kib),
        ],
        figure=figure,
    )


def _table(title: str, numbers: dict[tuple[str, int], float]) -> Table:
    lengths = sorted({length for _, length in numbers})
    rows = []
    for name in dict.fromkeys(name for name, _ in numbers):
        found = [numbers.get((name, length)) for length in lengths]
        rows.append([name, *("-" if value is None else digits(value) for value in found)])
    return Table(title, ["pieces", *map(str, lengths)], rows)


def _model(name: str, config: StreamBenchConfig) -> LeapformerForSeq2SeqLM:
    torch.manual_seed(config.seed)
    settings: dict[str, Any] = {
        "vocab_size": config.vocabulary,
        "hidden_size": config.hidden_size,
        "n_layer": config.layers,
        "n_heads": config.heads,
        "attention": name,
    }
    model = LeapformerForSeq2SeqLM(LeapformerSeq2SeqConfig(**settings))
    return model.eval().to(config.chosen_device())  # type: ignore[no-untyped-call]


@torch.no_grad()
def _step(model: LeapformerForSeq2SeqLM, source: torch.Tensor, states: States | None) -> None:
    model.write(source[:, :1], model.read(source, states))
