"""A language model as one graph: some tokens in, their logits and the next state out.

    tokens [batch, n], at [k], state   ->   logits [batch, k, vocabulary], next state

`at` says for which of the n tokens logits are wanted: of a prompt, which is read some tokens at a
time, only the last one's are.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from leap.errors import ConfigError, LeapError
from leap.export.files import ExportConfig, Exported, card, check_agrees, fresh_folder, write_graph
from leap.export.graph import Call, Port, StateLayout, as_file, in_int8, trace
from leap.models import LeapformerForCausalLM, StateCache
from leap.ops.backends import using
from leap.ops.delta import AT_ONCE
from leap.ops.state import State
from leap.reports.files import read_json, write_json
from leap.runtime.manifest import FILE, GraphFile, Manifest
from leap.runtime.writer import Writer
from leap.tasks.lm.data import read_corpus
from leap.tasks.lm.model import load_model, max_length
from leap.tasks.lm.tokenizer import TextTokenizer

GRAPH = "step.onnx"
TOKENIZER = "tokenizer.json"
CUTS = (1, 3, AT_ONCE, 1, 1)
"""Tokens read at a time when a graph is checked, cycled."""
CHECKED = 256
"""Tokens of each of two rows that torch and the graph are compared on."""


def export_lm(config: ExportConfig) -> Exported:
    """Export a language model, if the graph does as the model does on real text."""
    model, tokenizer = load_exportable(config)
    text = held_out_tokens(config, tokenizer)
    with fresh_folder(config.output) as folder:
        manifest, graph = traced(model, tokenizer)
        write_graph(folder, GRAPH, graph)
        (folder / TOKENIZER).write_text(tokenizer.to_json(), encoding="utf-8")
        write_json(folder / FILE, manifest.to_json())
        writer = Writer(folder)
        difference = largest_difference(model, writer, text)
        check_agrees(difference, config.run)
        facts: dict[str, Any] = {"perplexity": perplexity(writer, text[: config.tokens])}
        if config.int8:
            write_graph(folder, GRAPH, in_int8(graph))
            write_json(folder / FILE, manifest.to_json() | {"precision": "int8"})
            facts["perplexity_int8"] = perplexity(Writer(folder), text[: config.tokens])
            if not math.isfinite(facts["perplexity_int8"]):
                raise LeapError(f"{config.run} in int8 predicts nothing; export it without --int8")
        size = sum(path.stat().st_size for path in folder.iterdir())
        (folder / "README.md").write_text(
            card(config, manifest.model, difference, facts, size), encoding="utf-8"
        )
    return Exported(config.output, difference, facts, size)


def load_exportable(config: ExportConfig) -> tuple[LeapformerForCausalLM, TextTokenizer]:
    """The language model of a run, if it is one that keeps a state."""
    model, tokenizer = load_model(config.run)
    if not isinstance(model, LeapformerForCausalLM):
        raise ConfigError(
            f"{config.run} holds a {model.config.model_type}, which keeps no state; leap export "
            "takes models of this package"
        )
    return model, tokenizer


def traced(model: LeapformerForCausalLM, tokenizer: TextTokenizer) -> tuple[Manifest, Any]:
    """The manifest and the graph of a model."""
    ids = torch.zeros(2, 3, dtype=torch.long)
    call = step_of(model, ids)
    ports = [
        Port("tokens", ids, {0: "batch", 1: "n"}),
        Port("at", torch.tensor([0, 2]), {0: "k"}),
    ]
    graph = as_file(call, ports, ["logits"], GRAPH)
    return manifest_of(model, tokenizer, call, graph, AT_ONCE), trace(call, ports, ["logits"])


def step_of(model: LeapformerForCausalLM, ids: Tensor) -> Call:
    """The step that a graph computes, with states as they are after some tokens `[b, t]`."""
    with torch.no_grad(), using("graph"):
        empty, grown = _states(_read(model, ids[:, :0])), _states(_read(model, ids))
    layout = StateLayout(empty, grown)
    names = [each.name for each in layout.tensors]
    return Call(_Step(model), model, layout, names, names)


def manifest_of(
    model: LeapformerForCausalLM,
    tokenizer: TextTokenizer,
    call: Call,
    graph: GraphFile,
    at_once: int,
) -> Manifest:
    """What a runtime needs to know of a step."""
    return Manifest(
        task="lm",
        graphs={"step": graph},
        states=tuple(call.layout.tensors),
        kinds={**call.layout.kinds, "progress": "Progress"},
        at_once=at_once,
        n_positions=max_length(model),
        vocabulary=model.config.vocab_size,
        tokenizer={
            "file": TOKENIZER,
            "fingerprint": tokenizer.fingerprint,
            "end": tokenizer.eos_id,
            "spells_line_ends": tokenizer.spells_line_ends,
        },
        model=described(model),
    )


def described(model: Any) -> dict[str, Any]:
    """What a model is, for people."""
    config = model.config
    names = ("attention", "hidden_size", "n_layer", "n_head", "position_embedding", "vocab_size")
    told = {name: getattr(config, name) for name in names if hasattr(config, name)}
    return {"kind": type(model).__name__, "parameters": model.num_parameters(), **told}


def held_out_tokens(config: ExportConfig, tokenizer: TextTokenizer) -> Tensor:
    """Real text to check by: the one given, that of the run, or the Python library's."""
    source = config.data
    settings = config.run / "config.json"
    if source is None and settings.is_file():
        source = read_json(settings).get("data")
        source = None if source is None else str(source)
    try:
        corpus = read_corpus(source)
    except LeapError:
        if config.data is not None:
            raise
        corpus = read_corpus(None)  # The run's own text has gone.
    found: list[Tensor] = []
    n = 0
    for text in corpus.test:
        found.append(tokenizer.encode_documents([text]))
        n += len(found[-1])
        if n >= max(config.tokens, 2 * CHECKED):
            break
    tokens = torch.cat(found).long() if found else torch.zeros(0, dtype=torch.long)
    if len(tokens) < 8:
        raise ConfigError(f"the test part of {corpus.name} has {len(tokens)} tokens; give --data")
    return tokens


def largest_difference(model: LeapformerForCausalLM, writer: Writer, text: Tensor) -> float:
    """Between the logits of torch and of the graph, over two rows that are cut in many ways.

    As a share of the largest logit, where that is more than 1.
    """
    limit = writer.manifest.n_positions or CHECKED
    n = min(CHECKED, limit, len(text) // 2)
    rows = torch.stack([text[:n], text[n : 2 * n]])
    with torch.no_grad():
        expected = model(input_ids=rows).logits.float().numpy()
    past, found, start = writer.empty(2), [], 0
    while start < n:
        for cut in CUTS:
            part = rows[:, start : start + cut].numpy()
            if part.shape[1]:
                logits, past = writer.logits(part, past, at=range(part.shape[1]))
                found.append(logits)
            start += cut
    difference = np.abs(np.concatenate(found, axis=1) - expected).max()
    return float(difference / max(1.0, np.abs(expected).max()))


def perplexity(writer: Writer, tokens: Tensor) -> float:
    """Per token, each predicted from all before it, or from a window where positions end."""
    ids = np.concatenate([[writer.codec.eos_id], tokens.numpy()])
    size = writer.manifest.n_positions or len(ids)
    nats, n = 0.0, 0
    for start in range(0, len(ids) - 1, size):
        window = ids[start : start + size + 1]
        past = writer.empty()
        for place in range(0, len(window) - 1, writer.manifest.at_once):
            part = window[place : place + writer.manifest.at_once + 1]
            inputs, targets = part[:-1], part[1:]
            logits, past = writer.logits(inputs[None], past, at=range(len(inputs)))
            scores = logits[0].astype(np.float64)
            top = scores.max(axis=-1)
            total = np.log(np.exp(scores - top[:, None]).sum(axis=-1)) + top
            nats += float((total - scores[np.arange(len(targets)), targets]).sum())
            n += len(targets)
    return math.exp(min(nats / n, 700.0))


@dataclass(frozen=True)
class _Step:
    """What the graph computes."""

    model: LeapformerForCausalLM

    def __call__(
        self, tokens: Tensor, at: Tensor, states: Mapping[str, State]
    ) -> tuple[Sequence[Tensor], dict[str, State]]:
        cache = StateCache(len(states))
        for i, layer in enumerate(cache.layers):
            layer.put(states[str(i)], 0)
        x = self.model.model(tokens, past_key_values=cache).last_hidden_state
        return [self.model.head(x.index_select(1, at))], _states(cache)


def _read(model: LeapformerForCausalLM, ids: Tensor) -> StateCache:
    """What a model keeps of tokens, with all the room it will ever need."""
    cache = StateCache(model.config.n_layer)
    model.model(ids[:, :0], past_key_values=cache)
    cache.reserve()
    if ids.shape[1]:
        model.model(ids, past_key_values=cache)
    return cache


def _states(cache: StateCache) -> dict[str, State]:
    return {str(i): layer.state for i, layer in enumerate(cache.layers) if layer.state is not None}
