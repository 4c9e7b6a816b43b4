"""The main job in a few minutes: learn, beside softmax attention, write, and show what counted.

Two models of one size learn from the same tokens in the same order, one with LEAP's attention and
one with softmax attention. The report holds their curves and perplexities, a text that the first
one wrote, the focus it gave to each word of a sentence, and what a token costs either of them
after a short and after a long text: in CPU time, by turns, so that a busy machine slows down both.
"""

import html
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from transformers import PreTrainedModel, set_seed

from leap.errors import ConfigError
from leap.explain.page import CSS, embedded, png, tinted
from leap.reports.files import write_report
from leap.reports.plots import Line, Panel, plot
from leap.reports.progress import Progress, silent
from leap.reports.table import Table, optional
from leap.tasks.lm.compare import CompareConfig, Outcome, Row, compare, run_configs
from leap.tasks.lm.evaluate import score
from leap.tasks.lm.explain import ExplainedText, explain_text
from leap.tasks.lm.generate import write_on
from leap.tasks.lm.model import build_model, load_model
from leap.tasks.lm.train import TrainConfig, prepare, run_folder
from leap.tasks.lm.writing import GenerateConfig, Written

SENTENCE = "def read(path):\n    with open(path) as file:\n        return file.read()\n"


@dataclass(frozen=True, kw_only=True)
class DemoConfig:
    """Train a small model on text found on this machine beside softmax attention, and report."""

    output: Path = Path("runs/demo")
    """Folder for the report and a run folder of each model."""
    steps: int = 300
    """Optimiser steps of each model, 4,096 tokens each."""
    contexts: tuple[int, ...] = (128, 1024, 8192, 32768)
    """Lengths of text after which the cost of one more token is measured."""

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ConfigError(f"steps={self.steps} must be 1 or more")
        if not self.contexts or min(self.contexts) < 1:
            raise ConfigError(f"contexts={self.contexts}: give one or more, each 1 or more")


class Cost(Protocol):
    """What one more token cost a model after some text."""

    @property
    def model(self) -> str:
        """Name of the model."""

    @property
    def context(self) -> int:
        """Tokens read before it."""

    @property
    def seconds(self) -> float:
        """Time of it."""

    @property
    def state_bytes(self) -> int:
        """Memory of what is kept of the context."""


Costs = Callable[[Mapping[str, PreTrainedModel], Sequence[int]], Sequence[Cost]]
"""Measures models, by name, after each of several contexts: `leap.bench.decode.measure_models`."""

LEAP, SOFTMAX = "leap:windowed:none", "softmax:rotary"


@dataclass(frozen=True)
class Learner:
    """One of the two models, and what came of it."""

    row: Row
    before: float
    """Perplexity per token on held-out text, untrained."""
    milliseconds: dict[int, float]
    """CPU time of one more token on one thread, by the length of the text before it."""
    state_bytes: dict[int, int]

    @property
    def outcome(self) -> Outcome:
        """What came out of its one run."""
        return self.row.outcomes[0]


def demo(
    config: DemoConfig, measure: Costs, progress: Progress = silent
) -> tuple[list[Learner], Written]:
    """Train both models, or go on with them, and write `report.html`.

    Args:
        config: how long to train, and where to.
        measure: how to measure what a token costs.
        progress: told how far the training is.
    """
    comparison = _comparison(config)
    rows = compare(comparison, progress)
    runs = {name: run for (name, _), run in run_configs(comparison).items()}
    loaded = {name: load_model(run.output) for name, run in runs.items()}
    costs = measure({name: model for name, (model, _) in loaded.items()}, config.contexts)
    learners = [
        Learner(
            row=row,
            before=_untrained(runs[row.model]),
            milliseconds={x.context: 1e3 * x.seconds for x in costs if x.model == row.model},
            state_bytes={x.context: x.state_bytes for x in costs if x.model == row.model},
        )
        for row in rows
    ]
    model, tokenizer = loaded[LEAP]
    request = GenerateConfig(run=config.output, prompt="def ", tokens=200, temperature=0.8, seed=0)
    written = write_on(model, tokenizer, request)
    explained = explain_text(model, tokenizer, SENTENCE)
    write_report(config.output, {"report.html": _page(config, learners, written, explained)})
    return learners, written


def _comparison(config: DemoConfig) -> CompareConfig:
    """Two models alike but for the attention, and how it knows of order."""
    return CompareConfig(
        data=None,
        models=(LEAP, SOFTMAX),
        train_tokenizer=2048,
        length=512,
        n_layer=4,
        steps=config.steps,
        batch=8,
        learning_rate=3e-3,
        schedule="cosine",
        warmup=0.05,
        dropout=0.0,
        evaluate_every=max(10, config.steps // 4 // 10 * 10),
        valid_tokens=16384,
        output=config.output,
    )


def _untrained(run: TrainConfig) -> float:
    """Perplexity per token before the first step, on the start of the held-out text."""
    texts = prepare(run, run_folder(run))
    set_seed(run.seed)
    model = build_model(run, texts.tokenizer, run.length)
    return score(model, texts.tokenizer, list(texts.corpus.valid)[:1], length=run.length).perplexity


def cost_table(learners: Sequence[Learner]) -> Table:
    """What one more token costs after each length of text; the ratio is of the times."""
    names = [learner.row.model.partition(":")[0] for learner in learners]
    columns = ["tokens read"] + [f"{name}, ms" for name in names]
    columns += [f"{names[-1]} / {names[0]}"] + [f"{name}, bytes kept" for name in names]
    rows = []
    for context, first in learners[0].milliseconds.items():
        times = [learner.milliseconds[context] for learner in learners]
        rows.append([f"{context:,}"] + [f"{time:.2f}" for time in times])
        rows[-1] += [f"{times[-1] / first:.2f}"]
        rows[-1] += [f"{learner.state_bytes[context]:,}" for learner in learners]
    return Table("One more token, CPU time on one thread", columns, rows)


def conclusion(learners: Sequence[Learner]) -> str:
    """What the longest text says of softmax beside LEAP."""
    leap, softmax = learners
    longest = max(leap.milliseconds)
    slower = softmax.milliseconds[longest] / leap.milliseconds[longest]
    larger = softmax.state_bytes[longest] / leap.state_bytes[longest]
    return (
        f"After {longest:,} tokens, one more takes softmax {slower:.1f} times the time that it "
        f"takes LEAP, and softmax keeps {larger:,.0f} times as much."
    )


def _page(
    config: DemoConfig, learners: list[Learner], written: Written, explained: ExplainedText
) -> str:
    rows = "".join(
        f"<tr><td>{x.row.model}<td>{x.row.parameters:,}<td>{x.before:,.0f}"
        f"<td>{x.outcome.perplexity:.2f}<td>{x.outcome.bits_per_byte:.3f}"
        f"<td>{optional(x.outcome.cpu_seconds_per_step, 2) or '-'}"
        for x in learners
    )
    costs = cost_table(learners)
    head = "".join(f"<th>{column}" for column in costs.columns)
    body = "".join("<tr>" + "".join(f"<td>{cell}" for cell in row) for row in costs.rows)
    found = explained.found
    layers = "".join(
        f"<h3>layer {i}: {name}</h3>{tinted(explained.pieces, weights)}"
        for i, (name, weights) in enumerate(
            zip(found.names, found.importance()[0].mean(1).tolist(), strict=True)
        )
    )
    speed = written.tokens_per_second
    return f"""<!doctype html>
<meta charset="utf-8"><title>leapformer demo</title>
<style>{CSS}</style>
<h1>A language model in a few minutes</h1>
<p>Both models have seen the same {config.steps * 4096:,} tokens of the Python library of this
machine, in the same order, with the same recipe. LEAP knows no positions but its windows; softmax
has rotary ones.
<table>
<tr><th>attention<th>parameters<th>perplexity before<th>after<th>bits per byte<th>CPU s per step
{rows}
</table>
<img alt="learning curves" src="{embedded((config.output / "curves.png").read_bytes())}">
<h2>What it writes</h2>
<p>{len(written.tokens)} tokens{"" if speed is None else f", {speed:.0f} per second"}, from "def ".
<pre>{html.escape("def " + written.text)}</pre>
<h2>What it attends to</h2>
<p>The share of each token in what the last one takes, layer by layer, the mean of the heads. Darker
is more.
{layers}
<h2>What one more token costs</h2>
<p>CPU time on one thread, both models by turns, softmax's divided by LEAP's; and what either keeps
of the text. {conclusion(learners)}
<table><tr>{head}{body}</table>
<img alt="cost of a token" src="{embedded(_plot_costs(learners))}">
"""


def _plot_costs(learners: list[Learner]) -> bytes:
    panel = Panel(
        x="tokens read before",
        y="CPU ms for one more token",
        lines=[Line(x.row.model, list(x.milliseconds.items())) for x in learners],
        x_scale="sizes",
        y_limits=(0, None),
    )
    return png(plot([panel], ""))
