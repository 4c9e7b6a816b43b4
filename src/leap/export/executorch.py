"""A language model as one step for ExecuTorch, which runs models on phones.

    tokens [1, 1], state   ->   logits [1, 1, vocabulary], next state

The step of `leap.export.lm`, for one row and one token at a time: ExecuTorch plans memory when the
program is made, so nothing in it may grow.
"""

import importlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from leap.errors import ConfigError
from leap.export.files import ExportConfig, Exported, card, check_agrees, fresh_folder
from leap.export.graph import Call, quiet
from leap.export.lm import (
    CHECKED,
    TOKENIZER,
    held_out_tokens,
    load_exportable,
    manifest_of,
    step_of,
)
from leap.extras import install_command
from leap.models import LeapformerForCausalLM
from leap.ops.backends import using
from leap.reports.files import write_json
from leap.runtime.manifest import FILE, NEXT, GraphFile, StateTensor

PROGRAM = "step.pte"
PACKAGE = "executorch"


def export_executorch(config: ExportConfig) -> Exported:
    """Export a language model, if the program does as the model does on real text."""
    exir = _imported("exir")
    model, tokenizer = load_exportable(config)
    text = held_out_tokens(config, tokenizer)
    call = step_of(model, torch.zeros(1, 1, dtype=torch.long))
    if any("tokens" in each.shape for each in call.layout.tensors):
        raise ConfigError(
            f"{config.run} has softmax attention, whose state grows with each token; {PACKAGE} "
            "takes models whose state keeps its size"
        )
    graph = GraphFile(
        PROGRAM, ("tokens", *call.reads), ("logits", *(NEXT + name for name in call.writes))
    )
    with fresh_folder(config.output) as folder:
        (folder / PROGRAM).write_bytes(_program(exir, call))
        manifest = replace(manifest_of(model, tokenizer, call, graph, at_once=1), runtime=PACKAGE)
        (folder / TOKENIZER).write_text(tokenizer.to_json(), encoding="utf-8")
        write_json(folder / FILE, manifest.to_json())
        difference = _largest_difference(model, folder / PROGRAM, manifest.states, text)
        check_agrees(difference, config.run)
        size = sum(path.stat().st_size for path in folder.iterdir())
        told = card(config, manifest.model, difference, {}, size)
        (folder / "README.md").write_text(told, encoding="utf-8")
    return Exported(config.output, difference, {}, size)


class _OneToken(nn.Module):
    """A step that gives the logits of the one token it reads."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self.call = call
        self.register_buffer("at", torch.zeros(1, dtype=torch.long))

    def forward(self, tokens: Tensor, states: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return self.call((tokens, self.at), states)


def _program(exir: Any, call: Call) -> bytes:
    """The step as ExecuTorch reads it."""
    states = tuple(call.layout.examples[name] for name in call.reads)
    with using("graph"), torch.no_grad(), quiet():
        example = (torch.zeros(1, 1, dtype=torch.long), states)
        program = torch.export.export(_OneToken(call).eval(), example, strict=False)
        program = program.run_decompositions({torch.ops.aten.exp2.default: _power_of_two})
        lowered = exir.to_edge_transform_and_lower(program).to_executorch()
    return bytes(lowered.buffer)


def _power_of_two(x: Tensor) -> Tensor:
    """`exp2`, which Core ATen does not have."""
    return torch.pow(2.0, x)


def _largest_difference(
    model: LeapformerForCausalLM, path: Path, states: Sequence[StateTensor], text: Tensor
) -> float:
    """Between the logits of torch and of the program, as a share of the largest if over 1."""
    row = text[None, : min(CHECKED, model.config.n_positions or CHECKED)]
    with torch.no_grad():
        expected = model(input_ids=row).logits[0].float()
    method = _imported("runtime").Runtime.get().load_program(path).load_method("forward")
    past = [
        torch.full([1, *each.shape[1:]], each.fill, dtype=getattr(torch, each.type))  # type: ignore[list-item]  # No axis grows.
        for each in states
    ]
    difference = 0.0
    for i, wanted in enumerate(expected):
        # Outputs lie in memory that the next call writes to.
        logits, *past = (x.clone() for x in method.execute([row[:, i : i + 1].contiguous(), *past]))
        difference = max(difference, float((logits[0, 0] - wanted).abs().max()))
    return difference / max(1.0, float(expected.abs().max()))


def _imported(module: str) -> Any:
    try:
        with quiet():
            return importlib.import_module(f"{PACKAGE}.{module}")
    except ImportError as error:
        raise ConfigError(
            f"exporting to {PACKAGE} needs {error.name}: {install_command(PACKAGE)}"
        ) from error
