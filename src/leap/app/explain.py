"""The tab Explain: what a prediction rests on, by word, layer and head, and striking words out."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import gradio as gr
import numpy as np

from leap.app.config import AppConfig
from leap.app.looks import (
    SCALE,
    check_index,
    check_text,
    clickable,
    empty_html,
    note,
    table,
    text_html,
    told,
)
from leap.app.models import Opened
from leap.app.strike import predictions, words
from leap.errors import InputError
from leap.explain.page import depths

HINT = "The text appears here, shaded by what each token counts. Click a word to strike it out."
MAP = (
    "Importance per layer and head: the share of each token in what was taken, each row by its "
    "largest. These are weights, not causes."
)
MOST_ROWS = 64
"""Layers and heads that the map has room for; of more, heads are taken together."""
MOST_WORDS = 200
"""Words that a model without gradients is asked about."""
BEST = 5


@dataclass(frozen=True)
class Prediction:
    """A text, what is predicted for it, and what that rests on."""

    model: str
    tokens: tuple[int, ...]
    pieces: tuple[str, ...]
    n_begin: int
    """Pieces that every text begins with, which cannot be struck out."""
    target: int
    names: dict[int, str]
    """What is predicted, by its number: tokens or classes that were among the likeliest."""
    before: dict[int, float]
    """Probabilities of the likeliest."""
    weights: tuple[float, ...]
    rows: tuple[tuple[float, ...], ...] = ()
    """Of each layer and head."""
    row_names: tuple[str, ...] = ()
    left_out: int = 0
    """Tokens at the end of the text that the model does not read."""
    struck: frozenset[int] = frozenset()
    after: dict[int, float] = field(default_factory=dict)

    @property
    def words(self) -> list[list[int]]:
        """Places of the pieces of each word that can be struck out."""
        return [[self.n_begin + i for i in word] for word in words(self.pieces[self.n_begin :])]


def predict(model: Opened, text: str) -> Prediction:
    """What a model predicts for a text, and what that rests on."""
    if model.run is None:
        return _by_striking(model, text)
    from leap.tasks.explain.text import explain_prediction

    found = explain_prediction(model.run, text, strike=0)
    rows, names = _rows(found)
    ids = model.run.encode(text)[0].tolist()
    chances = _chances(model, ids, [()])[0]
    best = _best(chances)
    return Prediction(
        model=model.name,
        tokens=tuple(ids),
        pieces=tuple(found.pieces),
        n_begin=int(model.kind == "lm"),
        target=best[0],
        names={i: _name(model, i) for i in best},
        before={i: float(chances[i]) for i in best},
        weights=tuple(found.importance),
        rows=rows,
        row_names=names,
        left_out=found.left_out,
    )


def strike(model: Opened, prediction: Prediction, place: int) -> Prediction:
    """The same with the word at a place struck out, or back in its place if it was."""
    word = next((word for word in prediction.words if place in word), None)
    if word is None:
        raise InputError("this is where every text begins; strike out another")
    struck = prediction.struck ^ frozenset(word)
    if len(struck) == len(prediction.tokens):
        raise InputError("there must be a word left; put one back first")
    if not struck:
        return replace(prediction, struck=struck, after={})
    chances = _chances(model, prediction.tokens, [sorted(struck)])[0]
    best = _best(chances)
    names = {**prediction.names, **{i: _name(model, i) for i in best}}
    after = {i: float(chances[i]) for i in {*best, *prediction.before}}
    return replace(prediction, struck=struck, names=names, after=after)


def _chances(model: Opened, tokens: Sequence[int], without: Sequence[Sequence[int]]) -> np.ndarray:
    if model.reader is not None:
        return np.exp(predictions(model.reader, tokens, without))
    import torch

    from leap.explain.importance import log_probabilities

    found = []
    with torch.no_grad():
        for places in without:
            kept = torch.tensor([[x for i, x in enumerate(tokens) if i not in set(places)]])
            found.append(log_probabilities(model.run.model, input_ids=kept)[0].exp().numpy())
    return np.stack(found)


def _by_striking(model: Opened, text: str) -> Prediction:
    """Of an exported model, which has no gradients: each word is struck out in turn."""
    reader = model.reader
    assert reader is not None
    begin, tokens = reader.begin(), reader.encode(text)
    pieces = ["" for _ in begin] + list(map(reader.speller("", []), tokens))
    ids = [*begin, *tokens]
    found = Prediction(model.name, tuple(ids), tuple(pieces), len(begin), 0, {}, {}, ())
    near = found.words[-MOST_WORDS:]
    chances = predictions(reader, ids, [(), *near])
    best = _best(np.exp(chances[0]))
    weights = np.zeros(len(ids))
    for word, row in zip(near, chances[1:], strict=True):
        weights[word] = (chances[0, best[0]] - row[best[0]]) / len(word)
    return replace(
        found,
        target=best[0],
        names={i: _name(model, i) for i in best},
        before={i: float(np.exp(chances[0, i])) for i in best},
        weights=tuple(weights.tolist()),
    )


def _best(chances: np.ndarray) -> list[int]:
    return np.argsort(-chances, kind="stable")[:BEST].tolist()


def _name(model: Opened, target: int) -> str:
    if model.run is not None:
        return str(model.run.spell_one(target))
    assert model.reader is not None
    return model.reader.speller("", [])(target) or "end of text"


def _rows(found: Any) -> tuple[tuple[tuple[float, ...], ...], tuple[str, ...]]:
    """What each layer and head attended to, and its name."""
    weights = found.found.importance(found.at)[0]  # layers, heads, tokens
    names = [f"layer {i} · {name}" for i, name in enumerate(found.found.names)]
    if weights.shape[0] * weights.shape[1] > MOST_ROWS:
        return tuple(map(tuple, weights.mean(1).tolist())), tuple(names)
    rows = [tuple(head) for layer in weights.tolist() for head in layer]
    n_heads = weights.shape[1]
    return tuple(rows), tuple(
        f"layer {i} · head {h}" for i in range(len(names)) for h in range(n_heads)
    )


def picture(prediction: Prediction) -> Any:
    """What each layer and head attended to, as a map to hover over."""
    import plotly.graph_objects as go

    labels = [repr(piece)[1:-1] or "·" for piece in prediction.pieces]
    figure = go.Figure(
        go.Heatmap(
            z=[depths(row) for row in prediction.rows],
            customdata=prediction.rows,
            x=list(range(len(labels))),
            y=list(prediction.row_names),
            text=[labels] * len(prediction.rows),
            colorscale=SCALE,
            zmin=0,
            zmax=1,
            showscale=False,
            hovertemplate="%{y}<br>%{text}<br>weight %{customdata:.3f}<extra></extra>",
        )
    )
    figure.update_yaxes(autorange="reversed")
    if len(labels) <= 60:
        figure.update_xaxes(
            tickmode="array", tickvals=list(range(len(labels))), ticktext=labels, tickangle=-90
        )
    figure.update_layout(
        height=max(260, 22 * len(prediction.rows) + 150),
        margin={"l": 10, "r": 10, "t": 10, "b": 10},
        template="plotly_white",
    )
    return figure


def tab(models: Sequence[Opened], config: AppConfig) -> None:
    """The tab."""
    known = {model.name: model for model in models if model.kind in ("lm", "classifier")}
    if not known:
        gr.Markdown(
            "None of the models here predicts a token or a class; the tab Interpret shows which "
            "source words each word of a translation took."
        )
        return
    with gr.Row(equal_height=False):
        with gr.Column(scale=2, min_width=320):
            text = gr.Textbox(
                "The ship was built in 1908 for the harbour of", label="Text to explain", lines=5
            )
            name = gr.Dropdown(list(known), label="Model", visible=len(known) > 1)
            start = gr.Button("Explain", variant="primary")
            chances = gr.HTML(label="Predictions")
        with gr.Column(scale=3, min_width=320):
            said = gr.HTML(note(""))
            shown = clickable(empty_html(HINT), label="The text", elem_id="explained")
            gr.HTML(note(MAP))
            heat = gr.Plot(show_label=False)
    kept = gr.State(None, time_to_live=3600)

    def go(name: str, given: str) -> Any:
        model = known.get(name)
        if model is None:
            raise InputError("there is no such model here; choose one of the list")
        found = predict(model, check_text(given, config.max_characters))
        drawn = picture(found) if found.rows else None
        return *_shown(model, found), drawn, found

    def cross_out(found: Prediction | None, data: gr.EventData) -> Any:
        if found is None:
            raise InputError("there is nothing to strike out yet; press Explain first")
        model = known[found.model]
        after = strike(model, found, check_index(data, len(found.pieces)))
        return *_shown(model, after), after

    limits = {"concurrency_limit": config.at_once, "concurrency_id": "explain"}
    start.click(
        told(go), [name, text], [said, shown, chances, heat, kept], api_name="explain", **limits
    )
    shown.select(
        told(cross_out), [kept], [said, shown, chances, kept], api_name="strike",
        show_progress="hidden", **limits,
    )  # fmt: skip


def _shown(model: Opened, found: Prediction) -> tuple[str, str, str]:
    target = found.names[found.target]
    sentence = f"Predicted: {target!r}, {found.before[found.target]:.1%}. "
    if found.struck:
        after = found.after[found.target]
        sentence += f"Without what is struck out, {after:.1%}. Click a word again to put it back."
    else:
        sentence += "Orange speaks for it, blue against. Click a word to strike it out."
    if found.left_out:
        sentence += f" The last {found.left_out} tokens were not read: the model takes no more."
    if not found.rows:
        sentence += (
            " An exported model does not show its layers and heads; open its run folder for them."
        )
    page = text_html(
        found.pieces,
        found.weights,
        given=found.n_begin,
        struck=found.struck,
        silent=range(found.n_begin),
    )
    columns = ["next token" if model.kind == "lm" else "class", "probability"]
    order = sorted(found.before, key=lambda i: -found.before[i])
    if found.after:
        columns.append("struck out")
        order += sorted((i for i in found.after if i not in found.before),
                        key=lambda i: -found.after[i])  # fmt: skip
    rows = []
    for i in order:
        row = [repr(found.names[i]), f"{found.before[i]:.1%}" if i in found.before else ""]
        rows.append([*row, f"{found.after[i]:.1%}"] if found.after else row)
    return note(sentence), page, table(columns, rows)
