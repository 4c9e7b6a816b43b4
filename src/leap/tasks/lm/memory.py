"""What tests of memory have in common: a model is trained once, and asked at each size."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from leap.errors import ConfigError
from leap.reports.files import write_report
from leap.reports.plots import Line, Panel, plot
from leap.tasks.lm.compare import parse_model
from leap.tasks.lm.model import ModelConfig, SizeConfig, Vocabulary, build_model, max_length
from leap.training import RunFolder

IGNORED = -100


@dataclass(frozen=True)
class Remembered:
    """How well one model did."""

    model: str
    parameters: int
    accuracy: dict[int, float]
    """Share of right answers by size: the distance, or the number of pairs."""


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


def write_results(
    output: Path,
    config: Any,
    rows: Sequence[Any],
    text: str,
    panels: Mapping[str, Sequence[Line]],
    *,
    name: str,
    title: str,
    sizes: str,
    guessing: float,
    trained: int,
) -> None:
    """Write results.json, results.md, and accuracy against size as a picture.

    Args:
        output: folder for them.
        config, rows: dataclasses: the settings, and what came out.
        text: the same in Markdown.
        panels: the lines of the picture by the title of their panel.
        name, title: of the picture.
        sizes: what they are.
        guessing: the accuracy of chance.
        trained: largest size in training, to be marked.
    """
    figure = plot(
        [
            Panel(
                x=sizes,
                y="right answers",
                lines=lines,
                title=title,
                x_scale="sizes",
                y_limits=(0, 1.05),
                levels={"guessing": guessing},
                upright={f"longest in training, {trained:,}": trained},
            )
            for title, lines in panels.items()
        ],
        title,
    )
    results = {"config": asdict(config), "rows": [asdict(row) for row in rows]}
    files = {"results.json": results, "results.md": text, f"{name}.png": figure}
    write_report(output, files)
