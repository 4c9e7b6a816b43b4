"""Draw the picture of the README from recorded figures: the cost of a token and of training.

    python benchmarks/readme/draw.py

Left, from `benchmarks/decode`: CPU time per token against the tokens read before. Right, from
`benchmarks/attention`: speed-up over `scaled_dot_product_attention`, forward and backward.
"""

import json
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

HERE = Path(__file__).parent
LABELS = {"leapformer": "LeaPformer", "leap": "LEAP", "gpt2": "GPT-2, KV cache", "softmax": "SDPA"}
COLOURS = {"leapformer": "#2a6db0", "leap": "#c1631b", "gpt2": "#666666", "softmax": "#666666"}


def main(picture: Path = HERE / "cost.png") -> None:
    """Draw it."""
    figure = Figure(figsize=(10, 3.6), dpi=150, layout="constrained")
    left, right = figure.subplots(1, 2)
    tokens = recorded("decode")
    for name in ("gpt2", "leap", "leapformer"):
        rows = [row for row in tokens if row["model"] == name]
        line(left, name, [(row["context"], 1000 * row["seconds"]) for row in rows])
    left.set(title="one more token, ms of CPU time", xlabel="tokens read before", ylim=(1, 200))

    passes = [row for row in recorded("attention") if row["passes"] == "forward+backward"]
    for name in ("softmax", "leap", "leapformer"):
        rows = [row for row in passes if row["mechanism"] == name]
        line(right, name, [(row["length"], row["speed"]) for row in rows])
    right.set(
        title="forward and backward, speed-up over SDPA",
        xlabel="tokens of the sequence",
        ylim=(0.4, 400),
    )
    figure.savefig(picture)


def recorded(folder: str) -> list[dict[str, Any]]:
    """The rows of a benchmark's results."""
    rows: list[dict[str, Any]] = json.loads((HERE.parent / folder / "results.json").read_text())[
        "results"
    ]
    return rows


def line(axes: Axes, name: str, points: list[tuple[float, float]]) -> None:
    """One model's line, named where it ends."""
    x, y = zip(*sorted(points), strict=True)
    axes.loglog(x, y, "o-", color=COLOURS[name], markersize=4)
    flat_and_lowest = name == "leapformer" and y[-1] < 2 * y[0]  # Where LEAP's name is above it.
    axes.annotate(
        LABELS[name],
        (x[-1], y[-1]),
        xytext=(0, -11) if flat_and_lowest else (-6, 7),
        textcoords="offset points",
        color=COLOURS[name],
        ha="right",
        va="center",
    )
    axes.set_xticks(x, [f"{each:,.0f}" for each in x], fontsize=8)
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    main()
