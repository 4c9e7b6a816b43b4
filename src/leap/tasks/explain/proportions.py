"""What the learned parts of a trained model read off a text: a picture and a table.

For a language model, a classifier (Long Range Arena, or of texts) or a translation model.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from leap.errors import ConfigError, FileError, refuse_given
from leap.explain.places import Places, places, places_table, where
from leap.reports.files import read_json, write_report
from leap.reports.plots import GREY, PALETTE
from leap.reports.table import Table, markdown, optional
from leap.runtime.text import check_prompt
from leap.tasks.explain.runs import Run, first_example, open_run

SENTENCE = (
    "The ship was built in 1908 for the harbour of Bremen. She sank in a storm ten years later, "
    "and was raised again the year after. Her bell hangs in the town hall today."
)
MOST_LABELS = 60
"""Tokens that a picture has room to name."""


@dataclass(frozen=True, kw_only=True)
class ProportionsConfig:
    """Show where tokens stand: places, steps, half-lives of gates and LEAP's focus, by layer."""

    run: Path
    """Run folder of leap lm train, leap lra train or leap simul train."""
    text: str | None = None
    """The text to read; by default some sentences, or a test example of Long Range Arena."""
    quiet: int = 0
    """Repeat the token in the middle so often: what becomes of places in a long quiet stretch."""
    data: Path | None = None
    """Folder of prepared tasks of Long Range Arena; by default data/lra."""
    output: Path = Path("runs/explain/proportions")
    """Folder for proportions.png, proportions.csv, results.md and results.json."""

    def __post_init__(self) -> None:
        if self.text is not None:
            check_prompt(self.text)
        if self.text == "" or self.quiet < 0:
            raise ConfigError(
                f"text={self.text!r} and quiet={self.quiet}: give a text, and 0 or more"
            )


def proportions(config: ProportionsConfig) -> list[Places]:
    """Read as the config says, and write the picture, the table and the numbers."""
    write_report(config.output, {})
    run = open_run(config.run)
    inputs, pieces, written = _read(run, config)
    found = places(run.model, **inputs)
    if all(each.spread() is None and each.half_life is None for each in found):
        raise FileError(
            f"{config.run} has no proportions, gates or focus to show; give a run of leapformer, "
            "leap, or any attention with gates"
        )
    moved = spreads(config.run)
    files = {
        "proportions.png": picture(found, pieces, moved, run.name, written),
        "proportions.csv": places_table(found).to_csv(index=False),
        "results.md": markdown(table(found), "![places](proportions.png)"),
        "results.json": {
            "pieces": pieces,
            **({"written": written} if written else {}),
            "layers": [_summary(each) for each in found],
        },
    }
    write_report(config.output, files)
    return found


def _read(run: Run, config: ProportionsConfig) -> tuple[dict[str, Tensor], list[str], list[str]]:
    """What the model is given, and the text of its tokens: those read, and those written."""
    reads_text = run.kind != "classifier" or run.tokenizer is not None or run.task == "text"
    if config.text is None and not reads_text:
        ids = first_example(run, config.data)
    else:
        ids = run.encode(SENTENCE if config.text is None else config.text)
        refuse_given(config, ("data",), "of test examples of Long Range Arena, and a text is read")
    middle = ids.shape[1] // 2
    ids = torch.cat([ids[:, :middle], ids[:, middle : middle + 1].expand(-1, config.quiet),
                     ids[:, middle:]], dim=1)  # fmt: skip
    if run.kind == "classifier":
        ids = ids[:, : run.longest]
    pieces = run.spell(ids)
    if run.kind != "translation":
        return {"input_ids": ids}, pieces, []
    model: Any = run.model
    made = model.generate(ids)
    return {"input_ids": ids, "labels": made[:, 1:]}, pieces, run.spell(made[:, :-1])


def spreads(path: Path) -> dict[str, list[tuple[int, float]]]:
    """How much each part differed between tokens as the run went on, by layer and part."""
    metrics = path / "metrics.json"
    found: dict[str, list[tuple[int, float]]] = {}
    for row in read_json(metrics).get("history", ()) if metrics.exists() else ():
        for name, value in row.get("spread", {}).items():
            part = name.rpartition(".")[2].removesuffix("attention").strip("_") or "focus"
            found.setdefault(f"{where(name)} {part}", []).append((row["step"], value))
    return found


def table(found: Sequence[Places]) -> Table:
    """A row per layer: how much its parts differ, follow the position, and last."""
    rows = []
    for each in found:
        summary = _summary(each)
        rows.append(
            [
                each.name,
                each.kind,
                optional(summary["spread"], 4) or "-",
                optional(summary["follows_position"], 2) or "-",
                optional(summary["half_life"], 1) or "-",
            ]
        )
    columns = ["layer", "kind", "spread over tokens", "correlation with position", "half-life"]
    return Table("", columns, rows)


def _summary(each: Places) -> dict[str, Any]:
    def mean(x: Tensor | None) -> float | None:
        return None if x is None else float(x.mean())

    return {
        "layer": each.name,
        "kind": each.kind,
        "spread": mean(each.spread()),
        "follows_position": mean(each.follows_position()),
        "half_life": None if each.half_life is None else float(each.half_life.median()),
    }


def picture(
    found: Sequence[Places],
    pieces: Sequence[str],
    moved: dict[str, list[tuple[int, float]]],
    title: str,
    written: Sequence[str] = (),
) -> Figure:
    """A row per layer: what is read off each token, and what scores are multiplied by."""
    shown = [each for each in found if each.spread() is not None or each.half_life is not None]
    n = len(shown) + bool(moved)
    figure = Figure(figsize=(14, 2.6 * n + 0.6), layout="constrained")
    grid = figure.subplots(n, 3, squeeze=False, width_ratios=(2, 1, 1))
    for (left, middle, right), each in zip(grid, shown, strict=False):
        writes = each.name.startswith("decoder") and not each.name.endswith("cross")
        _draw_tokens(left, each, written if writes else pieces)
        _draw_places(middle, each)
        _draw_map(right, each)
    if moved:
        for axes in grid[-1][1:]:
            axes.set_axis_off()
        axes = grid[-1][0]
        for i, (name, points) in enumerate(moved.items()):
            axes.plot(*zip(*points, strict=True), label=name, color=PALETTE[i % len(PALETTE)])
        axes.set_title("in training: standard deviation over tokens", fontsize=9)
        axes.set_xlabel("step", fontsize=8)
        axes.legend(fontsize=6, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.suptitle(title, fontsize=11)
    return figure


def _draw_tokens(axes: Axes, each: Places, pieces: Sequence[str]) -> None:
    """What is read off each token, a line per head."""
    read, what = (
        (each.steps, "step")
        if each.steps is not None
        else (each.key, "place of keys")
        if each.key is not None
        else (each.focus, "focus")
    )
    if read is None:
        axes.set_axis_off()
        return
    _heads(axes, read)
    axes.set_title(f"{each.name}, {each.kind}: {what}", fontsize=9)
    if read.shape[1] == len(pieces) <= MOST_LABELS:
        labels = [repr(piece)[1:-1].replace("$", r"\$") for piece in pieces]
        axes.set_xticks(range(len(pieces)), labels, rotation=90, fontsize=5)


def _draw_places(axes: Axes, each: Places) -> None:
    """Half-lives of gates; where there are none, places, of queries if keys have other ones."""
    if each.half_life is not None:
        _heads(axes, each.half_life)
        axes.set_yscale("log")
        axes.set_title("half-life of gates (tokens)", fontsize=9)
    elif each.steps is not None and each.key is not None:
        _heads(axes, each.key)
        axes.set_title("places", fontsize=9)
    elif each.query is not None:
        _heads(axes, each.query)
        axes.set_title("place of queries", fontsize=9)
    else:
        axes.set_axis_off()


def _draw_map(axes: Axes, each: Places) -> None:
    """What scores are multiplied by, mean of the heads."""
    if each.query is None or each.key is None:
        axes.set_axis_off()
        return
    shades = each.concentration().mean(dim=0).numpy()
    axes.imshow(shades, cmap="Oranges", aspect="auto", vmin=0, vmax=1)
    axes.set_title("concentration (query, key)", fontsize=9)


def _heads(axes: Axes, read: Tensor) -> None:
    for h, line in enumerate(read.tolist()):
        axes.plot(line, linewidth=0.9, color=PALETTE[h % len(PALETTE)])
    axes.tick_params(labelsize=7, colors=GREY)
