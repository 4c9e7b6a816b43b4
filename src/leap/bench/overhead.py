"""What learned proportions add to a training step, against the length of texts and the width.

An encoder of Long Range Arena's shape with its proportions learned, fixed by position (cosFormer)
or left out (linear attention), by turns in one run (see `leap.bench.run`). Fixed proportions need
all that learned ones do but the nets that learn them.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from matplotlib.figure import Figure

from leap.bench.lra import make_call
from leap.bench.report import Page, where
from leap.bench.run import Measured, Report, Steps, TurnsConfig, measure_by_turns, report_on
from leap.errors import ConfigError
from leap.models import LeapformerForSequenceClassification
from leap.reports.plots import Panel, lines_of, plot
from leap.reports.progress import Progress, silent
from leap.reports.table import MIB, Table, digits
from leap.tasks.lra.data import TASKS
from leap.tasks.lra.model import encoder_config

PROPORTIONS = {"learned": "leapformer", "fixed": "cosformer", "none": "linear"}
"""Attentions by what proportions they have."""
HEAD_WIDTH = 32


@dataclass(frozen=True, kw_only=True)
class OverheadConfig(TurnsConfig):
    """Measure what learned proportions add to a training step: time, memory and parameters.

    Encoders of 2 layers with heads of 32, beside the same with fixed proportions and with none.
    Prints a table; writes results.json, results.md and overhead.png.
    """

    lengths: tuple[int, ...] = (512, 1024, 2048, 4096, 8192)
    """Tokens of a text."""
    widths: tuple[int, ...] = (64, 128, 256, 512)
    """Widths of the model, multiples of 32."""
    hidden: int = 16
    """Hidden units of the nets that learn proportions."""
    batch: int = 1
    """Texts at once."""
    budget: float = 5.0
    """Seconds to spend on the turns of one model; there is always one turn."""
    output: Path = Path("runs/lra-overhead")
    """Folder to write the results to."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_at_least_one("lengths", "widths", "hidden", "batch")
        if not self.lengths or not self.widths:
            raise ConfigError("nothing to measure: give at least one length and one width")
        for width in self.widths:
            if width % HEAD_WIDTH:
                raise ConfigError(f"widths={width} does not divide into heads of {HEAD_WIDTH}")


@dataclass(frozen=True, kw_only=True)
class Cost(Measured):
    """What a training step took with one kind of proportions."""

    proportions: str
    length: int
    width: int
    parameters: int
    """All but the embeddings, which depend on length and vocabulary."""


OverheadReport = Report[OverheadConfig, Cost]


def measure(config: OverheadConfig, progress: Progress = silent) -> OverheadReport:
    """Measure each kind of proportions at each length and width."""
    return report_on(config, _costs(config, progress))


def _costs(config: OverheadConfig, progress: Progress) -> Iterator[Cost]:
    total = 2 * len(PROPORTIONS) * len(config.lengths) * len(config.widths)
    steps = Steps(progress, total)
    for width in sorted(set(config.widths)):
        for length in sorted(set(config.lengths)):
            yield from _measure_at(config, length, width, steps)


def _measure_at(config: OverheadConfig, length: int, width: int, steps: Steps) -> Iterator[Cost]:
    device = config.chosen_device()
    info = replace(TASKS["text"], max_length=length)
    models = {}
    for kind, attention in PROPORTIONS.items():
        torch.manual_seed(config.seed)
        shape = encoder_config(
            info,
            attention,
            hidden_size=width,
            n_head=width // HEAD_WIDTH,
            intermediate_size=2 * width,
            classifier_size=2 * width,
            proportion_hidden=config.hidden,
        )
        models[kind] = LeapformerForSequenceClassification(shape).to(device)  # type: ignore[arg-type]
    ids = torch.randint(info.vocab_size, (config.batch, length), device=device)
    inputs = {"input_ids": ids, "labels": torch.zeros(config.batch, device=device).long()}
    calls = {kind: make_call(model, "training step", inputs) for kind, model in models.items()}
    doing = f"width {width}, {length} tokens"
    for kind, measured in measure_by_turns(calls, steps, doing, config).items():
        yield Cost(
            proportions=kind,
            length=length,
            width=width,
            parameters=models[kind].num_parameters(exclude_embeddings=True),
            **vars(measured),
        )


def page(report: OverheadReport) -> Page:
    """The table, the plot and the sentence that go with the report."""
    about = (
        f"Training steps of {report.config.batch} text{'s' * (report.config.batch > 1)}; nets of "
        f"{report.config.hidden} hidden units, parameters without embeddings; "
        f"{where(report.machine)}."
    )
    return Page("overhead", report, about, [table(report)], draw(report))


def table(report: OverheadReport) -> Table:
    """A row for each width and length."""
    columns = ["width", "tokens"]
    columns += ["ms learned", "over fixed", "over none"]
    columns += ["MiB learned", "over fixed", "over none"]
    columns += ["parameters", "over none"]
    rows = []
    for cost, others in _learned(report):
        row = [str(cost.width), str(cost.length), digits(1e3 * cost.seconds)]
        row += [_added(cost.seconds, other.seconds) for other in others]
        row.append(digits(cost.peak_bytes / MIB))
        row += [_added(cost.peak_bytes, other.peak_bytes) for other in others]
        row += [f"{cost.parameters:,}", _added(cost.parameters, others[1].parameters, 2)]
        rows.append(row)
    return Table("what learned proportions cost in training, and add to the others", columns, rows)


def _learned(report: OverheadReport) -> list[tuple[Cost, list[Cost]]]:
    """Each cost of learned proportions, with those of fixed ones and of none."""
    found = {(c.proportions, c.width, c.length): c for c in report.results}
    return [
        (cost, [found[kind, cost.width, cost.length] for kind in ("fixed", "none")])
        for cost in report.results
        if cost.proportions == "learned"
    ]


def _added(ours: float | int, theirs: float | int, n_digits: int = 0) -> str:
    return f"{100 * (ours / theirs - 1):+.{n_digits}f} %"


def draw(report: OverheadReport) -> Figure:
    """What learned proportions add to fixed ones, against the length, a line for each width."""
    panels = [
        Panel(
            x="tokens",
            y=label,
            lines=lines_of(
                {
                    (f"width {ours.width}", ours.length): 100 * (vars(ours)[x] / vars(other)[x] - 1)
                    for ours, (other, _) in _learned(report)
                }
            ),
            x_scale="sizes",
        )
        for label, x in (
            ("added time, % of a step with fixed proportions", "seconds"),
            ("added peak memory, %", "peak_bytes"),
        )
    ]
    return plot(panels, f"What learned proportions add to fixed ones\n{where(report.machine)}")
