"""What an export leaves in its folder, and when it is refused."""

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, Literal

from leap.errors import ConfigError, FileError, LeapError
from leap.reports.files import writing_to
from leap.runtime.manifest import is_export

TOLERANCE = 1e-3
"""The largest difference of logits, as a share of the largest, at which an export is let pass."""


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """Write a trained model as ONNX graphs with a manifest, to run without torch.

    The graph is compared with the model on real text, and refused if they disagree.
    """

    run: Path
    """Run folder of leap lm train or leap simul train, or the folder of its model."""
    output: Path
    """Folder to write; one of an earlier export is replaced."""
    to: Literal["onnx", "executorch"] = "onnx"
    """onnx, which leap.runtime, servers and browsers take; or a step of one token for
    ExecuTorch, which runs language models on phones."""
    int8: bool = False
    """Store weights in 8 bits: a quarter of the size, faster, and a little less exact."""
    data: str | None = None
    """Text to check on, as leap lm train takes it, or for translation a folder of leap simul
    prepare; by default the run's own held-out part, or, if that is gone, the Python library's."""
    tokens: int = 4096
    """Tokens of it to measure perplexity on; of translations, 100 sentences are scored by BLEU."""

    def __post_init__(self) -> None:
        if self.tokens < 8:
            raise ConfigError(f"tokens={self.tokens} must be 8 or more")
        if self.int8 and self.to != "onnx":
            raise ConfigError(f"int8 is for onnx; leave it out to export to {self.to}")
        if self.output.exists() and not is_export(self.output):
            if not self.output.is_dir():
                raise ConfigError(f"output={self.output} is a file; give a folder")
            if any(self.output.iterdir()):
                raise ConfigError(
                    f"output={self.output} holds something else; give a folder that is new, empty "
                    "or of an earlier export"
                )


@dataclass(frozen=True)
class Exported:
    """What was written, and how close it is."""

    folder: Path
    difference: float
    """The largest difference between torch and the graph, as `TOLERANCE` has it."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What was measured, by name."""
    n_bytes: int = 0


def check_agrees(difference: float, run: Path) -> None:
    """Refuse a graph that is not the model."""
    if not difference <= TOLERANCE:  # Nor NaN.
        raise LeapError(
            f"the graph of {run} differs from the model by {difference:.1e}, more than "
            f"{TOLERANCE:.0e}; nothing was exported"
        )


@contextmanager
def fresh_folder(output: Path) -> Iterator[Path]:
    """A folder to write to, which takes the output's place once everything is in it."""
    with writing_to(output):
        output.parent.mkdir(parents=True, exist_ok=True)
        made = Path(mkdtemp(prefix=f".{output.name}-", dir=output.parent))
    try:
        yield made
        with writing_to(output):
            made.chmod(0o755)
            if output.exists():
                shutil.rmtree(output)
            made.replace(output)
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise


def write_graph(folder: Path, name: str, graph: Any) -> None:
    """Write a graph to a file."""
    try:
        (folder / name).write_bytes(graph.SerializeToString())
    except ValueError as error:
        raise FileError(f"{name} is larger than a file of ONNX can be ({error})") from error


NAMES = {
    "perplexity": "perplexity per token",
    "perplexity_int8": "perplexity per token, int8",
    "bleu": "BLEU, offline",
    "bleu_int8": "BLEU, offline, int8",
}


FORMATS = {
    "onnx": "ONNX graphs, their manifest and the tokenizer. `leap.runtime` runs it with numpy and "
    "onnxruntime.",
    "executorch": "a program for ExecuTorch that reads one token of one text, its manifest and the "
    "tokenizer.",
}


def card(
    config: ExportConfig,
    model: Mapping[str, Any],
    difference: float,
    facts: Mapping[str, Any],
    n_bytes: int,
) -> str:
    """The model card."""
    rows = [
        *(f"| {name.replace('_', ' ')} | {value} |" for name, value in model.items()),
        f"| size | {n_bytes / 1e6:.1f} MB, weights in {'int8' if config.int8 else 'float32'} |",
        f"| largest difference from torch, before int8 | {difference:.1e} |",
        *(f"| {NAMES.get(name, name)} | {value:.3f} |" for name, value in facts.items()),
    ]
    origin = config.run / "README.md"
    about = f"\n{origin.read_text(encoding='utf-8').strip()}\n" if origin.is_file() else ""
    return (
        f"# {config.run.name}\n\n"
        f"A model of leapformer, exported by `leap export`: {FORMATS[config.to]}\n\n"
        "| | |\n|---|---|\n" + "\n".join(rows) + "\n" + about
    )
