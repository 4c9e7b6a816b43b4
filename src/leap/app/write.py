"""The tab Write: a model writes on, and tells what carried each token."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import gradio as gr
import numpy as np

from leap.app.config import AppConfig
from leap.app.looks import (
    check_index,
    check_text,
    clickable,
    empty_html,
    measures,
    note,
    size_of,
    text_html,
    told,
    told_stream,
)
from leap.app.models import Opened
from leap.app.strike import predictions
from leap.errors import InputError
from leap.serve.sampling import Sampler, Sampling

HINT = "The text appears here as it is written. Click a token to see what carried it."
PAUSE = 0.1
"""Seconds between two looks at what is written."""
NONE = "-"
STRUCK = 64
"""Tokens of which a model that has no gradients is asked what it does without each."""


@dataclass(frozen=True)
class Text:
    """A text as far as it is written."""

    model: str
    tokens: tuple[int, ...] = ()
    """Without those that every text begins with."""
    pieces: tuple[str, ...] = ()
    n_given: int = 0
    seconds: float = 0.0
    """Since the first token was written."""
    n_bytes: int = 0
    is_constant: bool = True
    is_ended: bool = False
    """Whether the model ended it."""

    @property
    def n_written(self) -> int:
        """Tokens that the model wrote."""
        return len(self.tokens) - self.n_given

    @property
    def rate(self) -> float | None:
        """Tokens per second."""
        return (self.n_written - 1) / self.seconds if self.seconds > 0 else None


def write(
    model: Opened, prompt: str, n_tokens: int, sampling: Sampling | None = None
) -> Iterator[Text]:
    """The text after each token."""
    reader = model.reader
    assert reader is not None
    sampler = Sampler(sampling or Sampling())
    given = reader.encode(prompt)
    if reader.max_length is not None and 1 + len(given) + n_tokens > reader.max_length:
        raise InputError(
            f"{len(given)} tokens read and {n_tokens} to write are more than the "
            f"{reader.max_length} positions this model has learned; give a shorter text"
        )
    spell = reader.speller("", [])
    text = Text(model.name, tuple(given), tuple(map(spell, given)), len(given),
                is_constant=reader.is_constant)  # fmt: skip
    state, new = reader.empty(), [*reader.begin(), *given]
    first = None
    for _ in range(n_tokens):
        logits, state = reader.read([new], state)
        token = sampler.choose(logits[0])
        now = time.perf_counter()
        first = now if first is None else first
        is_ended = token == reader.end
        if not is_ended:
            text = replace(text, tokens=(*text.tokens, token), pieces=(*text.pieces, spell(token)))
        text = replace(text, seconds=now - first, n_bytes=reader.n_bytes(state), is_ended=is_ended)
        yield text
        if is_ended:
            return
        new = [token]


def carried(model: Opened, tokens: Sequence[int], at: int) -> list[float]:
    """How much each token before `at` counts for it: by roll-up, or by striking each out.

    What is struck out is as if it had never been there, and counts by how far the log-probability
    falls; of a long text, the last tokens only.
    """
    assert model.reader is not None
    ids = [*model.reader.begin(), *tokens[:at]]
    n_begin = len(ids) - at
    if model.run is not None:
        import torch

        from leap.explain.importance import DEFAULT, importance

        found = importance(model.run.model, torch.tensor([ids]), tokens[at], DEFAULT)
        return found.tolist()[n_begin:]
    near = range(max(0, at - STRUCK), at)
    chances = predictions(model.reader, ids, [(), *([n_begin + i] for i in near)])[:, tokens[at]]
    weights = np.zeros(at)
    weights[near.start :] = chances[0] - chances[1:]
    return weights.tolist()


def tell(text: Text) -> str:
    """What there is to know of a text that is being written."""
    state = "State, the same after every token" if text.is_constant else "State, growing"
    return measures(
        [
            ("Tokens per second", f"{text.rate:,.0f}" if text.rate else NONE),
            (state, size_of(text.n_bytes)),
            ("Tokens read", f"{text.n_given:,}"),
            ("Tokens written", f"{text.n_written:,}"),
        ]
    )


def tab(models: Sequence[Opened], config: AppConfig) -> None:
    """The tab."""
    writing = {model.name: model for model in models if model.kind == "lm"}
    if not writing:
        gr.Markdown(
            "None of the models here writes; open one with `leap app --run`, and a run of "
            "`leap lm train`."
        )
        return
    with gr.Row(equal_height=False):
        with gr.Column(scale=2, min_width=320):
            prompt = gr.Textbox("The history of", label="Begin with", lines=5)
            name = gr.Dropdown(list(writing), label="Model", visible=len(writing) > 1)
            n_tokens = gr.Slider(1, config.max_tokens, min(100, config.max_tokens), step=1,
                                 label="Tokens")  # fmt: skip
            temperature = gr.Slider(0, 2, 0.8, step=0.1, label="Temperature",
                                    info="0 takes the likeliest token each time")  # fmt: skip
            seed = gr.Number(0, precision=0, minimum=0, maximum=2**31, label="Random seed")
            with gr.Row():
                start = gr.Button("Write", variant="primary")
                stop = gr.Button("Stop")
        with gr.Column(scale=3, min_width=320):
            numbers = gr.HTML(tell(Text("")))
            shown = clickable(empty_html(HINT), label="The text", elem_id="written")
            why = gr.HTML(note(""))
    kept = gr.State(None, time_to_live=3600)

    def go(name: str, prompt: str, n: Any, temperature: Any, seed: Any) -> Iterator[Any]:
        model = writing.get(name)
        if model is None:
            raise InputError("there is no such model here; choose one of the list")
        n_wanted = _whole(n, 1, config.max_tokens, "tokens")
        chosen = Sampling(
            temperature=_number(temperature, 0, 10, "temperature"),
            seed=_whole(seed, 0, 2**31, "seed"),
        )
        text, looked = None, 0.0
        for text in write(model, check_text(prompt, config.max_characters), n_wanted, chosen):
            if time.perf_counter() - looked > PAUSE:
                looked = time.perf_counter()
                yield tell(text), text_html(text.pieces, given=text.n_given), note("Writing."), text
        assert text is not None
        end = (
            "The model ended the text here." if text.is_ended else f"Wrote {text.n_written} tokens."
        )
        said = note(f"{end} Click a token to see what carried it.")
        yield tell(text), text_html(text.pieces, given=text.n_given), said, text

    def explain(text: Text | None, data: gr.EventData) -> tuple[str, str]:
        if text is None:
            raise InputError("there is nothing written yet; press Write first")
        at = check_index(data, len(text.pieces))
        model = writing[text.model]
        weights = carried(model, text.tokens, at)
        page = text_html(text.pieces, weights, given=text.n_given, chosen=at)
        return page, note(_sentence(text, at, weights, model.is_exported))

    limits = {"concurrency_limit": config.at_once, "show_progress": "hidden"}
    event = start.click(
        told_stream(go),
        [name, prompt, n_tokens, temperature, seed],
        [numbers, shown, why, kept],
        api_name="write",
        concurrency_id="write",
        **limits,
    )
    stop.click(None, cancels=[event])
    shown.select(
        told(explain), [kept], [shown, why], api_name="carried", concurrency_id="explain", **limits
    )


def _sentence(text: Text, at: int, weights: Sequence[float], is_exported: bool) -> str:
    token = repr(text.pieces[at])
    if not any(weights):
        return f"Nothing stands before {token}."
    most = sorted(range(at), key=lambda i: -abs(weights[i]))[:3]
    parts = ", ".join(f"{text.pieces[i]!r} ({weights[i]:+.2f})" for i in most)
    how = "by striking out each token" if is_exported else "by roll-up"
    far = f", of the last {STRUCK} tokens" if is_exported and at > STRUCK else ""
    return (
        f"What counted most for {token}: {parts}, in nats, {how}{far}. Orange speaks for it, blue "
        "against."
    )


def _number(value: Any, low: float, high: float, name: str) -> float:
    if not isinstance(value, int | float) or not low <= value <= high:
        raise InputError(f"{name} must be from {low} to {high}; choose another")
    return float(value)


def _whole(value: Any, low: int, high: int, name: str) -> int:
    number = _number(value, low, high, name)
    if number != int(number):
        raise InputError(f"{name} must be a whole number; choose another")
    return int(number)
