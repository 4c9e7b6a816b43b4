"""`leap lm`: language models, trained, measured and writing."""

from dataclasses import dataclass

from transformers.utils import logging

from leap.bench.decode import measure_models
from leap.bench.measure import peak_bytes
from leap.cli.progress import progress_shown
from leap.cli.table import show_table, show_written
from leap.reports.progress import named
from leap.reports.table import Table, perplexity
from leap.tasks.lm import compare as comparing
from leap.tasks.lm import demo as demonstrating
from leap.tasks.lm import evaluate as evaluating
from leap.tasks.lm import mqar as pairing
from leap.tasks.lm import recall as recalling
from leap.tasks.lm import train as training
from leap.tasks.lm.compare import CompareConfig
from leap.tasks.lm.data import Corpus
from leap.tasks.lm.demo import DemoConfig
from leap.tasks.lm.evaluate import EvalConfig
from leap.tasks.lm.model import preset_sizes
from leap.tasks.lm.mqar import MqarConfig
from leap.tasks.lm.recall import RecallConfig
from leap.tasks.lm.train import TrainConfig

# What goes wrong comes as a LeapError; the library's hints are for those who program with it.
logging.set_verbosity_error()


@dataclass(frozen=True)
class PresetsConfig:
    """List the presets: their parameters, and what they keep of a text of any length."""


def train(config: TrainConfig) -> None:
    """Train, and say what came out and where it is."""
    finished = training.run_folder(config).metrics() is not None
    with progress_shown() as progress:
        metrics = training.train(config, progress, _tell_text)
    if not metrics:
        return  # Not the first of several processes.
    print(
        f"best at step {metrics['best_step']} of {metrics['steps']}, "
        f"held-out loss {metrics['best_loss']:.3f}"
    )
    score = metrics["test"]
    print(
        f"test perplexity {perplexity(score['perplexity'], 2)} per token, "
        f"{perplexity(score['word_perplexity'], 1)} per word; "
        f"{score['bits_per_byte']:.3f} bits per byte"
    )
    if finished:
        print(f"{config.output} was finished before; nothing was trained")
    else:
        print(f"wrote {config.output}")


def _tell_text(corpus: Corpus) -> None:
    """Say what was read, and how it is divided."""
    train, valid, test = (sum(map(len, part)) for part in (corpus.train, corpus.valid, corpus.test))
    print(
        f"read {corpus.name}: {train:,} characters to learn from, {valid:,} to choose by, "
        f"{test:,} to test",
        flush=True,
    )


def evaluate(config: EvalConfig) -> None:
    """Measure, and print the numbers."""
    with progress_shown() as progress:
        score = evaluating.evaluate(config, progress, _tell_text)
    print(f"{score.tokens:,} tokens, {score.words:,} words, {score.bytes:,} bytes")
    print(f"perplexity per token  {perplexity(score.perplexity, 3)}  (loss {score.loss:.4f})")
    print(f"perplexity per word   {perplexity(score.word_perplexity, 2)}")
    print(f"bits per byte         {score.bits_per_byte:.4f}")
    if score.stretches:
        rows = [[f"{x.start:,} to {x.end:,}", perplexity(x.perplexity, 2)] for x in score.stretches]
        show_table(Table("", ("tokens of the text", "perplexity"), rows))
    if config.output is not None:
        print(f"wrote {config.output}")


def presets(_config: PresetsConfig) -> None:
    """Print a row for each preset."""
    rows = [
        [
            size.name,
            f"{size.parameters:,}",
            f"{size.config.hidden_size} x {size.config.n_layer}",
            f"{size.config.vocab_size:,}",
            f"{size.state_bytes:,}",
        ]
        for size in preset_sizes()
    ]
    columns = ("preset", "parameters", "width x layers", "vocabulary", "state bytes")
    show_table(Table("", columns, rows))


def compare(config: CompareConfig) -> None:
    """Train the models, print the table, and say where the files are."""
    with progress_shown() as progress:
        rows = comparing.compare(config, progress, peak_bytes, _tell_text)
    show_table(comparing.table(rows))
    show_written(config.output, ("results.json", "results.md", "curves.png"))


def recall(config: RecallConfig) -> None:
    """Train and ask the models, print the table, and say where the files are."""
    with progress_shown() as progress:
        rows = recalling.recall(config, progress)
    show_table(recalling.table(config, rows))
    show_written(config.output, ("results.json", "results.md", "recall.png"))


def mqar(config: MqarConfig) -> None:
    """Train and ask the models, print the table, and say where the files are."""
    with progress_shown() as progress:
        rows = pairing.mqar(config, progress)
    show_table(pairing.table(config, rows))
    show_written(config.output, ("results.json", "results.md", "mqar.png"))


def demo(config: DemoConfig) -> None:
    """Train, print the table and what was written, and say where the report is."""
    with progress_shown() as progress:
        learners, written = demonstrating.demo(
            config,
            lambda models, contexts: measure_models(models, contexts, named(progress, "cost")),
            progress,
        )
    rows = [
        [
            learner.row.model,
            f"{learner.before:,.0f}",
            perplexity(learner.outcome.perplexity, 2),
            f"{learner.outcome.bits_per_byte:.3f}",
        ]
        for learner in learners
    ]
    show_table(Table("", ("model", "perplexity before", "after", "bits per byte"), rows))
    show_table(demonstrating.cost_table(learners))
    print(f"def {written.text}\n")
    print(f"wrote {config.output / 'report.html'}")
