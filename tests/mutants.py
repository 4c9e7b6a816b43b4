"""Mutation testing: break one thing in a module, run its own tests, and see whether they notice.

    python tests/mutants.py --number 8 --seed 0 src/leap/ops src/leap/runtime/streaming

From each module a sample of mutants is drawn: an operator swapped, a comparison off by one, a
number changed, a condition turned round, a statement left out. A mutant is killed if its tests fail
or take far longer than they should; one that survives is either no change to any caller, or a
promise that nothing checks.

No ready-made tool is used: mutmut and cosmic-ray write mutants to disk and start Python anew for
each, which takes longer to import torch than most tests here run, and mutmut's wrappers around
functions hide the signatures that shape checks and torch's operators are made from. Here torch is
imported once, each mutant is a fork, and what changes is the text that the import system reads: no
file is touched. Tests that start Python themselves see the code as it is.
"""

import argparse
import ast
import contextlib
import importlib.machinery
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE, TESTS = ROOT / "src" / "leap", ROOT / "tests"

SWAPS: dict[type, type] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Add,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.And: ast.Or,
    ast.Or: ast.And,
}
"""What stands in for an operator."""

LEFT_OUT = "not triton and not compil"
"""Kernels in Triton's interpreter, and compilers: most of the time, and hardly a mutant more."""

ELSEWHERE = {
    "ops/additive/state.py": ["ops/test_additive_state.py"],
    "ops/linear/at_once.py": ["models/test_graph.py"],
    "ops/linear/state.py": ["ops/test_state.py"],
    "ops/linear/two_way.py": ["ops/test_two_way.py"],
    "runtime/streaming/sources.py": ["tasks/simul/streaming/test_stream.py"],
    "runtime/streaming/stream.py": ["tasks/simul/streaming/test_stream.py"],
    "runtime/streaming/vocabulary.py": ["tasks/simul/test_vocabulary.py"],
}
"""Tests of the modules whose promises other files check."""


@dataclass(frozen=True)
class Mutant:
    """A change to a module: the text between two of its characters becomes another."""

    module: Path
    start: int
    end: int
    text: str

    def apply(self) -> str:
        """Returns the module's text with the change."""
        source = self.module.read_text()
        return source[: self.start] + self.text + source[self.end :]

    def __str__(self) -> str:
        source = self.module.read_text()
        line = source.count("\n", 0, self.start)
        before, after = source.splitlines()[line].strip(), self.apply().splitlines()[line].strip()
        return f"{self.module.relative_to(ROOT)}:{line + 1}\n    - {before}\n    + {after}"


def mutants_of(module: Path) -> list[Mutant]:
    """Returns every mutant of a module, in the order of its text."""
    source = module.read_text()
    # ast counts columns in bytes; characters are the same thing as long as all of them are ASCII.
    begins = [0]
    for line in source.encode().splitlines(keepends=True):
        begins.append(begins[-1] + len(line))

    def place(line: int, column: int) -> int:
        return len(source.encode()[: begins[line - 1] + column].decode())

    found = []
    for node, new in _changes(ast.parse(source)):
        start = place(node.lineno, node.col_offset)
        end = place(node.end_lineno, node.end_col_offset)
        text = ast.unparse(new)
        found.append(Mutant(module, start, end, f"({text})" if isinstance(new, ast.expr) else text))
    return found


def _changes(tree: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
    """Yields each node worth changing with what stands in for it."""
    for field, value in ast.iter_fields(tree):
        # Types are not behaviour; assertions, `strict` too, only say what cannot happen anyway.
        if field in ("annotation", "returns", "decorator_list", "type_params", "bases"):
            continue
        for node in value if isinstance(value, list) else [value]:
            if isinstance(node, ast.Assert | ast.JoinedStr) or getattr(node, "arg", "") == "strict":
                continue
            if isinstance(node, ast.AST):
                yield from _stand_ins(node)
                yield from _changes(node)


def _stand_ins(node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
    match node:
        case ast.BinOp(left, op, right) if type(op) in SWAPS and not _is_type(node):
            yield node, ast.BinOp(left, SWAPS[type(op)](), right)
        case ast.Compare(left, [op], right) if type(op) in SWAPS:
            yield node, ast.Compare(left, [SWAPS[type(op)]()], right)
        case ast.BoolOp(op, values):
            yield node, ast.BoolOp(SWAPS[type(op)](), values)
        case ast.UnaryOp(ast.Not() | ast.USub(), operand):
            yield node, operand
        case ast.Constant(bool(value)):
            yield node, ast.Constant(not value)
        case ast.Constant(int(value) | float(value)):
            yield node, ast.Constant(value + 1)
        case ast.IfExp(test, body, orelse):
            yield node, ast.IfExp(test, orelse, body)
        case ast.AugAssign(target, op, value) if type(op) in SWAPS:
            yield node, ast.AugAssign(target, SWAPS[type(op)](), value)
        case ast.Expr(ast.Call()) | ast.Raise():
            yield node, ast.Pass()
        case ast.If(ast.Name() | ast.Attribute() | ast.Call() as test):
            yield test, ast.UnaryOp(ast.Not(), test)


def _is_type(node: ast.BinOp) -> bool:
    """Whether it is a union of types, such as `Tensor | None`."""
    sides = (node.left, node.right)
    return isinstance(node.op, ast.BitOr) and any(
        isinstance(each, ast.Constant) and each.value is None for each in sides
    )


def tests_of(module: Path) -> tuple[Path, ...]:
    """Returns a module's own tests: those of its name, of its folder's, or those named above."""
    inside = module.relative_to(SOURCE)
    if "triton" in inside.parts:  # Which reads the text of kernels from their files.
        return ()
    if named := ELSEWHERE.get(str(inside)):
        return tuple(TESTS / name for name in named)
    for place in (inside, *inside.parents):
        test = TESTS / place.parent / f"test_{place.stem}.py"
        if place.name and test.exists():
            return (test,)
    return ()


def run(tests: tuple[Path, ...], mutant: Mutant | None, limit: float | None) -> str:
    """Run tests in a fork, with a mutant in place of its module: "passed", "failed" or "slow"."""
    child = os.fork()
    if child == 0:
        os.setsid()
        _run_here(tests, mutant)
    started = time.monotonic()
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return "passed" if os.waitstatus_to_exitcode(status) == 0 else "failed"
        if limit is not None and time.monotonic() - started > limit:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return "slow"
        time.sleep(0.05)


def _run_here(tests: tuple[Path, ...], mutant: Mutant | None) -> None:
    """Run the tests in this process and end it."""
    import pytest

    nowhere = os.open(os.devnull, os.O_WRONLY)
    if mutant is not None:
        _replace(mutant)
        for stream in (1, 2):
            os.dup2(nowhere, stream)
    with tempfile.TemporaryDirectory() as folder:
        options = ["-x", "-q", "-k", LEFT_OUT, "-p", "no:cacheprovider", f"--basetemp={folder}/t"]
        # Plugins of pytest that transformers has imported already have nothing of ours to assert.
        options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
        code = 1
        with contextlib.suppress(BaseException):
            code = pytest.main([*options, *map(str, tests)])
    sys.stdout.flush()
    os._exit(int(code))


def _replace(mutant: Mutant) -> None:
    """Let the import system read the mutant where the module's text is, and nothing compiled."""
    text, read = mutant.apply().encode(), importlib.machinery.SourceFileLoader.get_data

    def get_data(self, path):
        if Path(path) == mutant.module:
            return text
        if path.endswith(".pyc") and Path(path).name.startswith(mutant.module.stem + "."):
            raise OSError(path)
        return read(self, path)

    sys.dont_write_bytecode = True
    importlib.machinery.SourceFileLoader.get_data = get_data


def main() -> None:
    """Draw mutants, run their tests, and say which survived."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("paths", nargs="+", type=Path, help="modules, or folders of them")
    parser.add_argument("--number", type=int, default=8, help="mutants per module")
    parser.add_argument("--seed", type=int, default=0, help="random seed of the sample")
    parser.add_argument("--limit", type=float, help="seconds; by default 4 times what tests take")
    options = parser.parse_args()
    modules = [
        module.resolve()
        for path in options.paths
        for module in (sorted(path.rglob("*.py")) if path.is_dir() else [path])
    ]

    # What every fork would import again. Nothing of `leap`, which may be what is changed.
    import beartype  # noqa: F401
    import hypothesis  # noqa: F401
    import torch
    from transformers import GenerationMixin, PreTrainedModel, Trainer  # noqa: F401

    torch.set_num_threads(1)
    limits: dict[tuple[Path, ...], float] = {}
    counts = []
    for module in modules:
        tests, every = tests_of(module), mutants_of(module)
        if not tests or not every:
            continue
        if tests not in limits and options.limit is None:
            started = time.monotonic()
            if run(tests, None, None) != "passed":
                sys.exit(f"{' '.join(map(str, tests))}: fails before anything is changed")
            limits[tests] = 10 + 4 * (time.monotonic() - started)
        chance = random.Random(f"{options.seed} {module.name}")
        sample = sorted(
            chance.sample(every, min(options.number, len(every))), key=lambda mutant: mutant.start
        )
        killed = 0
        for mutant in sample:
            if run(tests, mutant, options.limit or limits[tests]) == "passed":
                say(f"survived: {mutant}")
            else:
                killed += 1
        counts.append((killed, len(sample)))
        name = module.relative_to(ROOT)
        say(f"{name}: {killed} of {len(sample)} killed, of {len(every)} there are")
    killed, drawn = map(sum, zip(*counts, strict=True))
    say(f"{len(counts)} modules: {killed} of {drawn} killed, {drawn - killed} survived")


def say(text: str) -> None:
    """Write a line at once, as runs take long."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
