"""The command `leap`: flags in, text out. The work is done elsewhere, and prints nothing.

What there is to run is in `leap.cli.verbs`; until it is asked for, nothing heavy is imported.
"""

import argparse
import ast
import inspect
import os
import re
import shutil
import sys
import textwrap
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from importlib import import_module
from itertools import pairwise
from typing import Annotated, Any, NoReturn, get_type_hints

import leap
from leap.cli.verbs import COMMANDS, TASKS, VERBS, Verb
from leap.errors import LeapError, lacking
from leap.extras import extras_with, install_command

ABOUT = "Transformers with attention in linear time."
MODEL_NAMES = {
    "dropout": "hidden_dropout_prob",
    "feed_forward_size": "intermediate_size",
    "subsampling": "n_subsampling",
}
"""What the config of a model calls the setting of a flag."""
LEARNING = ("explain", "lm", "lra", "simul")
"""Tasks with an extra of the same name, for what they need besides the core."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command, as given on the command line, and exit with 1 if it cannot be done."""
    try:
        try:
            with _threads_watched():
                _run(sys.argv[1:] if arguments is None else arguments)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # Whoever was reading has seen enough, as head does.
        _drop_output()
        raise SystemExit(1) from None
    except LeapError as error:
        _fail(str(error), code=1)
    except KeyboardInterrupt:
        _fail("stopped", code=130)
    except Exception as error:
        line = lacking(error)
        if line is None:
            raise
        _fail(line, code=1)


@contextmanager
def _threads_watched() -> Iterator[None]:
    """Tell what threads of other libraries lacked once the work is done, unless it ends by it.

    TensorBoard's writes the log, and would show a traceback where the disk is full.
    """
    missed: list[BaseException] = []

    def end(arguments: threading.ExceptHookArgs) -> None:
        error = arguments.exc_value
        if isinstance(error, Exception) and lacking(error) is not None:
            missed.append(error)
        else:
            before(arguments)

    before, threading.excepthook = threading.excepthook, end
    try:
        yield
    finally:
        threading.excepthook = before
    if missed:
        raise missed[0]


def _run(arguments: Sequence[str]) -> None:
    start = "To begin, leap lm demo trains a small language model and reports on it."
    task, rest = _choose("leap", ABOUT, TASKS, arguments, closing=start, version=True)
    if task == "backends":
        parser = argparse.ArgumentParser(prog="leap backends", description=TASKS[task])
        parser.add_argument(
            "--compile",
            nargs="*",
            metavar="GPU",
            help="compile Triton's kernels for these GPUs, sm_90 say, or for all that are known, "
            "and show what each takes; no GPU is needed",
        )
        parser.add_argument(
            "--output",
            metavar="FILE",
            help="with --compile, a file to write the table to as well, in Markdown",
        )
        given = parser.parse_args(rest)  # First: its help needs no torch.
        if given.output and given.compile is None:
            parser.error("--output is of --compile, which was not given")
        return import_module("leap.cli.backends").show(given.compile, given.output)
    if task in COMMANDS:
        return _do(task, COMMANDS[task], rest)
    summaries = {name: verb.summary for name, verb in VERBS[task].items()}
    closing = f"Packages for this come with the extra {task}." if task in LEARNING else ""
    name, rest = _choose(f"leap {task}", TASKS[task], summaries, rest, closing=closing)
    return _do(f"{task} {name}", VERBS[task][name], rest)


def _do(name: str, verb: Verb, arguments: Sequence[str]) -> None:
    """Run one command."""
    flags: Collection[str] = ()
    try:
        config = verb.load_config()
        flags = [field.name for field in fields(config)]
        verb.load_run()(_parse(f"leap {name}", config, verb, arguments))
    except LeapError as error:
        _fail(as_typed(str(error), flags), code=1)
    except ModuleNotFoundError as error:
        extras = extras_with(error.name or "")
        if not extras:
            raise
        task = name.partition(" ")[0]
        extra = task if task in extras else extras[0]
        _fail(f"leap {name} needs {error.name}: {install_command(extra)}", code=1)


def _choose(
    prog: str,
    about: str,
    choices: Mapping[str, str],
    arguments: Sequence[str],
    *,
    closing: str = "",
    version: bool = False,
) -> tuple[str, list[str]]:
    """The first argument, which must be one of `choices`, and the arguments after it.

    tyro's own subcommands need the settings of all commands, and so torch, to tell what there is.
    """
    width = shutil.get_terminal_size().columns
    listing = "\n".join(
        textwrap.fill(summary, width, initial_indent=f"  {name:<12}", subsequent_indent=" " * 14)
        for name, summary in choices.items()
    )
    parser = argparse.ArgumentParser(
        prog=prog,
        usage=f"{prog} COMMAND ...",
        description=about,
        epilog=f"commands:\n{listing}\n\n{prog} COMMAND --help tells more of each.\n{closing}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    if version:
        parser.add_argument("--version", action="version", version=f"leapformer {leap.__version__}")
    parser.add_argument(
        "command",
        nargs="?",
        choices=list(choices),
        metavar="COMMAND",
        help=argparse.SUPPRESS,
    )
    if not arguments:
        parser.print_help()
        raise SystemExit(2)
    first, *rest = arguments
    return parser.parse_args([first]).command, rest


def _parse(prog: str, config: type[Any], verb: Verb, arguments: Sequence[str]) -> Any:
    import tyro

    hints, texts = get_type_hints(config, include_extras=True), help_texts(config)
    described = {
        field.name: Annotated[
            hints[field.name],
            tyro.conf.arg(
                help=texts.get(field.name),
                # Where the default is None, the help says what that means.
                help_behavior_hint="" if field.default is None else None,
            ),
        ]
        for field in fields(config)
    }
    # tyro would frame the error of a config that checks itself, so it gets one that does not.
    unchecked = type(
        config.__name__,
        (config,),
        {
            "__doc__": config.__doc__,
            "__annotations__": described,
            "__post_init__": lambda self: None,
        },
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
    return config(**{field.name: getattr(given, field.name) for field in fields(given)})


def help_texts(config: type[Any]) -> dict[str, str]:
    """What the docstrings below a dataclass's fields say, each in one line."""
    found = {}
    for base in reversed([base for base in config.__mro__ if is_dataclass(base)]):
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0].body  # type: ignore[attr-defined]
        for field, text in pairwise(body):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                found[ast.unparse(field.target)] = " ".join(ast.literal_eval(text.value).split())
    return found


def as_typed(message: str, flags: Collection[str]) -> str:
    """A message about settings, these named as on the command line: `--learning-rate`.

    A name that is a plain word as well is one in `steps=3`, and as the subject of the sentence.
    """
    for name in flags:
        follows = r"(?![\w/.-])" if "_" in name else r"(?==)"
        flag = "--" + name.replace("_", "-")
        message = re.sub(rf"(?<![\w/.-]){name}{follows}|^{name}(?=:| is | or )", flag, message)
        if name in MODEL_NAMES:
            message = re.sub(rf"(?<![\w/.-]){MODEL_NAMES[name]}(?![\w/.-])", flag, message)
    return message


def _drop_output() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(message: str, *, code: int) -> NoReturn:
    try:
        sys.stdout.flush()
    except OSError:  # Else it would be tried again on leaving.
        _drop_output()
    print(f"leap: {message}", file=sys.stderr)
    raise SystemExit(code)
