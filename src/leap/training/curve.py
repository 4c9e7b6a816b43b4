"""Learning curves as a picture."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f", "#000000")


def plot_curves(
    histories: Mapping[str, Sequence[Mapping[str, Any]]], path: Path, title: str
) -> None:
    """Draw what each run's loss did over its steps: thin for training, dots for held-out text.

    Args:
        histories: points of each run, as `Fitted.history` has them, by the run's name.
        path: the PNG file to write.
        title: what was trained.
    """
    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axes = figure.subplots()
    for i, (name, history) in enumerate(histories.items()):
        colour = COLOURS[i % len(COLOURS)]
        trained = [(row["step"], row["loss"]) for row in history if "loss" in row]
        held_out = [(row["step"], row["eval_loss"]) for row in history if "eval_loss" in row]
        if trained:
            axes.plot(*zip(*trained, strict=True), color=colour, linewidth=0.7, alpha=0.45)
        if held_out:
            axes.plot(
                *zip(*held_out, strict=True), color=colour, marker="o", markersize=4, label=name
            )
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats a token): thin on training text, dotted on held-out text")
    axes.set_title(title, fontsize=11)
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
