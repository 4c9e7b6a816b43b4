"""What a training step of a language model costs: time, memory, and tokens per second.

Our models next to Hugging Face's GPT-2 of the same sizes, with torch's scaled_dot_product_attention
and without dropout, all with random weights and tokens. A step is the forward with the loss, the
backward, and AdamW's update, fused. Peak memory is on top of weights, gradients and the optimiser's
state, which stay.

All models are measured in one run, by turns (see `leap.bench.run`).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor
from transformers import AutoModelForCausalLM, GPT2LMHeadModel

from leap.bench.decode import GPT2, gpt2_of_sizes
from leap.bench.lra import training_step
from leap.bench.report import Page, where
from leap.bench.run import Measured, Report, Steps, TurnsConfig, measure_by_turns, report_on
from leap.errors import ConfigError, LeapError
from leap.models import LeapformerConfig, preset, usable_as
from leap.reports.plots import Panel, lines_of, plot
from leap.reports.progress import Progress, silent
from leap.reports.table import MIB, Table, tabulate, times

N_TOKENS_CHECKED = 150  # Past two chunks of 64.
LARGEST_ERROR = 1e-5  # Of a loss of about 10, in float32.


@dataclass(frozen=True, kw_only=True)
class TrainBenchConfig(TurnsConfig):
    """Measure the time and memory of a training step of language models, beside GPT-2.

    Each model's loss is first compared with the cross-entropy of its logits. Prints tables; writes
    results.json, results.md and train.png.
    """

    lengths: tuple[int, ...] = (512, 2048)
    """Tokens per text."""
    batch: int = 2
    """Texts per step."""
    models: tuple[str, ...] = ("leapformer", "linear", "leap", GPT2)
    """Models to measure: gpt2, or ours by the name of their attention. LEAP's has windows."""
    preset: str = "small"
    """Sizes of all models: tiny, small, 140m, 247m or 350m."""
    repeats: int = 5
    """Repetitions of each measurement, interleaved, of which the fastest counts."""
    output: Path = Path("runs/bench-train")
    """Folder to write the results to."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_at_least_one("lengths", "batch")
        known = (*usable_as("causal"), GPT2)
        if not self.lengths or not self.models:
            raise ConfigError("nothing to measure: give at least one length and one model")
        for name in self.models:
            if name not in known:
                raise ConfigError(f"no model is called {name!r}; there are {', '.join(known)}")
        self.sizes()

    def sizes(self, **changes: Any) -> LeapformerConfig:
        """The preset, without dropout and with a whole softmax, which GPT-2 has as well."""
        return preset(
            self.preset,
            n_positions=max(*self.lengths, N_TOKENS_CHECKED),
            adaptive_cutoffs=None,
            hidden_dropout_prob=0.0,
            **changes,
        )


@dataclass(frozen=True, kw_only=True)
class TrainResult(Measured):
    """What a training step of one model took at one length."""

    model: str
    length: int
    tokens_per_second: float


TrainReport = Report[TrainBenchConfig, TrainResult]


def measure(config: TrainBenchConfig, progress: Progress = silent) -> TrainReport:
    """Compare each model's loss with that of its logits, then measure them all."""
    return report_on(config, _results(config, progress))


def _results(config: TrainBenchConfig, progress: Progress) -> Iterator[TrainResult]:
    names, lengths = list(dict.fromkeys(config.models)), sorted(set(config.lengths))
    steps = Steps(progress, total=len(names) * (1 + 2 * len(lengths)))
    models = {name: _model(name, config) for name in names}
    for name, model in models.items():
        steps.begin(f"checking {name}")
        check_loss(name, model, _tokens(config, N_TOKENS_CHECKED))
        steps.end()
    for length in lengths:
        ids = _tokens(config, length)
        inputs = {"input_ids": ids, "labels": ids}
        calls = {name: training_step(model, inputs) for name, model in models.items()}
        for name, took in measure_by_turns(calls, steps, f"{length} tokens", config).items():
            speed = ids.numel() / took.seconds
            yield TrainResult(model=name, length=length, tokens_per_second=speed, **vars(took))


def _model(name: str, config: TrainBenchConfig) -> Any:
    torch.manual_seed(config.seed)
    model: Any
    if name == GPT2:
        no_dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        model = GPT2LMHeadModel(gpt2_of_sizes(config.sizes(), **no_dropout))  # type: ignore[no-untyped-call]
    else:
        model = AutoModelForCausalLM.from_config(config.sizes(attention=name))  # type: ignore[no-untyped-call]
    return model.to(config.chosen_device())


def _tokens(config: TrainBenchConfig, n: int) -> Tensor:
    random = torch.Generator().manual_seed(config.seed)
    drawn = torch.randint(config.sizes().vocab_size, (config.batch, n), generator=random)
    return drawn.to(config.chosen_device())


@torch.no_grad()
def check_loss(name: str, model: Any, ids: Tensor) -> None:
    """Raise an error unless the loss is the cross-entropy of the logits.

    A fast wrong answer is worth no measurement.
    """
    model.eval()
    loss, logits = model(input_ids=ids, labels=ids).loss, model(input_ids=ids).logits
    expected = F.cross_entropy(logits[:, :-1].flatten(0, 1).double(), ids[:, 1:].flatten())
    error = abs(float(loss) / float(expected) - 1)
    if not error <= LARGEST_ERROR:
        raise LeapError(
            f"{name} has a loss of {float(loss):.6f} where the cross-entropy of its logits is "
            f"{float(expected):.6f}; its speed was not measured"
        )


def page(report: TrainReport) -> Page:
    """The tables, the plot and the sentence that go with the report."""
    return Page("train", report, describe(report), tables(report), draw(report))


def tables(report: TrainReport) -> list[Table]:
    """Time of a step, how it compares with GPT-2, tokens per second, and memory."""
    results = {(r.model, r.length): r for r in report.results}
    found = [tabulate(f"milliseconds of {report.machine['clock']} per step", milliseconds(report))]
    speeds = {
        (name, length): results[GPT2, length].seconds / r.seconds
        for (name, length), r in results.items()
        if name != GPT2 and (GPT2, length) in results
    }
    if speeds:
        found.append(tabulate("speed-up over GPT-2", speeds, times))
    return [
        *found,
        tabulate("tokens per second", {case: r.tokens_per_second for case, r in results.items()}),
        tabulate(
            "peak memory besides weights, gradients and optimiser, MiB",
            {case: r.peak_bytes / MIB for case, r in results.items()},
        ),
    ]


def milliseconds(report: TrainReport) -> dict[tuple[str, int], float]:
    """Time of a step, by model and length."""
    return {(r.model, r.length): 1e3 * r.seconds for r in report.results}


def describe(report: TrainReport) -> str:
    """One sentence on the settings and the machine."""
    sizes, batch = report.config.sizes(), report.config.batch
    return (
        f"{sizes.n_layer} layers of width {sizes.hidden_size}, {sizes.n_head} heads, "
        f"{sizes.vocab_size} tokens in the vocabulary, batch {batch}, float32, no dropout, AdamW; "
        f"{where(report.machine)}, transformers {report.machine['transformers']}."
    )


def draw(report: TrainReport) -> Figure:
    """Time of a step against length, log-log: a straight line's slope is its growth."""
    panel = Panel(
        x="length (tokens)",
        y=f"{report.machine['clock']} per step (ms)",
        lines=lines_of(milliseconds(report)),
        x_scale="sizes",
        y_scale="log",
    )
    return plot([panel], f"A training step against length\n{where(report.machine)}")
