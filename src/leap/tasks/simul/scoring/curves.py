"""Quality against latency, as a picture."""

import re
from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from leap.tasks.simul.streaming.policies import Offline
from leap.training.curve import COLOURS, LINES

Point = tuple[float, float]
"""LAAL and BLEU."""


def plot_quality(
    lines: Mapping[str, Mapping[str, Point]], unit: str, title: str, *, named: Sequence[str]
) -> Figure:
    """A line for each of several things that were evaluated, with a dot for each policy.

    Args:
        lines: the points of each by the policy's name.
        unit: of latency.
        title: what was evaluated.
        named: lines whose dots have their policy's name beside them.
    """
    figure = Figure(figsize=(8, 5.5), layout="constrained")
    axes = figure.subplots()
    for i, (label, points) in enumerate(lines.items()):
        axes.plot(
            *zip(*sorted(points.values()), strict=True),
            marker="o",
            label=label,
            color=COLOURS[i % len(COLOURS)],
            linestyle=LINES[i // len(COLOURS) % 2],
        )
        for name, point in points.items() if label in named else ():
            axes.annotate(name, point, xytext=(5, -12), textcoords="offset points", fontsize=8)
    if len(lines) > 1:
        axes.legend(frameon=False)
    axes.set_xlabel(f"latency: LAAL ({unit})")
    axes.set_ylabel("quality: BLEU")
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=11)
    return figure


def families(names: Sequence[str]) -> dict[str, list[str]]:
    """Names that are alike but for the policy's first number; offline is the end of wait-k."""
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(re.sub(r"-[\d.]+", "-*", name), []).append(name)
    for end in [name for name in names if name.startswith(Offline().name)]:
        reset = end.partition(" ")[2]
        waits = [
            members
            for family, members in found.items()
            if family.startswith("wait-") and family.partition(" ")[2] == reset
        ]
        for members in waits:
            members.append(end)
        if waits:
            del found[end]
    return found
