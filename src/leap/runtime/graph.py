"""A graph of an exported model, run by onnxruntime on values that nothing changes in place."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from leap.errors import ConfigError, FileError, first_line
from leap.extras import install_command
from leap.runtime.manifest import AGAIN, NEXT, Manifest, StateTensor

Array = np.ndarray
Tensors = Mapping[str, Array]
"""The state: arrays by name, a row of each for every text."""


class Graph:
    """One graph with its state.

    Args:
        folder: of the exported model.
        manifest: what it tells.
        name: of the graph.
        threads: how many to compute with.

    Raises:
        FileError: if the graph is missing, broken, or not the one that the manifest tells of.
    """

    def __init__(self, folder: Path, manifest: Manifest, name: str, threads: int = 1) -> None:
        if name not in manifest.graphs:
            raise FileError(f"{folder} has no graph called {name}; {AGAIN}")
        graph = manifest.graphs[name]
        path = folder / graph.file
        if not path.is_file():
            raise FileError(f"{path} is missing; {AGAIN}")
        self._session = _session(path, threads)
        given = {x.name: x for x in self._session.get_inputs()}
        if [*given] != [*graph.inputs] or self._outputs() != [*graph.outputs]:
            raise FileError(f"{path} is not the graph that its manifest tells of; {AGAIN}")
        self.reads = [each for each in manifest.states if each.name in given]
        for each in self.reads:
            if not _fits(each, given[each.name]):
                found = given[each.name]
                raise FileError(
                    f"{path} takes {each.name} as {found.type} {found.shape}, and its manifest "
                    f"tells of {each.type} {list(each.shape)}; {AGAIN}"
                )
        self.outputs = [each for each in graph.outputs if not each.startswith(NEXT)]
        self.writes = [each[len(NEXT) :] for each in graph.outputs if each.startswith(NEXT)]
        if {*self.writes} - {each.name for each in manifest.states}:
            raise FileError(f"{path} gives a state that its manifest does not tell of; {AGAIN}")

    def run(self, states: Tensors, **inputs: Array) -> tuple[list[Array], dict[str, Array]]:
        """What comes out, in the graph's order, and the state after."""
        given = {each.name: states[each.name] for each in self.reads}
        found: list[Array] = self._session.run(
            [*self.outputs, *(NEXT + each for each in self.writes)], {**inputs, **given}
        )
        n = len(self.outputs)
        after = dict(states)
        after.update(zip(self.writes, found[n:], strict=True))
        return found[:n], after

    def _outputs(self) -> list[str]:
        return [x.name for x in self._session.get_outputs()]


def empty_state(states: Sequence[StateTensor], rows: int = 1) -> dict[str, Array]:
    """The state before the first token."""
    sizes: Mapping[int | str, int] = {"batch": rows, "tokens": 0}
    return {
        each.name: np.full(
            [sizes[x] if isinstance(x, str) else x for x in each.shape],
            each.fill,
            np.dtype(each.type),
        )
        for each in states
    }


def _session(path: Path, threads: int) -> Any:
    try:
        import onnxruntime
    except ImportError as error:
        raise ConfigError(
            f"exported models are run by onnxruntime: {install_command('runtime')}"
        ) from error
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    try:
        return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's own, which have no base of theirs.
        raise FileError(
            f"{path} is no graph that can be run ({first_line(error)}); {AGAIN}"
        ) from error


def _fits(wanted: StateTensor, found: Any) -> bool:
    names = {"float32": "float", "float64": "double"}
    if found.type != f"tensor({names.get(wanted.type, wanted.type)})":
        return False
    return len(found.shape) == len(wanted.shape) and all(
        isinstance(x, str) or isinstance(y, str) or x == y
        for x, y in zip(wanted.shape, found.shape, strict=True)
    )
