"""Quality against latency, as a picture."""

import re
from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from leap.reports.plots import Line, Panel, plot
from leap.runtime.streaming.policies import Offline

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
    drawn = [
        Line(
            label,
            sorted(points.values()),
            names=sorted(points, key=lambda name: points[name]) if label in named else (),
        )
        for label, points in lines.items()
    ]
    panel = Panel(x=f"latency: LAAL ({unit})", y="quality: BLEU", lines=drawn)
    return plot([panel], title)


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
