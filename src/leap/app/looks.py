"""What all tabs share: text that can be clicked, tints, errors as sentences, the style sheet."""

import functools
import html
import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import gradio as gr

from leap.errors import InputError, LeapError, lacking
from leap.explain.page import depths, shown, tint
from leap.runtime.text import check_prompt

log = logging.getLogger("leap.app")
CLICK = """
const chosen = (event) => event.target.closest('[data-i]');
const choose = (event) => {
  const found = chosen(event);
  if (found) trigger('select', {index: Number(found.dataset.i)});
};
element.addEventListener('click', choose);
element.addEventListener('keydown', (event) => {
  if (chosen(event) && (event.key === 'Enter' || event.key === ' ')) {
    event.preventDefault();
    choose(event);
  }
});
"""
CSS = """
.leap-text { white-space: pre-wrap; line-height: 1.9; font-size: 1.05rem; min-height: 3.8rem;
  border: 1px solid var(--border-color-primary); border-radius: 8px; padding: .7rem .9rem;
  overflow-wrap: anywhere; max-height: 26rem; overflow-y: auto }
.leap-text [data-i] { cursor: pointer; border-radius: 3px; padding: .12rem 0 }
.leap-text [data-i]:hover, .leap-text [data-i]:focus-visible {
  outline: 2px solid var(--color-accent); outline-offset: -1px }
.leap-text .given { opacity: .6 }
.leap-text .chosen { outline: 2px solid var(--body-text-color); outline-offset: -1px }
.leap-text .struck { text-decoration: line-through; opacity: .5 }
.leap-text .word { margin-right: .35em; white-space: nowrap }
.leap-text .lag { font-size: .72rem; opacity: .7; margin-left: .15em }
.leap-text.empty { opacity: .7 }
.leap-measures { display: flex; flex-wrap: wrap; gap: .4rem 2rem }
.leap-measures div { display: flex; flex-direction: column }
.leap-measures strong { font-size: 1.25rem; font-variant-numeric: tabular-nums }
.leap-measures span { font-size: .8rem; opacity: .7 }
.leap-note { opacity: .8; margin: 0 }
.leap-table { border-collapse: collapse; width: 100%; max-width: 34rem; margin: 0;
  border: none !important }
.leap-table tr { border: none !important }
.leap-table th { font-weight: 500; font-size: .8rem; opacity: .8 }
.leap-table td, .leap-table th { padding: .15rem .6rem !important; white-space: pre;
  text-align: right !important; font-variant-numeric: tabular-nums; border: none !important;
  border-bottom: 1px solid var(--border-color-primary) !important }
.leap-table td:first-child, .leap-table th:first-child { text-align: left !important }
footer { display: none !important }
"""
SCALE = [[0, "#ffffff"], [1, "#d55e00"]]
"""From nothing to the most, for plotly."""
DARKEST = 0.8
"""How much of its colour the heaviest token has, so that it can be read."""


def clickable(value: str, *, label: str, elem_id: str) -> Any:
    """Text whose parts tell which of them was clicked, by the event select."""
    return gr.HTML(value, label=label, js_on_load=CLICK, elem_id=elem_id, autoscroll=True)


def text_html(
    pieces: Sequence[str],
    weights: Sequence[float] | None = None,
    *,
    given: int = 0,
    chosen: int | None = None,
    struck: Collection[int] = (),
    silent: Collection[int] = (),
) -> str:
    """Pieces of text that can be clicked, each the darker the more it weighs.

    Args:
        pieces: the text of each.
        weights: negative where it speaks against what is explained.
        given: how many of the first were given, rather than written.
        chosen: which of them the weights are for.
        struck: those that are struck out.
        silent: those that cannot be clicked.
    """
    values = [0.0] * len(pieces) if weights is None else [*weights]
    values += [0.0] * (len(pieces) - len(values))
    spans = []
    for i, (piece, weight, depth) in enumerate(zip(pieces, values, depths(values), strict=True)):
        names = [
            name
            for name, holds in (
                ("given", i < given),
                ("chosen", i == chosen),
                ("struck", i in struck),
            )
            if holds
        ]
        style, title = "", ""
        if weights is not None and weight:
            rgb = " ".join(map(str, tint(weight)))
            style = f' style="background: rgb({rgb} / {DARKEST * abs(depth):.2f})"'
            title = f' title="{weight:+.3f}"'
        role = "" if i in silent else f' data-i="{i}" role="button" tabindex="0"'
        text = html.escape(shown(piece))
        spans.append(f'<span class="{" ".join(names)}"{role}{style}{title}>{text}</span>')
    return f'<div class="leap-text">{"".join(spans)}</div>'


def empty_html(hint: str) -> str:
    """What stands where text will be."""
    return f'<div class="leap-text empty">{html.escape(hint)}</div>'


def note(sentence: str) -> str:
    """A sentence in small."""
    return f'<p class="leap-note" role="status">{html.escape(sentence)}</p>'


def measures(values: Sequence[tuple[str, str]]) -> str:
    """Numbers with what they are."""
    parts = (
        f"<div><strong>{html.escape(value)}</strong><span>{html.escape(name)}</span></div>"
        for name, value in values
    )
    return f'<div class="leap-measures" role="group" aria-label="Measures">{"".join(parts)}</div>'


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A small table."""
    head = "".join(f"<th>{html.escape(name)}" for name in columns)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(x)}" for x in row) for row in rows)
    return f'<table class="leap-table"><tr>{head}{body}</table>'


def size_of(n_bytes: int) -> str:
    """Memory, for people."""
    return f"{n_bytes / 1000:,.1f} kB" if n_bytes < 10**6 else f"{n_bytes / 10**6:,.1f} MB"


def check_text(text: Any, most: int) -> str:
    """A text as it may be given, or an error that says why not."""
    if not isinstance(text, str) or not text.strip():
        raise InputError("there is no text yet; type or paste some")
    if len(text) > most:
        raise InputError(
            f"the text has {len(text):,} characters, and this page takes {most:,}; give a shorter "
            "one, or start leap app with a larger --max-characters"
        )
    check_prompt(text)
    return text


def check_index(data: Any, n: int) -> int:
    """Which part was clicked."""
    index = getattr(data, "index", None)
    if not isinstance(index, int) or not 0 <= index < n:
        raise InputError("that is no longer there; start again")
    return index


def told(function: Callable[..., Any]) -> Callable[..., Any]:
    """A handler whose errors are shown as one sentence."""

    @functools.wraps(function)
    def handler(*arguments: Any) -> Any:
        try:
            return function(*arguments)
        except Exception as error:
            raise _shown(error) from error

    return handler


def told_stream(function: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    """The same of a handler that gives one thing after another."""

    @functools.wraps(function)
    def handler(*arguments: Any) -> Iterator[Any]:
        try:
            yield from function(*arguments)
        except Exception as error:
            raise _shown(error) from error

    return handler


def _shown(error: Exception) -> Exception:
    sentence = str(error) if isinstance(error, LeapError) else lacking(error)
    if sentence is None:
        log.error("a request failed", exc_info=error)
        sentence = "this could not be done; the terminal that leap app runs in says why"
    return gr.Error(html.escape(sentence), title="Not done", print_exception=False)
