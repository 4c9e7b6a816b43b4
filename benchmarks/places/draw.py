"""Draw what a language model's steps, places and gates are on a text.

    python benchmarks/places/draw.py RUN PICTURE [TEXT]

RUN is a folder of `leap lm train --proportion travelled`, TEXT a file; by default some sentences.
"""

import sys
from pathlib import Path

import torch
from matplotlib.figure import Figure

from leap.layers import LeapformerAttention
from leap.tasks.lm.model import load_model

TEXT = (
    "The ship was built in 1908 for the harbour of Bremen . She sank in a storm ten years later , "
    "and was raised again the year after . Her bell hangs in the town hall today ."
)


@torch.no_grad()
def look(run: Path, text: str) -> tuple[list[str], list[LeapformerAttention], list[torch.Tensor]]:
    """Tokens, the layers that travel, and what each of them is given."""
    model, tokenizer = load_model(run)
    ids = tokenizer.encode_documents([text])[:-1].long()
    layers = [m for m in model.modules() if isinstance(m, LeapformerAttention) and m.steps]
    given: list[torch.Tensor] = []
    for layer in layers:
        layer.register_forward_pre_hook(lambda _, inputs: given.append(inputs[0]))
    model(input_ids=ids[None])
    tokens = [tokenizer.decode([i]).strip() or "_" for i in ids.tolist()]
    return tokens, layers, given


@torch.no_grad()
def draw(run: Path, picture: Path, text: str) -> None:
    """Steps and places of the layer that steps most unevenly, its weights, and all half-lives."""
    tokens, layers, given = look(run, text)
    lengths = [layer.steps.lengths(x)[0] for layer, x in zip(layers, given, strict=True)]
    uneven = [float((d.std(-1) / d.mean(-1)).max()) for d in lengths]
    chosen = max(range(len(layers)), key=uneven.__getitem__)
    d, omega = lengths[chosen], layers[chosen].steps.log_frequency.exp()
    head = int((d.std(-1) / d.mean(-1)).argmax())
    places = d.cumsum(-1)
    t = range(len(tokens))

    figure = Figure(figsize=(11, 9), layout="constrained")
    grid = figure.add_gridspec(3, 2, height_ratios=(1, 1.2, 1.6))
    steps_axes = figure.add_subplot(grid[0, :])
    steps_axes.bar(t, d[head], color="#3b6ea5")
    steps_axes.axhline(float(d[head].mean()), color="#444444", linewidth=0.8, linestyle="--")
    steps_axes.set_xticks(list(t), tokens, rotation=90, fontsize=7)
    steps_axes.set_ylabel("step")
    steps_axes.set_title(
        f"steps of layer {chosen + 1}, head {head + 1}; dashed: their mean", fontsize=10
    )

    places_axes = figure.add_subplot(grid[1, 0])
    for h, place in enumerate(places):
        places_axes.plot(t, place, label=f"head {h + 1}")
    places_axes.set_xlabel("token")
    places_axes.set_ylabel("place")
    places_axes.legend(frameon=False, fontsize=8)
    places_axes.set_title("places: the steps so far", fontsize=10)

    gates_axes = figure.add_subplot(grid[1, 1])
    for i, (layer, x) in enumerate(zip(layers, given, strict=True)):
        if layer.gate is not None:
            half = (-0.6931 / layer.gate(x)[0].mean(-1)).tolist()
            gates_axes.plot([i + 1] * len(half), half, "o", color="#a5563b")
    gates_axes.set_yscale("log")
    gates_axes.set_xlabel("layer")
    gates_axes.set_ylabel("tokens")
    gates_axes.set_title("half-lives of the heads' gates, on average", fontsize=10)

    for column, gap in enumerate(("learned", "equal")):
        axes = figure.add_subplot(grid[2, column])
        p = places[head] if gap == "learned" else d[head].mean() * torch.arange(1, len(tokens) + 1)
        weight = (1 + (omega[head] * (p[:, None, None] - p[None, :, None])).cos().mean(-1)) / 2
        shown = weight.masked_fill(torch.ones_like(weight).triu(1).bool(), float("nan"))
        image = axes.imshow(shown, cmap="viridis", vmin=0, vmax=1)
        axes.set_xlabel("key")
        axes.set_ylabel("query")
        title = "what scores are multiplied by" if column == 0 else "the same with all steps equal"
        axes.set_title(title, fontsize=10)
        figure.colorbar(image, ax=axes, shrink=0.8)
    for axes in (steps_axes, places_axes, gates_axes):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(picture, dpi=130)


if __name__ == "__main__":
    if len(sys.argv) not in (3, 4):
        raise SystemExit(__doc__)
    given_text = Path(sys.argv[3]).read_text() if len(sys.argv) == 4 else TEXT
    draw(Path(sys.argv[1]), Path(sys.argv[2]), given_text)
