"""What tests of memory have in common: a model is trained once, and asked at each size."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from transformers import PreTrainedModel

from leap.errors import ConfigError
from leap.tasks.lm.compare import parse_model
from leap.tasks.lm.model import ModelConfig, SizeConfig, Vocabulary, build_model, max_length
from leap.training import RunFolder
from leap.training.folder import write_json, write_whole

IGNORED = -100


@dataclass(frozen=True)
class Remembered:
    """How well one model did."""

    model: str
    parameters: int
    accuracy: dict[int, float]
    """Share of right answers by size: the distance, or the number of pairs."""


@dataclass(frozen=True)
class Line:
    """A line of the picture."""

    label: str
    accuracy: Mapping[int, float]
    spread: Mapping[int, float] | None = None
    """Half the height of a bar at each point, by size as the accuracy is."""


def ask(
    folder: RunFolder,
    name: str,
    sizes: Sequence[int],
    train: Callable[[], PreTrainedModel],
    accuracy_at: Callable[[PreTrainedModel, int], float],
) -> Remembered:
    """How a model does at each size; what the folder has answers to is not asked again.

    Args:
        folder: of the model's run.
        name: of the model.
        sizes: at which to ask it.
        train: gives the trained model; called only where an answer is missing.
        accuracy_at: share of right answers of a model at a size.
    """
    metrics = folder.metrics({"parameters": int, "accuracy": [float]}) or {"accuracy": {}}
    accuracy = {int(size): share for size, share in metrics["accuracy"].items()}
    missing = [size for size in sizes if size not in accuracy]
    if missing:
        model = train()
        for size in missing:
            accuracy[size] = accuracy_at(model, size)
            metrics = asdict(Remembered(name, model.num_parameters(), accuracy))
            folder.write_metrics(metrics)
    return Remembered(name, metrics["parameters"], {size: accuracy[size] for size in sizes})


def build_unbounded(
    name: str, sizes: SizeConfig, vocabulary: Vocabulary, length: int
) -> PreTrainedModel:
    """A model by its short form, able to read texts of any length.

    Args:
        name: the short form, as `leap.tasks.lm.compare.parse_model` takes it.
        sizes: what the short form does not say.
        vocabulary: its tokens.
        length: of the sequences in training.
    """
    short = parse_model(name)
    given = {field.name: getattr(short, field.name) for field in fields(short)}
    common = {field.name: getattr(sizes, field.name) for field in fields(SizeConfig)}
    common = {key: value for key, value in common.items() if given[key] is None}
    try:
        model = build_model(ModelConfig(**given | common), vocabulary, length)
    except ConfigError as error:
        raise ConfigError(f"models: {name!r}: {error}") from error
    if max_length(model) is not None:
        raise ConfigError(
            f"models: {name} has learned positions, which end with the length of training; "
            "add :rotary, :alibi or :none"
        )
    return model


def write_results(output: Path, config: Any, rows: Sequence[Any], markdown: str) -> None:
    """Write results.json and results.md.

    Args:
        output: folder for them.
        config, rows: dataclasses: the settings, and what came out.
        markdown: the same as text.
    """
    results = {"config": asdict(config), "rows": [asdict(row) for row in rows]}
    write_json(output / "results.json", results)
    write_whole(output / "results.md", markdown)


def plot_accuracy(
    path: Path,
    panels: Mapping[str, Sequence[Line]],
    label: str,
    *,
    guessing: float,
    trained: int | None = None,
) -> None:
    """Draw accuracy against size, the panels beside each other.

    Args:
        path: the PNG file to write.
        panels: lines by the title of their panel.
        label: what the sizes are.
        guessing: the accuracy of chance.
        trained: largest size in training, to be marked.
    """
    figure = Figure(figsize=(2 + 5 * len(panels), 4), layout="constrained")
    for axes, (title, lines) in zip(
        figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True
    ):
        for line in lines:
            axes.errorbar(
                list(line.accuracy),
                list(line.accuracy.values()),
                None if line.spread is None else [line.spread[size] for size in line.accuracy],
                marker="o",
                capsize=3,
                label=line.label,
            )
        axes.axhline(guessing, color="grey", linestyle=":", label="guessing")
        if trained is not None:
            axes.axvline(trained, color="grey", linewidth=0.5)
        axes.set(xscale="log", xlabel=label, ylabel="right answers", ylim=(0, 1.05), title=title)
        sizes = sorted({size for line in lines for size in line.accuracy})
        axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
        axes.minorticks_off()
        axes.legend()
    figure.savefig(path, dpi=120)
