"""What a token costs, and a start, on every runtime: torch, and onnxruntime in float32 and in int8.

One of our models beside Hugging Face's GPT-2 of the same sizes with its KV cache, on the same
runtimes, all with random weights, which take as long as trained ones. A token is timed on top of a
context, as by `leap bench decode`: our model has read it, and GPT-2's cache is filled with random
numbers. Each graph's logits are first compared with torch's.

A start is a process of its own, from nothing to the first logits: its CPU time, and the most memory
that it held.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import DynamicCache

from leap.bench.decode import GPT2, random_model, sizes
from leap.bench.measure import Call
from leap.bench.run import (
    Report,
    Steps,
    Timed,
    TurnsConfig,
    report_on,
    time_by_turns,
)
from leap.errors import ConfigError, LeapError
from leap.export.files import write_graph
from leap.export.graph import fold_transposes, in_int8, quiet
from leap.export.lm import GRAPH, TOKENIZER, traced
from leap.models import StateCache, usable_as
from leap.reports.files import write_json
from leap.reports.progress import Progress, silent
from leap.runtime.manifest import FILE
from leap.runtime.writer import Past, Writer
from leap.tasks.lm.tokenizer import byte_tokenizer

TORCH, FLOAT32, INT8 = "torch", "onnxruntime", "onnxruntime int8"
RUNTIMES = (TORCH, FLOAT32, INT8)
LARGEST_ERROR = 1e-3
"""Of the largest logit: float32, through every layer of a model."""


@dataclass(frozen=True, kw_only=True)
class RuntimeConfig(TurnsConfig):
    """Measure a token and a start of a model by torch and by onnxruntime, beside GPT-2.

    Models have random weights. Prints tables; writes results.json, results.md and runtime.png.
    """

    models: tuple[str, ...] = ("leapformer", "leap", GPT2)
    """Models to measure: gpt2, or ours by the name of their attention."""
    preset: str = "small"
    """Sizes of all models: tiny, small, 140m, 247m or 350m."""
    context: int = 1024
    """Tokens read before the one that is timed."""
    starts: int = 3
    """Starts of each model on each runtime, of which the quickest counts."""
    repeats: int = 30
    """Repetitions of each model on each runtime, of which the fastest counts."""
    keep: Path | None = None
    """Folder to keep the graphs in, for benchmarks/runtime/browser.py; by default none are kept."""
    output: Path = Path("runs/bench-runtime")
    """Folder to write the results to."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_at_least_one("context", "starts")
        if not self.models:
            raise ConfigError("nothing to measure: give at least one model")
        known = (*usable_as("causal"), GPT2)
        for name in self.models:
            if name not in known:
                raise ConfigError(f"no model is called {name!r}; there are {', '.join(known)}")
        if self.device != "cpu":
            raise ConfigError(f"device={self.device!r}: runtimes are compared on the cpu")
        sizes(self.preset, self.context + 1)


@dataclass(frozen=True, kw_only=True)
class RuntimeResult(Timed):
    """What one model took on one runtime."""

    model: str
    runtime: str
    error: float
    """The largest difference of a logit from torch's, as a share of the largest."""
    state_bytes: int
    """Memory of what is kept of the context."""
    file_bytes: int
    """Size of the model's file."""
    start_seconds: float
    """CPU time from nothing to the first logits."""
    start_bytes: int
    """Most memory that this process held."""


RuntimeReport = Report[RuntimeConfig, RuntimeResult]


@torch.no_grad()
def measure(config: RuntimeConfig, progress: Progress = silent) -> RuntimeReport:
    """Export each model, compare what the runtimes compute, and measure them all."""
    return report_on(config, _results(config, progress))


def _results(config: RuntimeConfig, progress: Progress) -> Iterator[RuntimeResult]:
    names = list(dict.fromkeys(config.models))
    steps = Steps(progress, total=len(names) * (2 + len(RUNTIMES)))
    for name in names:
        with tempfile.TemporaryDirectory() as given:
            steps.begin(f"{name}: export")
            folder = Path(given) if config.keep is None else config.keep / name
            made = (_Gpt2 if name == GPT2 else _Ours)(name, config, folder)
            errors = {runtime: _error(made, runtime) for runtime in RUNTIMES}
            if not errors[FLOAT32] <= LARGEST_ERROR:
                raise LeapError(
                    f"{name} in onnxruntime is off by {errors[FLOAT32]:.1e} of the largest logit, "
                    f"where {LARGEST_ERROR:.1e} is allowed; its speed was not measured"
                )
            steps.end()
            times = time_by_turns(made.calls, steps, name, config)
            steps.begin(f"{name}: starts")
            starts = {runtime: made.start(runtime, config.starts) for runtime in RUNTIMES}
            steps.end()
            for runtime, timed in times.items():
                yield RuntimeResult(
                    model=name,
                    runtime=runtime,
                    error=errors[runtime],
                    state_bytes=made.state_bytes[runtime],
                    file_bytes=made.files[runtime].stat().st_size,
                    start_seconds=starts[runtime][0],
                    start_bytes=starts[runtime][1],
                    **vars(timed),
                )


class _Made:
    """A model on every runtime, with a context read."""

    calls: Mapping[str, Call]
    """By runtime: the logits after one more token."""
    state_bytes: Mapping[str, int]
    files: Mapping[str, Path]
    code: Mapping[str, str]
    """By runtime: a program from nothing to the first logits, which is given a folder."""

    def start(self, runtime: str, n: int) -> tuple[float, int]:
        """CPU seconds and most bytes of the quickest of n starts."""
        folder = str(self.files[runtime].parent)
        return min(_started(self.code[runtime], folder) for _ in range(n))


class _Ours(_Made):
    """One of our models."""

    def __init__(self, name: str, config: RuntimeConfig, folder: Path) -> None:
        model = random_model(name, config.preset, config.context + 1, config.seed).eval()
        tokenizer = byte_tokenizer()
        drawn = torch.Generator().manual_seed(config.seed)
        tokens = torch.randint(model.config.vocab_size, (1, config.context + 1), generator=drawn)
        cache = StateCache(model.config.n_layer)
        model(tokens[:, :-1], past_key_values=cache, use_cache=True, logits_to_keep=1)
        model.save_pretrained(folder / "torch")
        manifest, graph = traced(model, tokenizer)
        manifest_json = manifest.to_json()
        writers: dict[str, Writer] = {}
        for runtime, place in ((FLOAT32, folder / "float32"), (INT8, folder / "int8")):
            place.mkdir(parents=True, exist_ok=True)
            write_graph(place, GRAPH, graph if runtime == FLOAT32 else in_int8(graph))
            (place / TOKENIZER).write_text(tokenizer.to_json(), encoding="utf-8")
            write_json(place / FILE, manifest_json)
            writers[runtime] = Writer(place)
        read = {
            runtime: each.logits(tokens[:, :-1].numpy(), each.empty())[1]
            for runtime, each in writers.items()
        }

        def step_torch() -> Any:
            kept = cache.layers
            after = StateCache(len(kept))
            for old, new in zip(kept, after.layers, strict=True):
                new.put(old.state, old.n_tokens)
            return model(tokens[:, -1:], past_key_values=after, use_cache=True).logits[0, -1]

        def step_by(writer: Writer, past: Past) -> Call:
            return lambda: writer.logits(tokens[:, -1:].numpy(), past)[0][0, -1]

        self.calls = {
            TORCH: torch.inference_mode()(step_torch),
            **{name: step_by(each, read[name]) for name, each in writers.items()},
        }
        self.state_bytes = {
            TORCH: cache.n_bytes,
            **{runtime: past.n_bytes for runtime, past in read.items()},
        }
        self.files = {
            TORCH: folder / "torch" / "model.safetensors",
            FLOAT32: folder / "float32" / GRAPH,
            INT8: folder / "int8" / GRAPH,
        }
        self.code = {TORCH: START_OURS_TORCH, FLOAT32: START_OURS, INT8: START_OURS}


class _Gpt2(_Made):
    """GPT-2, its cache filled with random keys and values in place of reading."""

    def __init__(self, name: str, config: RuntimeConfig, folder: Path) -> None:
        model = random_model(name, config.preset, config.context + 1, config.seed).eval()
        shape = (1, model.config.n_head, config.context, model.config.n_embd // model.config.n_head)
        drawn = torch.Generator().manual_seed(config.seed)
        past = [torch.randn(shape, generator=drawn) for _ in range(2 * model.config.n_layer)]
        token = torch.zeros(1, 1, dtype=torch.long)
        step = Gpt2Step(model).eval()
        model.save_pretrained(folder / "torch")
        graph = trace_gpt2(step, token, past)
        sessions = {}
        for runtime, place in ((FLOAT32, folder / "float32"), (INT8, folder / "int8")):
            place.mkdir(parents=True, exist_ok=True)
            write_graph(place, GRAPH, graph if runtime == FLOAT32 else in_int8(graph))
            sessions[runtime] = _session(place / GRAPH)
        arrays = {f"past.{i}": x.numpy() for i, x in enumerate(past)}

        def run_by(session: Any) -> Call:
            outputs = [each.name for each in session.get_outputs()]
            return lambda: session.run(outputs, {"tokens": token.numpy(), **arrays})[0][0, -1]

        self.calls = {
            TORCH: torch.inference_mode()(lambda: step(token, past)[0][0, -1]),
            **{runtime: run_by(each) for runtime, each in sessions.items()},
        }
        self.state_bytes = dict.fromkeys(RUNTIMES, sum(x.nbytes for x in past))
        self.files = {
            TORCH: folder / "torch" / "model.safetensors",
            FLOAT32: folder / "float32" / GRAPH,
            INT8: folder / "int8" / GRAPH,
        }
        self.code = {TORCH: START_GPT2_TORCH, FLOAT32: START_GPT2, INT8: START_GPT2}


class Gpt2Step(nn.Module):
    """GPT-2's next token on top of a KV cache, as a function of tensors.

    Args:
        model: of Hugging Face.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, past: list[Tensor]) -> tuple[Tensor, ...]:
        """Logits after the tokens, and keys and values of each layer with theirs."""
        cache = DynamicCache(config=self.model.config)
        for i in range(0, len(past), 2):
            cache.update(past[i], past[i + 1], i // 2)
        output = self.model(input_ids=tokens, past_key_values=cache, use_cache=True)
        layers: list[Any] = list(cache.layers)
        return (output.logits, *(x for layer in layers for x in (layer.keys, layer.values)))


def trace_gpt2(step: Gpt2Step, token: Tensor, past: list[Tensor]) -> Any:
    """The step as an `onnx.ModelProto`, the length of the cache being free."""
    names = [f"past.{i}" for i in range(len(past))]
    free = torch.export.Dim.DYNAMIC
    with torch.no_grad(), quiet():
        program = torch.onnx.export(
            step,
            (token, past),
            input_names=["tokens", *names],
            output_names=["logits", *(f"next.{name}" for name in names)],
            dynamic_shapes=({}, [{2: free} for _ in past]),
            dynamo=True,
            verbose=False,
        )
    assert program is not None
    model = program.model_proto
    del model.graph.value_info[:]
    fold_transposes(model)
    return model


def _session(path: Path) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def _error(made: _Made, runtime: str) -> float:
    expected, found = (np.asarray(made.calls[each]()) for each in (TORCH, runtime))
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def _started(code: str, folder: str) -> tuple[float, int]:
    command = [sys.executable, "-c", code + TELL, folder]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise LeapError(f"a start failed ({done.stderr.strip().splitlines()[-1]})")
    found = json.loads(done.stdout.splitlines()[-1])
    return found["seconds"], found["bytes"]


TELL = """
import json, re, time
from pathlib import Path
seconds, status = time.process_time(), Path("/proc/self/status")
most = re.search(r"VmHWM:\\s+(\\d+)", status.read_text())[1] if status.exists() else 0
print(json.dumps({"seconds": seconds, "bytes": 1024 * int(most)}))
"""
"""Memory is 0 on systems that do not tell; what getrusage tells begins with that of the parent."""
START_OURS_TORCH = """
import sys, torch
torch.set_num_threads(1)
from transformers import AutoModelForCausalLM
import leap
with torch.inference_mode():
    AutoModelForCausalLM.from_pretrained(sys.argv[1])(torch.tensor([[1]]), use_cache=True)
"""
START_OURS = """
import sys
import numpy as np
from leap.runtime import Writer
writer = Writer(sys.argv[1])
writer.logits(np.array([[1]]), writer.empty())
"""
START_GPT2_TORCH = """
import sys, torch
torch.set_num_threads(1)
from transformers import GPT2LMHeadModel
with torch.inference_mode():
    GPT2LMHeadModel.from_pretrained(sys.argv[1])(torch.tensor([[1]]), use_cache=True)
"""
START_GPT2 = """
import sys
import numpy as np, onnxruntime
options = onnxruntime.SessionOptions()
options.intra_op_num_threads = options.inter_op_num_threads = 1
session = onnxruntime.InferenceSession(f"{sys.argv[1]}/step.onnx", options)
past = {
    each.name: np.zeros([1, each.shape[1], 0, each.shape[3]], np.float32)
    for each in session.get_inputs()
    if each.name != "tokens"
}
session.run(["logits"], {"tokens": np.array([[1]]), **past})
"""
