"""An explanation to look at: text tinted by importance, as HTML, and a map of it, as a picture."""

import base64
import html
import io
import warnings
from collections.abc import Sequence

from matplotlib.figure import Figure

from leap.explain.attention import Explanation

TINT = (213, 94, 0)
MOST_LABELS = 80
"""Tokens that a picture has room to name."""
CSS = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse } td, th { padding: .2rem .8rem; text-align: right }
td:first-child, th:first-child { text-align: left } tr { border-bottom: 1px solid #ddd }
pre { background: #f7f7f7; color: #000; padding: .8rem; white-space: pre-wrap }
img { max-width: 100% }
"""


def explanation_page(pieces: Sequence[str], found: Explanation, at: int = -1) -> str:
    """A page on what one token attended to, that needs nothing but itself.

    Args:
        pieces: the text of each token.
        found: the explanation; of its texts the first is shown.
        at: the token.
    """
    importance = found.importance(at)[0]
    layers = "".join(
        f"<h3>layer {i}: {html.escape(name)}</h3>{tinted(pieces, heads.mean(0).tolist())}"
        f"<details><summary>each head</summary>"
        + "".join(tinted(pieces, head.tolist()) for head in heads)
        + "</details>"
        for i, (name, heads) in enumerate(zip(found.names, importance, strict=True))
    )
    picture = embedded(importance_picture(pieces, found, at))
    return f"""<!doctype html>
<meta charset="utf-8"><title>What a model attended to</title>
<style>{CSS}</style>
<h1>What {html.escape(repr(pieces[at]))} attended to</h1>
<p>The share of each piece in what that token took; darker is more, and the number is told where the
pointer rests.
<h2>Through all layers</h2>
{tinted(pieces, found.through_layers(at)[0].tolist())}
<p>Layer upon layer, counting what passes by each of them (attention roll-out).
<h2>Layer by layer</h2>
<p>The mean of the heads, and each of them.
{layers}
<h2>At a glance</h2>
<img alt="importance of each token in each layer" src="{picture}">
"""


def tinted(pieces: Sequence[str], weights: Sequence[float]) -> str:
    """Text with each piece the darker the more it weighs, as HTML."""
    spans = (
        f'<span style="background: rgb({" ".join(map(str, TINT))} / {depth:.2f})" '
        f'title="{weight:.3f}">{html.escape(shown(piece))}</span>'
        for piece, weight, depth in zip(pieces, weights, depths(weights), strict=True)
    )
    return f"<pre>{''.join(spans)}</pre>"


def depths(weights: Sequence[float]) -> list[float]:
    """How dark each is to be: 1 for the heaviest, 0 for nothing."""
    most = max(weights, default=0.0)
    return [weight / most if most > 0 else 0.0 for weight in weights]


def shown(piece: str) -> str:
    """A piece of text in which the end of a line can be seen."""
    return piece.replace("\n", "↵\n")


def importance_picture(pieces: Sequence[str], found: Explanation, at: int = -1) -> bytes:
    """Layers against tokens, as PNG: the mean of the heads, and in the last row all layers."""
    rows = [*found.importance(at)[0].mean(1).tolist(), found.through_layers(at)[0].tolist()]
    names = [f"{i}: {name}" for i, name in enumerate(found.names)] + ["all layers"]
    width = min(24.0, 3 + 0.22 * len(pieces))
    figure = Figure(figsize=(max(width, 6), 1.5 + 0.4 * len(rows)), layout="constrained")
    axes = figure.subplots()
    # Each row by its own largest: a window of 4 has larger shares than one of 400.
    axes.imshow([depths(row) for row in rows], cmap="Oranges", aspect="auto", vmin=0, vmax=1)
    axes.set_yticks(range(len(rows)), names)
    if len(pieces) <= MOST_LABELS:
        labels = [_label(piece)[1:-1] for piece in pieces]
        axes.set_xticks(range(len(pieces)), labels, rotation=90, fontsize=8)
    else:
        axes.set_xlabel("token")
    axes.set_title(f"Share of each token in what {_label(pieces[at])} took", fontsize=11)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # What the font lacks is drawn as boxes.
        return png(figure)


def png(figure: Figure) -> bytes:
    """A figure as the bytes of a PNG file."""
    file = io.BytesIO()
    figure.savefig(file, dpi=130, format="png")
    return file.getvalue()


def embedded(picture: bytes) -> str:
    """A PNG as an address that a page can hold."""
    return f"data:image/png;base64,{base64.b64encode(picture).decode()}"


def _label(piece: str) -> str:
    # Between two dollars matplotlib would see a formula.
    return repr(piece).replace("$", r"\$")
