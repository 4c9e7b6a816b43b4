"""What an exported folder holds, as its manifest.json tells: all that a runtime needs to know.

    format, version   "leap-export" and the version of this description
    runtime           what runs the graphs: "onnxruntime", or "executorch"
    task              "lm" for a language model, "text" or "speech" for translation
    graphs            by name: the file, its inputs and its outputs, in their order
    states            each tensor of the state: name, type, shape and initial value
    kinds             what the state's parts are, as its files name them
    at_once           the most tokens that one call takes
    n_positions       tokens that can be read in all; null where there is no limit
    vocabulary        number of tokens
    tokenizer         its file, its end-of-text token and the like

A shape is a list of numbers, but "batch" for the rows and "tokens" for an axis that begins at 0 and
grows (softmax attention keeps all). A state is passed to a graph under its own name, and comes back
under `next.` and its name. Numbers that JSON does not have are strings: "-inf".
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from leap.errors import FileError

FORMAT = "leap-export"
VERSION = 1
FILE = "manifest.json"
NEXT = "next."
"""What the name of a state begins with where a graph gives it back."""
TYPES = ("float32", "float64", "int64", "bool")
RUNTIME = "onnxruntime"
"""What `leap.runtime` runs graphs with."""
AGAIN = "make it again with leap export"


@dataclass(frozen=True)
class StateTensor:
    """One tensor of a state."""

    name: str
    type: str
    shape: tuple[int | str, ...]
    fill: float
    """The value that it is filled with before the first token."""


@dataclass(frozen=True)
class GraphFile:
    """One graph, and what it takes and gives."""

    file: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class Manifest:
    """The contents of a manifest.json."""

    task: str
    graphs: Mapping[str, GraphFile]
    states: tuple[StateTensor, ...]
    kinds: Mapping[str, str]
    at_once: int
    n_positions: int | None
    vocabulary: int
    tokenizer: Mapping[str, Any]
    runtime: str = RUNTIME
    precision: str = "float32"
    model: Mapping[str, Any] = field(default_factory=dict)
    """What was exported: for people, and for the card."""
    translation: Mapping[str, Any] = field(default_factory=dict)
    """How a translation model reads: its chunks, special subwords, language and sound."""

    @property
    def is_constant(self) -> bool:
        """Whether a state keeps its size as it reads, so that rows can be joined at any time."""
        return not any("tokens" in each.shape for each in self.states)

    def to_json(self) -> dict[str, Any]:
        """As it is written."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "runtime": self.runtime,
            "task": self.task,
            "precision": self.precision,
            "model": dict(self.model),
            "graphs": {
                name: {
                    "file": graph.file,
                    "inputs": list(graph.inputs),
                    "outputs": list(graph.outputs),
                }
                for name, graph in self.graphs.items()
            },
            "at_once": self.at_once,
            "n_positions": self.n_positions,
            "vocabulary": self.vocabulary,
            "tokenizer": dict(self.tokenizer),
            **({"translation": dict(self.translation)} if self.translation else {}),
            "kinds": dict(self.kinds),
            "states": [
                {
                    "name": each.name,
                    "type": each.type,
                    "shape": list(each.shape),
                    "fill": each.fill if abs(each.fill) < float("inf") else str(each.fill),
                }
                for each in self.states
            ],
        }


def is_export(folder: Path) -> bool:
    """Whether a folder is one of `leap export`, or was meant to be."""
    return (folder / FILE).is_file()


def read_manifest(folder: Path, task: str | tuple[str, ...]) -> Manifest:
    """The manifest of an exported model of a task.

    Raises:
        FileError: if there is none, or it is broken, of another version or another task.
    """
    path = folder / FILE
    if not path.is_file():
        raise FileError(f"no exported model at {folder}; make one with leap export")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise FileError(f"{path} is not a whole JSON file ({error}); {AGAIN}") from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise FileError(f"{path} is no manifest of an exported model; give a folder of leap export")
    if found.get("version") != VERSION:
        raise FileError(
            f"{folder} was exported in version {found.get('version')} of the format, and this "
            f"is version {VERSION}; {AGAIN}"
        )
    if found.get("runtime", RUNTIME) != RUNTIME:
        raise FileError(
            f"{folder} was exported for {found['runtime']}, which runs it; for this command "
            "export it without --to"
        )
    tasks = (task,) if isinstance(task, str) else task
    if found.get("task") not in tasks:
        raise FileError(
            f"{folder} holds a model for {found.get('task')}, and one for {' or '.join(tasks)} is "
            "wanted here"
        )
    try:
        return _manifest(found)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise FileError(f"{path} does not tell what it should ({error!r}); {AGAIN}") from error


def _manifest(found: Mapping[str, Any]) -> Manifest:
    states = tuple(
        StateTensor(
            str(each["name"]),
            TYPES[TYPES.index(each["type"])],
            tuple(x if x in ("batch", "tokens") else int(x) for x in each["shape"]),
            float(each["fill"]),
        )
        for each in found["states"]
    )
    graphs = {
        str(name): GraphFile(str(each["file"]), tuple(each["inputs"]), tuple(each["outputs"]))
        for name, each in found["graphs"].items()
    }
    limit = found["n_positions"]
    return Manifest(
        task=found["task"],
        precision=str(found["precision"]),
        model=dict(found["model"]),
        graphs=graphs,
        states=states,
        kinds={str(name): str(kind) for name, kind in found["kinds"].items()},
        at_once=int(found["at_once"]),
        n_positions=None if limit is None else int(limit),
        vocabulary=int(found["vocabulary"]),
        tokenizer=dict(found["tokenizer"]),
        translation=dict(found.get("translation", {})),
    )
