"""Everything there is to do on a machine with a GPU: first whether it is right, then how fast.

    make gpu-check

Tests of the kernels, compiled and run on the GPU; then, if all of them pass, the benches of
attention, training and decoding on it. Writes a report in Markdown, and what each command printed
beside it. Without a GPU it says so, and does nothing.
"""

import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

REPORT = Path("build/gpu-report.md")
TESTS = ("tests/ops/test_triton.py", "tests/ops/test_backends.py", "tests/bench/test_measure.py")
NO_GPU = "no GPU here: torch finds no device of CUDA or ROCm, so nothing was run"


@dataclass(frozen=True)
class Step:
    """A command, and where it leaves its page, if it does."""

    title: str
    command: tuple[str, ...]
    page: Path | None = None


def steps(folder: Path) -> tuple[Step, ...]:
    """Correctness first."""
    # Warned of, and no error here: operations of torch in the references that sum in any order.
    warned = ("-W", "ignore:.*deterministic implementation:UserWarning")
    tests = ("-m", "pytest", "-q", "-p", "no:cacheprovider", *warned, *TESTS)

    def bench(name: str, *options: str) -> Step:
        output = folder / f"bench-{name}"
        command = ("-m", "leap.cli", "bench", name.partition("-")[0], "--device", "cuda")
        command += (*options, "--output", str(output))
        return Step(f"bench {name}", command, output / "results.md")

    many = ("--batch", "8", "--heads", "16")
    return (
        Step("Tests", tests),
        bench("attention-bfloat16", "--dtype", "bfloat16", *many),
        bench("attention-float32", *many),
        bench("train"),
        bench("decode"),
    )


Run = Callable[[Sequence[str], Mapping[str, str], Path], int]


def run(command: Sequence[str], environment: Mapping[str, str], log: Path) -> int:
    """The exit code of a command of this Python, whose words go to a file."""
    with log.open("w") as file:
        done = subprocess.run(
            [sys.executable, *command],
            env={**os.environ, **environment},
            stdout=file,
            stderr=subprocess.STDOUT,
            check=False,
        )
    return done.returncode


def describe() -> str:
    """What it was run on."""
    gpu = torch.cuda.get_device_properties(0)
    found = {
        "GPU": f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB",
        "CUDA": str(torch.version.cuda),
        "ROCm": str(torch.version.hip),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "flash-linear-attention": _version("fla-core"),
        "leapformer": _version("leapformer"),
        "Python": platform.python_version(),
        "commit": _commit(),
        "day": time.strftime("%Y-%m-%d"),
    }
    return "\n".join(f"- {name}: {value}" for name, value in found.items())


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def main(report: Path = REPORT, run: Run = run) -> int:
    """Run the steps, and write the report as far as they came."""
    if not torch.cuda.is_available():
        sys.stdout.write(f"{NO_GPU}\n")
        return 1
    folder = report.parent
    folder.mkdir(parents=True, exist_ok=True)
    # CUBLAS_WORKSPACE_CONFIG is what torch asks for where results are not to change between runs.
    environment = {"TRITON_INTERPRET": "0", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    parts = ["# What a GPU did", describe()]
    failed = False
    for step in steps(folder):
        sys.stdout.write(f"{step.title} ...\n")
        sys.stdout.flush()
        log = folder / f"gpu-{step.title.lower().replace(' ', '-')}.log"
        start = time.perf_counter()
        code = run(step.command, environment, log)
        took = time.perf_counter() - start
        said = f"`python {' '.join(step.command)}`, {took:.0f} s"
        lines = log.read_text().splitlines()
        if code == 0 and step.page is not None:
            parts += [f"## {step.title}", said, step.page.read_text().strip()]
        else:
            tail = "\n".join(lines[-1 if code == 0 else -30 :])
            parts += [f"## {step.title}", f"{said}: exit code {code}", f"```\n{tail}\n```"]
        failed = failed or code != 0
        if code and step.page is None:
            parts.append("Nothing was measured: what is wrong is worth no measurement.")
            break
    report.write_text("\n\n".join(parts) + "\n")
    sys.stdout.write(f"wrote {report}{'; something failed, as it says' if failed else ''}\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
