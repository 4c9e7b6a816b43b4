"""An explanation to look at: text tinted by importance, as HTML, and a map of it, as a picture."""

import base64
import html
import io
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure

from leap.explain.attention import Explanation
from leap.explain.trace import Trace

TINT = (213, 94, 0)
AGAINST = (0, 114, 178)
"""Of what speaks against a prediction."""
MOST_LABELS = 80
"""Tokens that a picture has room to name."""
CSS = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse } td, th { padding: .2rem .8rem; text-align: right }
td:first-child, th:first-child { text-align: left } tr { border-bottom: 1px solid #ddd }
pre { background: #f7f7f7; color: #000; padding: .8rem; white-space: pre-wrap }
img { max-width: 100%; margin-top: 1rem }
"""


@dataclass(frozen=True)
class Struck:
    """What becomes of a prediction without one of the tokens."""

    token: int
    importance: float
    before: float
    """Probability of what is predicted."""
    after: float
    """The same with the token struck out."""


def explanation_page(
    pieces: Sequence[str],
    found: Explanation | Trace,
    at: int | None = -1,
    *,
    title: str,
    importance: Sequence[float],
    struck: Sequence[Struck],
) -> str:
    """A page on what one prediction rests on, that needs nothing but itself.

    Args:
        pieces: the text of each token.
        found: what layers attended to; of its texts the first is shown.
        at: the token that predicts; None for all of them.
        title: what is predicted.
        importance: of each token, negative where it speaks against the prediction.
        struck: what striking tokens out does.
    """
    weights = found.importance(at)[0]
    layers = "".join(
        f"<h3>layer {i}: {html.escape(name)}</h3>{tinted(pieces, heads.mean(0).tolist())}"
        f"<details><summary>each head</summary>"
        + "".join(tinted(pieces, head.tolist()) for head in heads)
        + "</details>"
        for i, (name, heads) in enumerate(zip(found.names, weights, strict=True))
    )
    rows = "".join(
        f"<tr><td>{html.escape(repr(pieces[each.token]))}<td>{each.token}"
        f"<td>{each.importance:+.3f}<td>{each.before:.3f}<td>{each.after:.3f}"
        for each in struck
    )
    picture = embedded(importance_picture(pieces, found, at))
    return f"""<!doctype html>
<meta charset="utf-8"><title>What a prediction rests on</title>
<style>{CSS}</style>
<h1>{html.escape(title)}</h1>
<p>What each token counts for it: orange speaks for it, blue against; darker is more, and the number
is told where the pointer rests.
{tinted(pieces, importance)}
<h2>Without one of them</h2>
<table><tr><th>token<th>place<th>importance<th>probability<th>without it{rows}</table>
<h2>What layers attended to</h2>
<p>The share of each token in what was taken: the mean of the heads, and each of them. These are
weights, not causes.
{layers}
<h3>all layers (attention roll-out)</h3>
{tinted(pieces, found.through_layers(at)[0].tolist())}
<h2>At a glance</h2>
<img alt="weight of each token in each layer" src="{picture}">
"""


def tinted(pieces: Sequence[str], weights: Sequence[float]) -> str:
    """Text with each piece the darker the more it weighs, as HTML; blue below 0."""
    spans = (
        f'<span style="background: rgb({" ".join(map(str, tint(weight)))} / {abs(depth):.2f})" '
        f'title="{weight:.3f}">{html.escape(shown(piece))}</span>'
        for piece, weight, depth in zip(pieces, weights, depths(weights), strict=True)
    )
    return f"<pre>{''.join(spans)}</pre>"


def tint(weight: float) -> tuple[int, int, int]:
    """The colour of what speaks for a prediction, or against it."""
    return AGAINST if weight < 0 else TINT


def depths(weights: Sequence[float]) -> list[float]:
    """How dark each is to be: 1 or -1 for the heaviest, 0 for nothing."""
    most = max(map(abs, weights), default=0.0)
    return [weight / most if most > 0 else 0.0 for weight in weights]


def shown(piece: str) -> str:
    """A piece of text in which the end of a line can be seen."""
    return piece.replace("\n", "↵\n")


def importance_picture(
    pieces: Sequence[str], found: Explanation | Trace, at: int | None = -1
) -> bytes:
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
    taker = "all tokens" if at is None else _label(pieces[at])
    axes.set_title(f"Share of each token in what {taker} took", fontsize=11)
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
