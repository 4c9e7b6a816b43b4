"""A translation model as two graphs: one reads a chunk of the source, one writes target tokens.

    read    tokens [batch, n], or frames [batch, states, frames x bins], states -> next states
    write   tokens [batch, n], at [k], states -> logits [batch, k, vocabulary],
            shares [batch, 16], next states

`shares` tell the policies that look at the attention how much of it, at the last token and over all
heads, is on what had been read before each of the last 16 chunks, the newest first.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from leap.errors import LeapError, refuse_given
from leap.export.files import ExportConfig, Exported, card, check_agrees, fresh_folder, write_graph
from leap.export.graph import Call, Port, StateLayout, as_file, in_int8, trace
from leap.export.lm import described
from leap.models.states import States
from leap.ops.backends import using
from leap.ops.delta import AT_ONCE
from leap.ops.linear import LinearState
from leap.ops.state import State, state
from leap.reports.files import read_json, write_json
from leap.runtime.manifest import FILE, Manifest
from leap.runtime.streaming.policies import AlignAtt
from leap.runtime.streaming.vocabulary import BOS, EOS
from leap.runtime.translator import Translator
from leap.tasks.simul.corpora.corpus import Sentence
from leap.tasks.simul.evaluate import translate
from leap.tasks.simul.model import Translator as Model
from leap.tasks.simul.prepare import load_prepared
from leap.tasks.simul.scoring.metrics import score
from leap.tasks.simul.streaming.stream import Trained, load_trained

TOKENIZER = "tokenizer.json"
LOOKED_BACK = AlignAtt().longest
"""Chunks that policies can know the attention to."""
SENTENCES = 100
"""Of the test set, to measure BLEU on."""
SOME_TEXT = "Two men in orange hats stand near a river, and one of them says: we will see!"
"""Where there is no test set, to check by."""


@state
class Before(State):
    """What the last cross-attention had read before each of the last chunks, the newest first."""

    read: Tensor
    """Sums of keys `[b, n, h, f]`; or of softmax, how many states, `[b, n]`."""


def export_translation(config: ExportConfig) -> Exported:
    """Export a translation model, if the graphs do as the model does on real input."""
    refuse_given(config, ("tokens",), f"of language models, and {config.run} translates")
    trained = load_trained(config.run)
    tests = test_sentences(config)
    with fresh_folder(config.output) as folder:
        manifest, graphs = traced(trained)
        for name, graph in graphs.items():
            write_graph(folder, manifest.graphs[name].file, graph)
        (folder / TOKENIZER).write_text(trained.vocabulary.to_json(), encoding="utf-8")
        write_json(folder / FILE, manifest.to_json())
        difference = largest_difference(trained, Translator(folder), tests)
        check_agrees(difference, config.run)
        facts: dict[str, Any] = {}
        if tests:
            facts["bleu"] = _bleu(folder, tests)
        if config.int8:
            for name, graph in graphs.items():
                write_graph(folder, manifest.graphs[name].file, in_int8(graph))
            write_json(folder / FILE, manifest.to_json() | {"precision": "int8"})
            Translator(folder).stream().push(_source(trained, tests)[0])
            if tests:
                facts["bleu_int8"] = _bleu(folder, tests)
        size = sum(path.stat().st_size for path in folder.iterdir())
        (folder / "README.md").write_text(
            card(config, manifest.model, difference, facts, size), encoding="utf-8"
        )
    return Exported(config.output, difference, facts, size)


def traced(trained: Trained) -> tuple[Manifest, dict[str, Any]]:
    """The manifest and the graphs of a model."""
    model: Model = trained.model
    config: Any = model.config
    is_speech = trained.extractor is not None
    n = max(3, (config.cross_window or 0) + 2)  # Enough to fill a window.
    source = torch.zeros(2, n, dtype=torch.long)
    if trained.extractor is not None:
        source = torch.zeros(2, n, config.frames_per_state * config.n_bins)
    target, at = torch.full((2, 3), BOS), torch.tensor([0, 2])
    read, write = _Read(model, is_speech), _Write(model)
    with torch.no_grad(), using("graph"):
        empty = blank(model, is_speech)
        _, grown = read(source, empty)
        _, grown = write(target, at, empty | grown)
        grown = empty | read(source, empty)[1] | grown
    layout = StateLayout(empty, grown)
    names = [each.name for each in layout.tensors]
    reading = [name for name in names if not name.startswith("self-")]
    writing = [name for name in names if name.startswith(("self-", "cross-", "before"))]
    written = [name for name in names if name.startswith("self-")]
    calls = {
        "read": Call(read, model, layout, reading, reading),
        "write": Call(write, model, layout, writing, written),
    }
    ports = {
        "read": [Port("source", source, {0: "batch", 1: "n"})],
        "write": [
            Port("tokens", target, {0: "batch", 1: "n"}),
            Port("at", at, {0: "k"}),
        ],
    }
    outputs: dict[str, list[str]] = {"read": [], "write": ["logits", "shares"]}
    start = config.decoder_start_token_id
    about: dict[str, Any] = {
        "start": BOS if start is None else start,
        "end": EOS,
        "ratio": trained.paths.ratio,
        "chunk_sizes": list(trained.paths.chunk_sizes),
        "source_language": getattr(config, "source_language", "en"),
        "cross_window": config.cross_window,
        "reads_in_parts": config.form("encoder") == "causal",
    }
    if trained.extractor is not None:
        sound = trained.extractor
        about |= {
            "frames_per_state": config.frames_per_state,
            "sound": {
                "feature_size": sound.feature_size,
                "sampling_rate": sound.sampling_rate,
                "lead": sound.lead,
                "mean": sound.mean,
                "std": sound.std,
            },
        }
    manifest = Manifest(
        task="speech" if is_speech else "text",
        graphs={
            name: as_file(call, ports[name], outputs[name], f"{name}.onnx")
            for name, call in calls.items()
        },
        states=tuple(layout.tensors),
        kinds=layout.kinds,
        at_once=AT_ONCE,
        n_positions=config.n_positions if config.position_embedding == "learned" else None,
        vocabulary=config.vocab_size,
        tokenizer={"file": TOKENIZER},
        model=described(model),
        translation=about,
    )
    return manifest, {name: trace(call, ports[name], outputs[name]) for name, call in calls.items()}


def blank(model: Model, is_speech: bool) -> dict[str, State]:
    """What the model keeps of nothing, in two rows."""
    config: Any = model.config
    nothing = torch.zeros(2, 0, dtype=torch.long)
    source = torch.zeros(2, 0, config.n_bins) if is_speech else nothing
    states = model.write(nothing, model.read(source))[1]
    found: dict[str, State] = {
        name: each.reserve() if hasattr(each, "reserve") else each
        for name, each in states.by_name.items()
    }
    read = _told(states.of("cross")[-1])
    return found | {"before": Before(torch.stack([read] * LOOKED_BACK, dim=1))}


def test_sentences(config: ExportConfig) -> list[Sentence]:
    """Of the first test of the data that a run learnt from, if it is still there."""
    settings = config.run / "config.json"
    place = config.data
    if place is None and settings.is_file():
        place = read_json(settings).get("data")
    if place is None:
        return []
    try:
        prepared = load_prepared(Path(place))
        part = next(x for x in (*prepared.parts[2:], *prepared.parts))
        return prepared.sentences(part)[:SENTENCES]
    except LeapError:
        if config.data is not None:
            raise
        return []  # The run's own data has gone.


def largest_difference(
    trained: Trained, translator: Translator, tests: Sequence[Sentence]
) -> float:
    """Between the logits of torch and of the graphs, over chunks of several sizes.

    As a share of the largest logit, where that is more than 1.
    """
    model, worst, largest = trained.model, 0.0, 1.0
    chunk = np.asarray(_content(trained, tests))
    states = States({})
    arrays: Any = translator.blank.select([0, 0])
    target = [[translator.start, translator.start]]
    size = 3 * (1 if trained.extractor is None else translator.frames_per_state)
    with torch.no_grad():
        for start in range(0, min(len(chunk), 12 * size), size):
            part = np.stack([chunk[start : start + size]] * 2)
            states = model.read(torch.from_numpy(part), states)
            arrays = translator.read(part, arrays)
            tokens = np.array(target[-1])[:, None].repeat(1 + start % 2, axis=1)
            expected, states = model.write(torch.from_numpy(tokens), states)
            found, arrays, _ = translator.logits(tokens, arrays)
            wanted = expected[:, -1].numpy()
            worst = max(worst, float(np.abs(found - wanted).max()))
            largest = max(largest, float(np.abs(wanted).max()))
            target.append(wanted.argmax(-1).tolist())
    return worst / largest


def _source(trained: Trained, tests: Sequence[Sentence]) -> list[Any]:
    """Real input: text, or a second of sound."""
    if trained.extractor is None:
        return [tests[0].source if tests else SOME_TEXT]
    random = np.random.default_rng(0)
    return [(random.standard_normal(trained.extractor.sampling_rate) / 10).astype(np.float32)]


def _content(trained: Trained, tests: Sequence[Sentence]) -> Any:
    (source,) = _source(trained, tests)
    if trained.extractor is None:
        return trained.vocabulary.encode(source)
    return trained.extractor.normalise(trained.extractor.frames(source))


def _bleu(folder: Path, tests: Sequence[Sentence]) -> float:
    return score(translate(Translator(folder, "offline"), tests, batch=1)).bleu


@dataclass(frozen=True)
class _Read:
    """What the graph `read` computes."""

    model: Model
    is_speech: bool

    def __call__(
        self, source: Tensor, states: Mapping[str, State]
    ) -> tuple[Sequence[Tensor], dict[str, State]]:
        given = dict(states)
        before = given.pop("before")
        assert isinstance(before, Before)
        if self.is_speech:
            config: Any = self.model.config
            source = source.reshape(source.shape[0], -1, config.n_bins)
        earlier = _told(States(given).of("cross")[-1]).unsqueeze(1)
        after = dict(self.model.read(source, States(given)).by_name)
        kept = torch.cat([earlier, before.read[:, :-1]], dim=1)
        return [], {**after, "before": Before(kept)}


@dataclass(frozen=True)
class _Write:
    """What the graph `write` computes."""

    model: Model

    def __call__(
        self, tokens: Tensor, at: Tensor, states: Mapping[str, State]
    ) -> tuple[Sequence[Tensor], dict[str, State]]:
        given = dict(states)
        before = given.pop("before")
        assert isinstance(before, Before)
        last: Any = States(given).of("cross")[-1]
        earlier = [_as_before(last, x) for x in before.read.unbind(1)]
        decoder = self.model.model.decoder
        x, after, shares = decoder.write_with_shares(tokens, States(given), earlier)
        assert shares is not None
        logits = self.model.lm_head(x.index_select(1, at))
        told = shares.mean(dim=1)[:, -1].float()
        return [logits, told], {name: s for name, s in after.by_name.items() if name[:4] == "self"}


def _told(read: Any) -> Tensor:
    """What tells how much of the attention is on what had been read."""
    return read.k if isinstance(read, LinearState) else read.length


def _as_before(read: Any, told: Tensor) -> Any:
    if isinstance(read, LinearState):
        return replace(read.without_values(), k=told)
    return replace(read.without_values(), length=told)
