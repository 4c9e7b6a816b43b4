"""The command `leap`: flags in, text out. The work is done elsewhere, and prints nothing.

A task is a module of this package, named in `TASKS` and imported only when it is asked for, so
that no task waits for what another needs. A verb of a task is an entry of the module's `VERBS`.
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from importlib import import_module
from typing import Any, NoReturn

import tyro

from leap import __version__
from leap.errors import LeapError

TASKS = {
    "bench": "speed and memory of attentions and of decoding",
    "lm": "language models: train, measure, write",
    "lra": "Long Range Arena: data, training, tables, speed",
    "simul": "simultaneous translation: data, training, scores, streams",
}


@dataclass(frozen=True)
class Verb:
    """One command: its settings, what runs it, and examples to end its help with."""

    config: type[Any]
    """A dataclass: its fields are the flags, its docstrings the help."""
    run: Callable[[Any], None]
    examples: Sequence[tuple[str, str]]
    """Command lines, without the leading `leap`, and what they do."""

    @property
    def summary(self) -> str:
        """The first line of the help."""
        return (self.config.__doc__ or "").partition("\n")[0]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command, as given on the command line, and exit with 1 if it cannot be done."""
    try:
        try:
            _run(sys.argv[1:] if arguments is None else arguments)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # Whoever was reading has seen enough, as head does.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None
    except LeapError as error:
        _fail(str(error), code=1)
    except KeyboardInterrupt:
        _fail("stopped", code=130)


def _run(arguments: Sequence[str]) -> None:
    task, rest = _choose("leap", "Linear-time attention.", TASKS, arguments, version=True)
    verbs: dict[str, Verb] = import_module(f"leap.cli.{task}").VERBS
    summaries = {name: verb.summary for name, verb in verbs.items()}
    verb, rest = _choose(f"leap {task}", TASKS[task], summaries, rest)
    command = verbs[verb]
    command.run(_parse(f"leap {task} {verb}", command, rest))


def _choose(
    prog: str, about: str, choices: dict[str, str], arguments: Sequence[str], version: bool = False
) -> tuple[str, list[str]]:
    """The first argument, which must be one of `choices`, and the arguments after it."""
    listing = "\n".join(f"  {name:<12}{summary}" for name, summary in choices.items())
    parser = argparse.ArgumentParser(
        prog=prog,
        description=about,
        epilog=f"commands:\n{listing}\n\n{prog} COMMAND --help tells more of each.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    if version:
        parser.add_argument("--version", action="version", version=f"leapformer {__version__}")
    parser.add_argument(
        "command", nargs="?", choices=list(choices), metavar="COMMAND", help="see below"
    )
    if not arguments:
        parser.print_help()
        raise SystemExit(2)
    first, *rest = arguments
    return parser.parse_args([first]).command, rest


def _parse(prog: str, verb: Verb, arguments: Sequence[str]) -> Any:
    # tyro would frame the error of a config that checks itself, so it gets one that does not.
    unchecked = type(
        verb.config.__name__,
        (verb.config,),
        {"__doc__": verb.config.__doc__, "__post_init__": lambda self: None},
    )
    try:
        given: Any = tyro.cli(unchecked, prog=prog, args=arguments)
    except SystemExit as leaving:
        if leaving.code == 0:
            width = max(len(line) for line, _ in verb.examples)
            print("\nexamples:")
            for line, meaning in verb.examples:
                print(f"  leap {line:<{width}}   {meaning}")
        raise
    return verb.config(**{field.name: getattr(given, field.name) for field in fields(given)})


def _fail(message: str, *, code: int) -> NoReturn:
    print(f"leap: {message}", file=sys.stderr)
    raise SystemExit(code)
