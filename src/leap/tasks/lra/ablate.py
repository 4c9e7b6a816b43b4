"""Does it matter how large the nets are that learn proportions, or that there are any?

    learned-0.5       nets of about 0.5 % of the model's parameters, shared by all heads
    learned-0.5-own   the same, with nets of each head's own
    fixed             proportions by position: cosFormer
    none              no proportions: linear attention

and of places that are travelled, where a net reads a token's step:

    travelled-0.5     a net of about 0.5 % in each layer, whose step all heads take
    travelled-0.5-own the same, with a step for each head
    constant          every step is 1, and only the clocks learn

All are trained in equal steps. Shares are of the parameters without embeddings, which are most of
these models and do not learn to attend.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Literal

import torch
from matplotlib.figure import Figure

from leap.errors import ConfigError
from leap.layers import LeapformerAttention, LearnedProportion
from leap.layers.equalise import Learned
from leap.layers.travel import Steps
from leap.models import LeapformerConfig, LeapformerForSequenceClassification
from leap.reports.files import write_report
from leap.reports.plots import Line, Panel, plot
from leap.reports.progress import Progress, Say, silent
from leap.reports.table import MIB, Table, csv_table, markdown, optional
from leap.tasks.files import reading_model
from leap.tasks.lra.data import TASKS, Collator, load_task
from leap.tasks.lra.model import encoder_config
from leap.tasks.lra.runs import Settings, Variant, make_batch
from leap.tasks.lra.train import train_variants
from leap.training import PeakBytes

OTHERS = {"fixed": "cosformer", "none": "linear"}
CONSTANT = "constant"
OWN = "-own"
LOOKED_AT = 8
"""Validation examples by whose tokens the spread of learned proportions is told."""


@dataclass(frozen=True, kw_only=True)
class AblateConfig(Settings):
    """Train LeaPformer with nets of several sizes, shared or per head, and without them.

    In equal steps, as leap lra train does it. Writes ablation.md, ablation.csv and ablation.png.
    What the nets cost in time and memory: leap lra overhead.
    """

    proportion: Literal["learned", "travelled"] = "learned"
    """What the nets learn: the paper's proportions, or the steps of travelled places."""
    sizes: tuple[float, ...] = (0.2, 0.5, 1.0, 1.5)
    """Sizes of the nets, in percent of the model's parameters without embeddings."""
    sharing: tuple[str, ...] = ("shared", "own")
    """Proportions or steps that all heads share, of each head's own, or both."""
    output: Path = Path("runs/lra-ablation")
    """Folder for the runs and the table; a run that is there is kept."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for size in self.sizes:
            if not 0 < size < 100:
                raise ConfigError(f"sizes={size} must be more than 0 and less than 100 percent")
        for sharing in self.sharing:
            if sharing not in ("shared", "own"):
                raise ConfigError(f"sharing={sharing!r} is not known; there are shared, own")


@dataclass(frozen=True, kw_only=True)
class Row:
    """What came out for one variant, over all its seeds."""

    name: str
    hidden: int | None
    """Hidden units of the nets; None where there are none."""
    added: int
    """Parameters of the nets."""
    share: float
    """The same as a share of the others, without embeddings."""
    accuracy: float
    spread: float | None
    """Standard deviation over seeds, if there are several."""
    seconds_per_step: float | None
    cpu_seconds_per_step: float | None
    peak_bytes: int | None
    proportion_spread: float | None
    """Standard deviation of the learned proportions or steps over the tokens of texts, the mean
    over seeds, layers, queries and keys. Near 0, the nets tell no token from another."""


def ablate(
    config: AblateConfig,
    progress: Progress = silent,
    peak_bytes: PeakBytes | None = None,
    say: Say | None = None,
) -> list[Row]:
    """Train each variant, or take up where that was stopped, and write the table."""
    found = variants(config, say)
    results = train_variants(config, found, progress, peak_bytes, say)
    if not results:
        return []  # Not the first of several processes.
    by_name: dict[str, list[dict[str, Any]]] = {}
    for metrics in results:
        by_name.setdefault(metrics["name"], []).append(metrics)
    rows = [_row(config, variant, by_name[variant.name]) for variant in found]
    files = {
        "ablation.md": markdown(describe(config, results[0]["steps"]), table(rows)),
        "ablation.csv": csv_table([asdict(row) for row in rows]),
        "ablation.png": draw(config, rows),
    }
    write_report(config.output / config.task, files)
    return rows


def variants(config: AblateConfig, say: Say | None = None) -> list[Variant]:
    """What is trained, the smallest nets first; two sizes that come to the same nets are one."""
    model = encoder_config(TASKS[config.task], "leapformer", proportion=config.proportion)
    found: dict[tuple[int, bool], Variant] = {}
    for own in (sharing == "own" for sharing in config.sharing):
        for size in config.sizes:
            hidden = hidden_units(model, size / 100, own=own)
            share = 100 * added_parameters(model, hidden, own=own) / _others(model)
            if not 1 / 2 <= share / size <= 2:
                raise ConfigError(
                    f"sizes={size:g}: the nearest nets have {share:.2g} % of the parameters"
                )
            name = f"{config.proportion}-{size:g}" + (OWN if own else "")
            changes = {
                "proportion": config.proportion,
                "proportion_hidden": hidden,
                "proportion_per_head": own,
            }
            made = Variant(name=name, attention="leapformer", changes=changes)
            kept = found.setdefault((hidden, own), made)
            if kept is not made and say is not None:
                say(f"{name} comes to the same nets as {kept.name}, and is left out")
    constant = {"proportion": "travelled", "constant_steps": True}
    travelled = [Variant(name=CONSTANT, attention="leapformer", changes=constant)]
    return [
        *found.values(),
        *(travelled if config.proportion == "travelled" else []),
        *(Variant(name=name, attention=other) for name, other in OTHERS.items()),
    ]


def hidden_units(config: LeapformerConfig, share: float, *, own: bool) -> int:
    """The hidden units with which the nets come nearest to a share of the other parameters."""
    without = _others(config)

    def distance(hidden: int) -> float:
        return abs(added_parameters(config, hidden, own=own) / without - share)

    head_width = config.hidden_size // config.n_head
    # Parameters rise with hidden units, and twice the width of a head is more than anyone asks for.
    return min(range(1, max(2 * head_width, 3)), key=distance)


def added_parameters(config: LeapformerConfig, hidden: int | None, *, own: bool) -> int:
    """Parameters of all nets of a model: one for queries and one for keys in each layer.

    Of steps one net in each layer, and its clocks; without hidden units, the clocks alone.
    """
    nets: Sequence[Learned] = []
    with torch.device("meta"):
        if config.proportion == "travelled":
            learned = hidden is not None
            width, n_head = config.hidden_size, config.n_head
            nets = [Steps(width, n_head, hidden=hidden, per_head=own, learned=learned)]
        elif hidden is not None:
            head_width, n_nets = config.hidden_size // config.n_head, config.n_head if own else None
            nets = 2 * [LearnedProportion(head_width, hidden=hidden, n_head=n_nets)]
    return config.n_layer * sum(p.numel() for net in nets for p in net.parameters())


def _others(config: LeapformerConfig) -> int:
    """Parameters of a model without nets and embeddings."""
    plain = LeapformerConfig(**config.to_dict() | {"attention": "linear"})
    return LeapformerForSequenceClassification(plain).num_parameters(exclude_embeddings=True)


def _row(config: AblateConfig, variant: Variant, runs: Sequence[dict[str, Any]]) -> Row:
    model = encoder_config(TASKS[config.task], variant.attention, **variant.changes)
    hidden = variant.changes.get("proportion_hidden")
    own = variant.changes.get("proportion_per_head", False)
    added = added_parameters(model, hidden, own=own) if variant.changes else 0
    accuracies = [run["accuracy"] for run in runs]
    folders = [
        config.output / config.task / variant.name / f"seed-{run['seed']}" / "model" for run in runs
    ]
    return Row(
        name=variant.name,
        hidden=hidden,
        added=added,
        share=added / _others(model),
        accuracy=fmean(accuracies),
        spread=stdev(accuracies) if len(runs) > 1 else None,
        seconds_per_step=runs[0]["seconds_per_step"],
        cpu_seconds_per_step=runs[0]["cpu_seconds_per_step"],
        peak_bytes=runs[0]["peak_bytes"],
        proportion_spread=(
            None
            if hidden is None
            else fmean(proportion_spread(config, folder) for folder in folders)
        ),
    )


@torch.no_grad()
def proportion_spread(config: AblateConfig, folder: Path) -> float:
    """How far the proportions or steps of a text's tokens lie apart, the mean over layers."""
    with reading_model(folder):
        model = LeapformerForSequenceClassification.from_pretrained(folder).eval()
    data = load_task(config.task, config.data, "valid")
    batch = make_batch(data, Collator(data.info), min(LOOKED_AT, len(data)))
    batch.pop("labels")
    spreads: list[float] = []

    def look(layer: LeapformerAttention, inputs: tuple[Any, ...], options: dict[str, Any]) -> None:
        x, real = inputs[0], options["key_mask"]
        if real is None:
            real = torch.ones(x.shape[:2], dtype=torch.bool)
        steps = layer.steps
        learned = layer.proportions(x, key_mask=real) if steps is None else [steps.lengths(x)]
        for p in learned:
            texts = [text[:, kept] for text, kept in zip(p, real, strict=True)]
            spreads.extend(float(text.std(dim=-1).mean()) for text in texts)

    for layer in model.modules():
        if isinstance(layer, LeapformerAttention):
            layer.register_forward_pre_hook(look, with_kwargs=True)
    model(**batch)
    return fmean(spreads)


COLUMNS = (
    "proportions",
    "hidden units",
    "parameters added",
    "share",
    "accuracy",
    "s per step",
    "CPU s per step",
    "peak MiB",
    "spread of proportions",
)


def table(rows: Sequence[Row], title: str = "") -> Table:
    """What came out. Accuracy is of the test set, in percent."""
    return Table(title, COLUMNS, [_cells(row) for row in rows])


def _cells(row: Row) -> list[str]:
    accuracy = f"{100 * row.accuracy:.2f}"
    return [
        row.name,
        optional(row.hidden, 0),
        optional(row.added, 0),
        f"{100 * row.share:.2f} %",
        accuracy if row.spread is None else f"{accuracy} ± {100 * row.spread:.2f}",
        optional(row.seconds_per_step, 2),
        optional(row.cpu_seconds_per_step, 2),
        optional(None if row.peak_bytes is None else row.peak_bytes / MIB, 0),
        optional(row.proportion_spread, 3),
    ]


def describe(config: AblateConfig, steps: int) -> str:
    """What was trained, in a line."""
    return (
        f"{config.task}: {steps} steps of {config.recipe(steps, 0)['batch']} examples, "
        f"seeds {', '.join(map(str, config.seeds))}"
    )


def draw(config: AblateConfig, rows: Sequence[Row]) -> Figure:
    """Accuracy against the size of the nets, and level lines for those without."""
    lines = []
    for kind, own in (("shared by heads", False), ("each head's own", True)):
        learned = [r for r in rows if r.hidden is not None and r.name.endswith(OWN) == own]
        points = [(100 * r.share, 100 * r.accuracy) for r in learned]
        spread = [100 * (r.spread or 0.0) for r in learned]
        lines.append(Line(f"{config.proportion}, {kind}", points, spread if any(spread) else None))
    panel = Panel(
        x="parameters of the nets, % of the others without embeddings",
        y="test accuracy, %",
        lines=lines,
        levels={_level(r.name): 100 * r.accuracy for r in rows if r.hidden is None},
    )
    return plot([panel], f"{config.task}: proportions by nets of several sizes")


def _level(name: str) -> str:
    return f"{name}: {OTHERS[name]}" if name in OTHERS else f"{name} steps"
