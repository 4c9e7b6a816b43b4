"""`leap simul`: data, training and scores of simultaneous translation."""

from transformers.utils import logging

from leap.cli.progress import progress_shown
from leap.cli.table import show_table
from leap.tasks.simul import evaluate as evaluating
from leap.tasks.simul import prepare as preparing
from leap.tasks.simul import report as reporting
from leap.tasks.simul import train as training
from leap.tasks.simul.evaluate import EvalConfig
from leap.tasks.simul.prepare import PrepareConfig
from leap.tasks.simul.report import ReportConfig
from leap.tasks.simul.train import TrainConfig

# What goes wrong comes as a LeapError; the library's hints are for those who program with it.
logging.set_verbosity_error()


def prepare(config: PrepareConfig) -> None:
    """Prepare the corpus, and say what it holds and where it is."""
    with progress_shown() as progress:
        prepared = preparing.prepare(config, progress)
    facts = prepared.facts
    print(
        f"{facts['corpus']}, {facts['source']} to {facts['target']}, "
        f"{facts['vocabulary']:,} subwords"
    )
    for part, count in facts["sentences"].items():
        hours = facts["seconds"].get(part, 0) / 3600
        print(f"  {part:<18} {count:>8,} sentences" + (f" {hours:8.2f} h" if hours else ""))
    if facts["left_out"]:
        print(f"{facts['left_out']:,} sentences left out; see {config.output / 'left_out.txt'}")
    for note in facts.get("notes", ()):
        print(note)
    print(f"wrote {config.output}")


def train(config: TrainConfig) -> None:
    """Train, and say what came out and where it is."""
    with progress_shown() as progress:
        metrics = training.train(config, progress)
    if not metrics:
        return  # Not the first of several processes.
    best = "the mean of the last" if metrics["averaged"] else f"step {metrics['best_step']}"
    print(f"best of {metrics['steps']} steps: {best}, held-out loss {metrics['best_loss']:.3f}")
    print(f"{metrics['parameters']:,} parameters; wrote {config.output}")


def evaluate(config: EvalConfig) -> None:
    """Translate and score, print the table, and say where the files are."""
    with progress_shown() as progress:
        found = evaluating.evaluate(config, progress)
    for table in evaluating.tables(found):
        show_table(table)
    for line in evaluating.notes(found):
        print(line)
    scores = found[0].scores
    print(*evaluating.signatures(scores), sep="\n")
    print(f"{scores.sentences} sentences; wrote {config.output}")


def report(config: ReportConfig) -> None:
    """Print the tables, and say where the files are."""
    for table in reporting.report(config):
        show_table(table)
    print(f"wrote {config.output}")
