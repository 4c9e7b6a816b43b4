"""Learning curves as a picture."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f", "#000000")
LINES = ("-", "--")

History = Sequence[Mapping[str, Any]]


def plot_curves(
    histories: Mapping[str, History],
    path: Path,
    title: str,
    *,
    unit: str = "nats a token",
    measure: str | None = None,
) -> None:
    """Draw what each run's loss did over its steps: thin for training, dots for held-out data.

    Args:
        histories: points of each run, as `Fitted.history` has them, by the run's name.
        path: the PNG file to write.
        title: what was trained.
        unit: of the loss.
        measure: name of what the best checkpoint was chosen by, to be drawn as well.
    """
    n_panels = 1 if measure is None else 2
    figure = Figure(figsize=(9 if measure is None else 14, 5.5), layout="constrained")
    panels = figure.subplots(1, n_panels, squeeze=False)[0]
    for i, (name, history) in enumerate(histories.items()):
        style = {"color": COLOURS[i % len(COLOURS)], "linestyle": LINES[i // len(COLOURS) % 2]}
        trained = _points(history, "loss")
        if trained:
            panels[0].plot(*zip(*trained, strict=True), linewidth=0.7, alpha=0.45, **style)
        for panel, kind in zip(panels, ("eval_loss", f"eval_{measure}"), strict=False):
            held_out = _points(history, kind)
            if held_out:
                panel.plot(
                    *zip(*held_out, strict=True), marker="o", markersize=4, label=name, **style
                )
    _finish(panels[0], f"loss ({unit}): thin in training, dotted on held-out data")
    if measure is not None:
        _finish(panels[1], f"{measure} on held-out data")
    figure.suptitle(title, fontsize=11)
    figure.savefig(path, dpi=150)


def _points(history: History, name: str) -> list[tuple[int, float]]:
    return [(row["step"], row[name]) for row in history if name in row]


def _finish(axes: Axes, label: str) -> None:
    axes.set_xlabel("step")
    axes.set_ylabel(label)
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False)
