"""The main job in a few minutes: learn, beside softmax attention, write, and show what counted.

Two models of one size learn from the same tokens in the same order, one with LEAP's attention and
one with softmax attention. The report holds their curves and perplexities, a text that the first
one wrote, the focus it gave to each word of a sentence, and what a token costs either of them
after a short and after a long text.
"""

import html
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from matplotlib.figure import Figure
from transformers import PreTrainedModel, set_seed

from leap.explain.page import CSS, embedded, png, tinted
from leap.tasks.lm.compare import CompareConfig, CompareProgress, Row, compare, run_configs
from leap.tasks.lm.evaluate import score
from leap.tasks.lm.explain import ExplainedText, explain_text
from leap.tasks.lm.generate import GenerateConfig, Written, write_on
from leap.tasks.lm.model import build_model, load_model
from leap.tasks.lm.train import TrainConfig, prepare, run_folder
from leap.training.curve import COLOURS
from leap.training.folder import write_whole

SENTENCE = "def read(path):\n    with open(path) as file:\n        return file.read()\n"


@dataclass(frozen=True, kw_only=True)
class DemoConfig:
    """Train a small model on text found on this machine beside softmax attention, and report."""

    output: Path = Path("runs/demo")
    """Folder for the report and a run folder of each model."""
    steps: int = 300
    """Optimiser steps of each model, 4,096 tokens each."""
    contexts: tuple[int, ...] = (128, 1024, 8192)
    """Lengths of text after which the cost of one more token is measured."""


LEAP, SOFTMAX = "leap:windowed:none", "softmax:rotary"


@dataclass(frozen=True)
class Learner:
    """One of the two models, and what came of it."""

    row: Row
    before: float
    """Perplexity a token on held-out text, untrained."""
    milliseconds: dict[int, float]
    """Of one more token, by the length of the text before it."""
    state_bytes: dict[int, int]


def demo(
    config: DemoConfig, progress: CompareProgress | None = None
) -> tuple[list[Learner], Written]:
    """Train both models, or go on with them, and write `report.html`."""
    comparison = _comparison(config)
    rows = compare(comparison, progress)
    learners = []
    for row, run in zip(rows, run_configs(comparison).values(), strict=True):
        model, tokenizer = load_model(run.output)
        costs = {n: _cost(model, n) for n in config.contexts}
        learners.append(
            Learner(
                row=row,
                before=_untrained(run),
                milliseconds={n: cost[0] for n, cost in costs.items()},
                state_bytes={n: cost[1] for n, cost in costs.items()},
            )
        )
    model, tokenizer = load_model(run_configs(comparison)[LEAP].output)
    request = GenerateConfig(run=config.output, prompt="def ", tokens=200, temperature=0.8, seed=0)
    written = write_on(model, tokenizer, request)
    explained = explain_text(model, tokenizer, SENTENCE)
    write_whole(config.output / "report.html", _page(config, learners, written, explained))
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
    """Perplexity a token of the model before its first step, on the start of the held-out text."""
    texts = prepare(run, run_folder(run))
    set_seed(run.seed)
    model = build_model(run, texts.tokenizer, run.length)
    return score(model, texts.tokenizer, list(texts.corpus.valid)[:1], length=run.length).perplexity


@torch.no_grad()
def _cost(model: PreTrainedModel, context: int) -> tuple[float, int]:
    """Milliseconds of one more token after `context` of them, and bytes kept of the past."""
    ids = torch.randint(model.config.vocab_size, (1, context))
    cache = None
    for part in ids.split(1024, dim=1):
        cache = model(part, past_key_values=cache, use_cache=True, logits_to_keep=1).past_key_values
    times = []
    for _ in range(10):
        start = time.perf_counter()
        cache = model(ids[:, :1], past_key_values=cache, use_cache=True).past_key_values
        times.append(time.perf_counter() - start)
    assert cache is not None
    return 1e3 * min(times), cache.n_bytes


def _page(
    config: DemoConfig, learners: list[Learner], written: Written, explained: ExplainedText
) -> str:
    rows = "".join(
        f"<tr><td>{x.row.model}<td>{x.row.parameters:,}<td>{x.before:,.0f}"
        f"<td>{x.row.perplexity:.2f}<td>{x.row.bits_per_byte:.3f}"
        f"<td>{'-' if x.row.seconds_per_step is None else f'{x.row.seconds_per_step:.2f}'}"
        for x in learners
    )
    costs = "".join(
        f"<tr><td>{x.row.model}"
        + "".join(
            f"<td>{x.milliseconds[n]:.2f} ms, {x.state_bytes[n]:,} B" for n in config.contexts
        )
        for x in learners
    )
    contexts = "".join(f"<th>after {n:,} tokens" for n in config.contexts)
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
<tr><th>attention<th>parameters<th>perplexity before<th>after<th>bits a byte<th>s a step{rows}
</table>
<img alt="learning curves" src="{embedded((config.output / "curves.png").read_bytes())}">
<h2>What it writes</h2>
<p>{len(written.tokens)} tokens{"" if speed is None else f", {speed:.0f} a second"}, from "def ".
<pre>{html.escape("def " + written.text)}</pre>
<h2>What it attends to</h2>
<p>The share of each piece in what the last token takes, layer by layer, the mean of the heads.
Darker is more.
{layers}
<h2>What one more token costs</h2>
<table><tr><th>attention{contexts}{costs}</table>
<img alt="cost of a token" src="{embedded(_plot_costs(learners))}">
"""


def _plot_costs(learners: list[Learner]) -> bytes:
    figure = Figure(figsize=(7, 3.5), layout="constrained")
    axes = figure.subplots()
    for learner, colour in zip(learners, COLOURS, strict=False):
        points = learner.milliseconds.items()
        axes.plot(*zip(*points, strict=True), marker="o", color=colour, label=learner.row.model)
    axes.set_xscale("log")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("tokens read before")
    axes.set_ylabel("ms for one more token")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    return png(figure)
