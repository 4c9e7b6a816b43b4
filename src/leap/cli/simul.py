"""`leap simul`: translation of text or speech that is still arriving."""

import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Event

from rich.console import Console
from rich.text import Text
from transformers.utils import logging

from leap.cli.progress import progress_shown, told
from leap.cli.table import show_table
from leap.tasks.simul import evaluate as evaluating
from leap.tasks.simul import live
from leap.tasks.simul import prepare as preparing
from leap.tasks.simul import report as reporting
from leap.tasks.simul import train as training
from leap.tasks.simul.evaluate import EvalConfig
from leap.tasks.simul.live import StreamConfig
from leap.tasks.simul.prepare import PrepareConfig
from leap.tasks.simul.report import ReportConfig
from leap.tasks.simul.scoring.metrics import Amount
from leap.tasks.simul.train import TrainConfig

# What goes wrong comes as a LeapError; the library's hints are for those who program with it.
logging.set_verbosity_error()


def prepare(config: PrepareConfig) -> None:
    """Prepare the corpus, and say what it holds and where it is."""
    with progress_shown() as show:
        prepared = preparing.prepare(config, lambda name, done, total: show(name, done, total))
    facts = prepared.facts
    print(
        f"{facts['corpus']}, {facts['source']} to {facts['target']}, "
        f"{facts['vocabulary']:,} pieces of words"
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
    with progress_shown() as show:
        tell = told(show)
        metrics = training.train(config, lambda status: tell("", status))
    if not metrics:
        return  # Not the first of several processes.
    best = "the mean of the last" if metrics["averaged"] else f"step {metrics['best_step']}"
    print(f"best of {metrics['steps']} steps: {best}, held-out loss {metrics['best_loss']:.3f}")
    print(f"{metrics['parameters']:,} parameters; wrote {config.output}")


def evaluate(config: EvalConfig) -> None:
    """Translate and score, print the table, and say where the files are."""
    with progress_shown() as show:
        found = evaluating.evaluate(config, lambda name, done, total: show(name, done, total))
    for table in evaluating.tables(found):
        show_table(table.columns, table.rows, table.title)
    for line in evaluating.notes(found):
        print(line)
    scores = found[0].scores
    print(*evaluating.signatures(scores), sep="\n")
    print(f"{scores.sentences} sentences; wrote {config.output}")


def report(config: ReportConfig) -> None:
    """Print the tables, and say where the files are."""
    for table in reporting.report(config):
        show_table(table.columns, table.rows, table.title)
    print(f"wrote {config.output}")


def stream(config: StreamConfig) -> None:
    """Print words as they are written, with how late each is, and at the end how late they were."""
    unit = "words" if config.sound is None and not config.microphone else "ms"
    console = Console(highlight=False)
    lags: list[Amount] = []
    laggings: list[float] = []
    is_begun = False
    with _until_interrupted(config.microphone) as stopped:
        for event in live.translate(config, stopped=stopped):
            if isinstance(event, live.Written):
                lags.append(event.lag)
                if config.lag:
                    _show(console, event, unit)
                else:
                    print(f" {event.word}" if is_begun else event.word, end="", flush=True)
                is_begun = True
            else:
                print(flush=True)
                is_begun = False
                laggings += [] if event.lagging is None else [event.lagging]
    if lags:
        words = "1 word" if len(lags) == 1 else f"{len(lags)} words"
        print(
            f"{words}, on average {_mean(lags):.1f} {unit} behind; "
            f"LAAL {_mean(laggings):.1f} {unit}",
            file=sys.stderr,
        )


def _show(console: Console, written: live.Written, unit: str) -> None:
    """A word and its lag, as suits a terminal, or a file, where each word has a line."""
    if console.is_terminal:
        lag = f" {written.lag:+.0f}{'ms' * (unit == 'ms')}"
        console.print(Text.assemble(written.word, (lag, "dim")), end=" ", soft_wrap=True)
    else:
        print(f"{written.word}\t{written.lag:.0f} {unit}", flush=True)


@contextmanager
def _until_interrupted(is_wanted: bool) -> Iterator[Callable[[], bool]]:
    """Let the first Ctrl-C end the source rather than the program; a second one ends both."""
    interrupted = Event()
    if not is_wanted:
        yield interrupted.is_set
        return
    usual = signal.getsignal(signal.SIGINT)

    def interrupt(*_: object) -> None:
        interrupted.set()
        signal.signal(signal.SIGINT, usual)

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield interrupted.is_set
    finally:
        signal.signal(signal.SIGINT, usual)


def _mean(values: Sequence[Amount]) -> float:
    return sum(values) / len(values)
