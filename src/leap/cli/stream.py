"""`leap simul stream`: words on the screen as they are written.

Apart from `leap.cli.simul`, so that a stream does not import the commands beside it.
"""

import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Event

from rich.console import Console
from rich.text import Text

from leap.runtime.manifest import is_export
from leap.tasks.simul import live
from leap.tasks.simul.live import StreamConfig
from leap.tasks.simul.scoring.metrics import Amount


def stream(config: StreamConfig) -> None:
    """Print words as they are written, with how late each is, and at the end how late they were."""
    if config.is_shipped:
        who = f"{live.SHIPPED}, which comes with the package"
        print(f"translating by {who}; --run names another", file=sys.stderr)
    if not is_export(config.model):
        from transformers.utils import logging

        logging.set_verbosity_error()  # As in `leap.cli.simul`.
    unit = "ms" if config.is_sound else "words"
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
