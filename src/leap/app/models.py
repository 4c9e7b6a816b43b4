"""The models of the page: run folders, exported folders, those that come with the package."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from leap.errors import ConfigError, FileError
from leap.runtime.manifest import is_export
from leap.runtime.streaming.pauses import best_installed
from leap.runtime.streaming.policies import Offline
from leap.runtime.streaming.stream import Interpreter
from leap.serve.config import translates
from leap.serve.exported import ExportedModel, ExportedTranslation, manifest_of
from leap.serve.protocol import Model
from leap.tasks.simul.live import LONG

Kind = Literal["lm", "classifier", "text", "speech"]
"""What a model does: write, classify texts, translate text, translate speech."""
KEPT_POLICIES = 8
SHIPPED = "leap.runtime.shipped"
"""The module of the models that come with the package; an installation may be without it."""


@dataclass(frozen=True)
class Opened:
    """A model that the page has at hand."""

    name: str
    kind: Kind
    is_exported: bool
    reader: Model | None = None
    """Of a language model."""
    run: Any = None
    """`leap.tasks.explain.runs.Run` of a language model or a classifier in torch."""
    interpreter: Callable[[str], Interpreter] | None = None
    """Of a translation model: by its policy."""


def open_models(paths: Sequence[Path]) -> list[Opened]:
    """The models of these folders; those that come with the package if there are none."""
    folders = list(paths) or _shipped()
    if not folders:
        raise ConfigError("no model comes with this installation; give --run and a run folder")
    names: list[str] = []
    for path in folders:
        name = path.resolve().name
        name = path.resolve().parent.name if name == "model" else name
        names.append(name if name not in names else str(path))
    return [open_model(path, name) for path, name in zip(folders, names, strict=True)]


def _shipped() -> list[Path]:
    if find_spec(SHIPPED) is None:
        return []
    shipped = import_module(SHIPPED)
    return [shipped.shipped(name) for name in shipped.names()]


def open_model(path: Path, name: str) -> Opened:
    """The model of one folder."""
    if is_export(path):
        task = manifest_of(path).task
        if task == "lm":
            return Opened(name, "lm", True, reader=ExportedModel(path))
        make = ExportedTranslation(path).interpreter
        return Opened(name, _spoken(task), True, interpreter=_by_policy(make))
    if not path.is_dir():
        raise FileError(f"no run folder at {path}; give one, or a folder of leap export")
    if translates(path):
        from leap.tasks.simul.streaming.stream import load_trained

        trained = load_trained(path)
        kind = _spoken("text" if trained.extractor is None else "speech")
        return Opened(name, kind, False, interpreter=_by_policy(trained.interpreter))
    from leap.tasks.explain.runs import open_run

    run = open_run(path)
    if run.kind == "classifier":
        if run.task != "text" and run.tokenizer is None:
            raise FileError(
                f"{path} classifies {run.task}, which is no text; leap explain proportions shows it"
            )
        return Opened(name, "classifier", False, run=run)
    return Opened(name, "lm", False, reader=_reader(run, name), run=run)


def _reader(run: Any, name: str) -> Model:
    from leap.models import LeapformerForCausalLM
    from leap.serve.models import KeyValueModel, StateModel

    ours = isinstance(run.model, LeapformerForCausalLM)
    return (StateModel if ours else KeyValueModel)(run.model, run.tokenizer, name)


def _spoken(task: str) -> Kind:
    return "speech" if task == "speech" else "text"


def _by_policy(make: Callable[..., Interpreter]) -> Callable[[str], Interpreter]:
    """Interpreters that are kept, and begin anew at the ends of sentences."""

    @lru_cache(KEPT_POLICIES)
    def interpreter(policy: str) -> Interpreter:
        made = make(policy, reset=LONG, pauses=best_installed())
        if made.extractor is not None and policy == Offline().name:
            return make(policy, pauses=best_installed())
        return made

    return interpreter
