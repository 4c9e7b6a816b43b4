"""From a module to a file: tracing with free axes, folding, int8 weights.

A graph serves any number of rows and of tokens, so nothing in it may depend on how many there are:
ops take their backend `graph`, which has no loop over tokens. States go in and out as plain tensors
by name.
"""

import contextlib
import logging
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from leap.errors import ConfigError
from leap.extras import install_command
from leap.ops.backends import using
from leap.ops.state import State, build_state, state_kinds
from leap.runtime.manifest import NEXT, GraphFile, StateTensor

LARGEST = 2_000_000_000
"""Bytes that a file of ONNX can hold."""


@dataclass(frozen=True)
class Port:
    """An input of a graph that is no state."""

    name: str
    example: Tensor
    free: Mapping[int, str]
    """Axes of any size, by name."""


class StateLayout:
    """What the states of a model are made of, and how each begins.

    Args:
        empty: the states before the first token, by name.
        grown: the same after some tokens; an axis that differs is one that grows.
    """

    def __init__(self, empty: Mapping[str, State], grown: Mapping[str, State]) -> None:
        self.kinds: dict[str, str] = {}
        for name, state in empty.items():
            self.kinds |= state_kinds(name, state)
        self.examples = flat(grown)
        before = flat(empty)
        if {*before} != {*self.examples}:
            raise ConfigError(
                "this model's states are of other tensors after its first token than before; it "
                "cannot be exported"
            )
        self.tensors = [_described(name, before[name], x) for name, x in self.examples.items()]

    def build(self, tensors: Mapping[str, Tensor]) -> dict[str, State]:
        """The states of tensors by name."""
        return {
            name: build_state(name, self.kinds, tensors) for name in self.kinds if "." not in name
        }


def flat(states: Mapping[str, State]) -> dict[str, Tensor]:
    """Every tensor of some states by its dotted name."""
    return {f"{name}.{each}": x for name, s in states.items() for each, x in s.tensors().items()}


class Call(nn.Module):
    """What a graph computes: a function of inputs and states, with the states as tensors.

    Args:
        run: takes the inputs and the states by name, and returns outputs and states.
        model: whose parameters it uses.
        layout: of the states.
        reads: names of the tensors that go in.
        writes: names of the tensors that come out.
    """

    def __init__(
        self,
        run: Any,
        model: nn.Module,
        layout: StateLayout,
        reads: Sequence[str],
        writes: Sequence[str],
    ) -> None:
        super().__init__()
        self.run = run
        self.model = model
        self.layout = layout
        self.reads = list(reads)
        self.writes = list(writes)

    def forward(self, inputs: tuple[Tensor, ...], states: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Outputs, then the states after."""
        given = dict(zip(self.reads, states, strict=True))
        kinds = {name.partition(".")[0] for name in self.reads}
        built = {
            name: build_state(name, self.layout.kinds, given)
            for name in self.layout.kinds
            if name in kinds
        }
        outputs, after = self.run(*inputs, built)
        found = flat(after)
        return (*outputs, *(found[name] for name in self.writes))


def trace(call: Call, ports: Sequence[Port], outputs: Sequence[str]) -> Any:
    """The graph of a call, as an `onnx.ModelProto`."""
    _onnx()  # What is missing is told before the work begins.
    tensors = {each.name: each for each in call.layout.tensors}
    names = [*(port.name for port in ports), *call.reads]
    free = [
        {i: size for i, size in enumerate(tensors[name].shape) if isinstance(size, str)}
        for name in call.reads
    ]
    given = [dict(port.free) for port in ports]
    dynamic = torch.export.Dim.DYNAMIC
    with using("graph"), torch.no_grad(), quiet():
        program = torch.onnx.export(
            call.eval(),
            (
                tuple(port.example for port in ports),
                tuple(call.layout.examples[name] for name in call.reads),
            ),
            input_names=names,
            output_names=[*outputs, *(NEXT + name for name in call.writes)],
            dynamic_shapes=tuple(
                tuple(dict.fromkeys(axes, dynamic) for axes in group) for group in (given, free)
            ),
            dynamo=True,
            verbose=False,
        )
    assert program is not None
    model = program.model_proto
    del model.graph.value_info[:]
    for value, axes in zip(model.graph.input, [*given, *free], strict=True):
        for i, name in axes.items():
            value.type.tensor_type.shape.dim[i].dim_param = name
    for value in model.graph.output:
        for i, dim in enumerate(value.type.tensor_type.shape.dim):
            if dim.dim_param:
                dim.dim_param = f"{value.name}_{i}"
    del model.graph.metadata_props[:]
    for node in model.graph.node:
        del node.metadata_props[:]  # Where in our source each came from: longer than the graph.
        node.doc_string = ""
    fold_transposes(model)
    if model.ByteSize() > LARGEST:
        raise ConfigError("this model is larger than the 2 GB that a file of ONNX can hold")
    return model


def as_file(call: Call, ports: Sequence[Port], outputs: Sequence[str], file: str) -> GraphFile:
    """What the manifest tells of the graph of a call."""
    inputs = (*(port.name for port in ports), *call.reads)
    return GraphFile(file, inputs, (*outputs, *(NEXT + name for name in call.writes)))


def in_int8(model: Any) -> Any:
    """The graph with weights of matrix products, and rows of embeddings, in 8 bits."""
    onnx = _onnx()
    from onnxruntime.quantization import QuantType, quantize_dynamic

    _embeddings_in_int8(onnx, model)
    with tempfile.TemporaryDirectory() as folder, quiet():
        before, after = Path(folder, "before.onnx"), Path(folder, "after.onnx")
        onnx.save(model, before)
        quantize_dynamic(
            before,
            after,
            op_types_to_quantize=["MatMul"],
            per_channel=True,
            weight_type=QuantType.QInt8,
        )
        return onnx.load(after)


def _described(name: str, before: Tensor, after: Tensor) -> StateTensor:
    shape: list[int | str] = ["batch"]
    for first, later in zip(before.shape[1:], after.shape[1:], strict=True):
        shape.append(first if first == later else "tokens")
    values = before.unique() if before.numel() else before.new_zeros(1)
    if len(values) != 1:
        raise ConfigError(f"the state {name} does not begin with one value; it cannot be exported")
    return StateTensor(name, str(after.dtype).removeprefix("torch."), tuple(shape), float(values))


def fold_transposes(model: Any) -> None:
    """Weights as matrix products take them: what is transposed at run time is not quantised."""
    onnx = _onnx()
    graph = model.graph
    weights = {each.name: each for each in graph.initializer}
    for node in [each for each in graph.node if each.op_type == "Transpose"]:
        if node.input[0] not in weights:
            continue
        value = onnx.numpy_helper.to_array(weights[node.input[0]])
        order = next((list(each.ints) for each in node.attribute if each.name == "perm"), None)
        folded = np.ascontiguousarray(value.transpose(order))
        graph.initializer.append(onnx.numpy_helper.from_array(folded, node.output[0]))
        graph.node.remove(node)
    _drop_unused(graph)


def _embeddings_in_int8(onnx: Any, model: Any) -> None:
    """Tables that rows are looked up in, as bytes with a scale for each row."""
    graph, helper = model.graph, onnx.helper
    weights = {each.name: each for each in graph.initializer}
    for node in [each for each in graph.node if each.op_type == "Gather"]:
        table = weights.get(node.input[0])
        if table is None or table.data_type != onnx.TensorProto.FLOAT or len(table.dims) != 2:
            continue
        value = onnx.numpy_helper.to_array(table)
        scale = np.maximum(np.abs(value).max(axis=1, keepdims=True) / 127, 1e-30)
        rows = np.rint(value / scale).astype(np.int8)
        name, out = table.name, node.output[0]
        for part, content in (("rows", rows), ("scale", scale.astype(np.float32))):
            if f"{name}.{part}" not in weights:
                made = onnx.numpy_helper.from_array(content, f"{name}.{part}")
                weights[made.name] = made
                graph.initializer.append(made)
        new = [
            helper.make_node("Gather", [f"{name}.rows", node.input[1]], [f"{out}.rows"], axis=0),
            helper.make_node("Gather", [f"{name}.scale", node.input[1]], [f"{out}.scale"], axis=0),
            helper.make_node("Cast", [f"{out}.rows"], [f"{out}.cast"], to=onnx.TensorProto.FLOAT),
            helper.make_node("Mul", [f"{out}.cast", f"{out}.scale"], [out]),
        ]
        place = list(graph.node).index(node)
        graph.node.remove(node)
        for each in reversed(new):
            graph.node.insert(place, each)
    _drop_unused(graph)


def _drop_unused(graph: Any) -> None:
    used = {name for node in graph.node for name in node.input}
    used |= {each.name for each in graph.output}
    for each in [each for each in graph.initializer if each.name not in used]:
        graph.initializer.remove(each)


def _onnx() -> Any:
    try:
        import onnx
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"exporting needs {error.name}: {install_command('export')}") from error
    return onnx


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """What goes wrong comes as an error; the libraries' hints are for their own developers."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
