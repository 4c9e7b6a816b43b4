"""How far a batch travels: files, functions and frames of ours from a call to the kernel.

    python tests/journeys.py            all of them, as a Markdown table
    python tests/journeys.py --show     and each file on the way to the kernel, with its function

A journey is one call on a very small model: a forward pass in training, `generate()`, and three
commands. Counted are the files and the functions of `leap` that ran, and the frames of `leap` that
were on the stack when a kernel began, itself among them. Frames of torch and transformers between
them (`nn.Module.__call__`, decorators of Hugging Face, autograd) are not ours and not counted, nor
are comprehensions and lambdas. Of calls that reach several kernels the deepest is told.
"""

import argparse
import contextlib
import io
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SOURCE = str(ROOT / "src" / "leap") + os.sep

KERNELS = ("attend", "_attend", "advance")
"""What functions are called that compute attention, in the files of `leap.ops`."""


@dataclass
class Journey:
    """What ran of `leap` between two moments."""

    functions: set[CodeType] = field(default_factory=set)
    stack: list[tuple[str, str]] = field(default_factory=list)
    """File and function of each frame, from the call to the deepest kernel."""

    @property
    def files(self) -> set[str]:
        """Files of the functions that ran."""
        return {code.co_filename for code in self.functions}

    @property
    def files_to_kernel(self) -> list[str]:
        """Files of the stack, each once, in its order."""
        return list(dict.fromkeys(file for file, _ in self.stack))


def is_ours(code: CodeType) -> bool:
    """Whether it is a named function of `leap`."""
    return code.co_filename.startswith(SOURCE) and not code.co_name.startswith("<")


def is_kernel(code: CodeType) -> bool:
    """Whether it computes attention, rather than choosing who does."""
    path = Path(code.co_filename.removeprefix(SOURCE))
    return path.parts[0] == "ops" and path.stem != "__init__" and code.co_qualname in KERNELS


@contextlib.contextmanager
def followed() -> Iterator[Journey]:
    """Note what runs of `leap` within a `with`, on any thread."""
    journey = Journey()

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or not is_ours(code):
            return
        journey.functions.add(code)
        if is_kernel(code):
            stack = []
            at: FrameType | None = frame
            while at is not None:
                if is_ours(at.f_code):
                    stack.append((at.f_code.co_filename.removeprefix(SOURCE), at.f_code.co_name))
                at = at.f_back
            if len(stack) > len(journey.stack):
                journey.stack = stack[::-1]

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield journey
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]


def small_model() -> Any:
    """A language model of the default attention."""
    import torch

    from leap import LeapformerConfig, LeapformerForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "n_layer": 2, "n_head": 2, "vocab_size": 64}
    return LeapformerForCausalLM(LeapformerConfig(**sizes))


def forward(_: Path, backend: str | None = None) -> Journey:
    """One training batch through the model: `model(ids, labels=ids)`."""
    import torch

    from leap.ops import backends

    model, ids = small_model().train(), torch.randint(64, (2, 300))
    with backends.using(backend), followed() as journey:
        model(input_ids=ids, labels=ids)
    return journey


def generate(_: Path) -> Journey:
    """`model.generate()` after a short prompt."""
    import torch

    model, ids = small_model().eval(), torch.randint(64, (1, 8))
    with followed() as journey:
        model.generate(ids, max_new_tokens=4, do_sample=False)
    return journey


def lm_train(folder: Path) -> Journey:
    """`leap lm train`."""
    play = folder / "play.txt"
    play.write_text("".join(f"Enter the king, number {i}.\n" for i in range(200)))
    sizes = "--hidden-size 16 --n-layer 2 --n-head 2 --length 32 --batch 4 --steps 2"
    return command(f"lm train --data {play} --output {folder}/run {sizes}")


def lra_train(folder: Path) -> Journey:
    """`leap lra train`."""
    few = "--train 8 --valid 4 --test 4 --workers 1"
    command(f"lra prepare --task listops --output {folder}/data {few}")
    sizes = "--task listops --attention leapformer --steps 1 --batch 4"
    return command(f"lra train {sizes} --data {folder}/data --output {folder}/run")


def simul_stream(folder: Path) -> Journey:
    """`leap simul stream` with a run of torch; what is shipped runs without kernels of ours."""
    command(f"simul prepare --limit 30 --vocabulary 80 --output {folder}/data")
    sizes = "--hidden-size 16 --feed-forward-size 16 --n-layer 1 --encoder-layers 1 --n-head 2"
    command(f"simul train --data {folder}/data --output {folder}/run --steps 1 {sizes}")
    return command(f"simul stream --run {folder}/run", given="twenty-one\n")


def command(line: str, given: str = "") -> Journey:
    """A command, run here on what its input is given, with its output thrown away."""
    from leap.cli import main

    nowhere, before = io.StringIO(), sys.stdin
    sys.stdin = io.TextIOWrapper(io.BytesIO(given.encode()))
    try:
        with contextlib.redirect_stdout(nowhere), followed() as journey:
            main(line.split())
    finally:
        sys.stdin = before
    return journey


JOURNEYS: dict[str, Callable[[Path], Journey]] = {
    "a model's forward, native": lambda folder: forward(folder, "native"),
    "a model's forward, torch": lambda folder: forward(folder, "torch"),
    "`leap lm train`": lm_train,
    "`generate()`": generate,
    "`leap simul stream`": simul_stream,
    "`leap lra train`": lra_train,
}


def main() -> None:
    """Write the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--show", action="store_true", help="list the way to the kernel too")
    options = parser.parse_args()
    say = sys.stdout.write
    say("| journey | files | functions | frames to the kernel | files of those |\n")
    say("| --- | --- | --- | --- | --- |\n")
    for name, journey in JOURNEYS.items():
        with tempfile.TemporaryDirectory() as folder:
            found = journey(Path(folder))
        counts = len(found.files), len(found.functions), len(found.stack)
        say(f"| {name} | {' | '.join(map(str, counts))} | {len(found.files_to_kernel)} |\n")
        for file, function in found.stack if options.show else ():
            say(f"    {file} {function}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
