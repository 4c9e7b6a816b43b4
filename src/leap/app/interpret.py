"""The tab Interpret: translation as the source arrives, its lag, and what each word took."""

import html
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
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
    text_html,
    told,
    told_stream,
)
from leap.app.models import Opened
from leap.errors import FileError, InputError
from leap.runtime.streaming.stream import Interpreter
from leap.runtime.streaming.took import Recording
from leap.tasks.simul.audio.files import read_sound, sound_facts
from leap.tasks.simul.live import Event, Written, played, sound_events, text_events

HINT = "The translation appears here, each word with its lag. Click a word to see what it took."
POLICIES = ("wait-1", "wait-3", "wait-5", "offline")
SEGMENT = 320
"""Milliseconds of sound that come at once."""


@dataclass(frozen=True)
class Interpreted:
    """A source and its translation, as far as they go."""

    is_sound: bool
    source: tuple[str, ...]
    """Words, or stretches of sound by their times."""
    words: tuple[str, ...]
    lags: tuple[float, ...]
    """Words behind, or milliseconds."""
    lagging: float | None = None
    """LAAL; None before the end."""
    took: np.ndarray | None = None
    """How far the log-probability of each word falls without each part of the source, in nats."""


def translate(
    interpreter: Interpreter, source: Any, *, ended: bool = True
) -> Iterator[Interpreted]:
    """The translation after each word, and at the end with what each word took.

    Args:
        interpreter: the model with its policy.
        source: text, or samples of sound at the model's rate.
        ended: whether the source has ended; if not, the last word of text may still grow.
    """
    recording = Recording.of(interpreter)
    stream = recording.stream(interpreter)
    is_sound = interpreter.extractor is not None
    if is_sound:
        assert interpreter.extractor is not None
        events = sound_events(stream, played(source, interpreter.extractor.sampling_rate, SEGMENT))
    elif ended:
        events = text_events(stream, [" ".join(source.split())])
    else:
        events = _as_typed(stream, source)
    words: list[str] = []
    lags: list[float] = []
    laggings: list[float] = []
    heard = () if is_sound else tuple(source.split())
    for event in events:
        if isinstance(event, Written):
            words.append(event.word)
            lags.append(float(event.lag))
            yield Interpreted(is_sound, heard, tuple(words), tuple(lags))
        elif event.lagging is not None:
            laggings.append(event.lagging)
    if not ended:
        yield Interpreted(is_sound, heard, tuple(words), tuple(lags))
        return
    names, took = _took(recording, interpreter)
    lagging = float(np.mean(laggings)) if laggings else None
    yield Interpreted(is_sound, names, tuple(words), tuple(lags), lagging, took)


def _as_typed(stream: Any, text: str) -> Iterator[Event]:
    """Words of the translation of a text that has not ended."""
    whole = text.split() if not text or text[-1].isspace() else text.split()[:-1]
    n_written = 0
    for n_read, word in enumerate(whole, start=1):
        for new in stream.push([word]):
            n_written += 1
            yield Written(new, n_read - n_written + 1, n_read)


def _took(recording: Recording, interpreter: Interpreter) -> tuple[tuple[str, ...], np.ndarray]:
    """Parts of the source, and how much each word rests on each of them."""
    sentences = [each for each in recording.sentences if each.chunks]
    units = [each.units(interpreter.vocabulary) for each in sentences]
    n_words = sum(len(each.words) for each in sentences)
    took = np.zeros((n_words, sum(map(len, units))))
    names: list[str] = []
    row = 0
    begun = 0.0
    for sentence, parts in zip(sentences, units, strict=True):
        n = len(sentence.words)
        took[row : row + n, len(names) : len(names) + len(parts)] = sentence.rests_on(interpreter)
        names += [_time(begun, part) if part.text is None else part.text for part in parts]
        row += n
        if parts and parts[0].text is None:
            begun += parts[-1].end / 100  # Frames of 10 ms.
    return tuple(names), took


def _time(begun: float, part: Any) -> str:
    return f"{begun + part.start / 100:.1f} to {begun + part.end / 100:.1f} s"


def source_html(found: Interpreted, chosen: int | None) -> str:
    """The source, shaded by what a word of the translation took."""
    weights = None if chosen is None or found.took is None else found.took[chosen].tolist()
    pieces = [piece for word in found.source for piece in (word, " ")]
    if weights is not None:
        weights = [weight for each in weights for weight in (each, 0.0)]
    return text_html(pieces, weights, silent=range(len(pieces)))


def target_html(found: Interpreted, chosen: int | None = None) -> str:
    """The translation, each word with its lag."""
    unit = " ms" if found.is_sound else ""
    spans = (
        f'<span class="word{" chosen" * (i == chosen)}" data-i="{i}" role="button" tabindex="0">'
        f'{html.escape(word)}<span class="lag">{lag:+.0f}{unit}</span></span>'
        for i, (word, lag) in enumerate(zip(found.words, found.lags, strict=True))
    )
    return f'<div class="leap-text">{"".join(spans)}</div>'


def tell(found: Interpreted) -> str:
    """What there is to know of a translation."""
    unit = "ms" if found.is_sound else "words"
    mean = f"{np.mean(found.lags):,.1f} {unit}" if found.lags else "-"
    lagging = "-" if found.lagging is None else f"{found.lagging:,.1f} {unit}"
    return measures(
        [("Mean lag of a word", mean), ("LAAL", lagging), ("Words", f"{len(found.words)}")]
    )


def tab(models: Sequence[Opened], config: AppConfig) -> None:
    """The tab."""
    known = {model.name: model for model in models if model.interpreter is not None}
    if not known:
        gr.Markdown(
            "None of the models here translates; open one with `leap app --run`, and a run of "
            "`leap simul train`."
        )
        return
    first = next(iter(known.values()))
    with gr.Row(equal_height=False):
        with gr.Column(scale=2, min_width=320):
            name = gr.Dropdown(list(known), label="Model", visible=len(known) > 1)
            of_text, of_sound = first.kind == "text", first.kind == "speech"
            text = gr.Textbox(
                label="Source, translated as you type", lines=4, visible=of_text,
                placeholder="A man in an orange hat is looking at something.",
            )  # fmt: skip
            file = gr.UploadButton(
                "Upload a text file", file_types=["text"], visible=of_text, size="sm"
            )
            sound = gr.Audio(
                label=f"Source: upload or record, up to {config.max_seconds:g} s",
                sources=["upload", "microphone"], type="filepath", visible=of_sound,
            )  # fmt: skip
            policy = gr.Dropdown(
                list(POLICIES), value="wait-3", label="Policy", allow_custom_value=True,
                info="wait-3 writes three steps behind the source; offline waits for its end",
            )  # fmt: skip
            start = gr.Button("Interpret to the end", variant="primary")
        with gr.Column(scale=3, min_width=320):
            numbers = gr.HTML(tell(Interpreted(False, (), (), ())))
            shown = clickable(empty_html(HINT), label="The translation", elem_id="translation")
            said = gr.HTML(note(""))
            source = gr.HTML(empty_html("The source, shaded by what the word took."),
                             elem_id="source")  # fmt: skip
    kept = gr.State(None, time_to_live=3600)

    def interpreter_of(name: str, policy: Any) -> tuple[Opened, Interpreter]:
        model = known.get(name)
        if model is None or model.interpreter is None:
            raise InputError("there is no such model here; choose one of the list")
        if not isinstance(policy, str) or len(policy) > 40:
            raise InputError("the policy is no name of one; choose wait-3, say")
        return model, model.interpreter(policy.strip())

    def go(name: str, policy: str, given: Any, path: Any) -> Iterator[Any]:
        model, interpreter = interpreter_of(name, policy)
        if model.kind == "speech":
            assert interpreter.extractor is not None
            content: Any = load_sound(path, interpreter.extractor.sampling_rate, config.max_seconds)
        else:
            content = check_text(given, config.max_characters)
        for found in translate(interpreter, content):
            is_whole = found.took is not None
            sentence = "Click a word to see what it took." if is_whole else "Interpreting."
            if is_whole and not found.words:
                sentence = "There was nothing to translate in it."
            yield tell(found), target_html(found), note(sentence), source_html(found, None), found

    def typed(name: str, policy: str, given: Any) -> Any:
        _, interpreter = interpreter_of(name, policy)
        if not isinstance(given, str) or not given.strip():
            return tell(Interpreted(False, (), (), ())), empty_html(HINT), note(""), None
        given = check_text(given, config.max_characters)
        (*_, found) = translate(interpreter, given, ended=False)
        sentence = "As far as the source goes; Interpret to the end says the rest."
        return tell(found), target_html(found), note(sentence), None

    def chosen(found: Interpreted | None, data: gr.EventData) -> tuple[str, str, str]:
        if found is None or found.took is None:
            raise InputError("press Interpret to the end first: what a word took is told then")
        at = check_index(data, len(found.words))
        return target_html(found, at), source_html(found, at), note(_sentence(found, at))

    def switched(name: str) -> Any:
        of_text = known[name].kind == "text" if name in known else True
        shows = [of_text, of_text, not of_text]
        return [gr.update(visible=each) for each in shows]

    limits = {
        "concurrency_limit": config.at_once,
        "concurrency_id": "interpret",
        "show_progress": "hidden",
    }
    outputs = [numbers, shown, said, source, kept]
    start.click(
        told_stream(go), [name, policy, text, sound], outputs, api_name="interpret", **limits
    )
    text.input(
        told(typed), [name, policy, text], [numbers, shown, said, kept], api_name="typed",
        trigger_mode="always_last", **limits,
    )  # fmt: skip
    file.upload(told(lambda path: read_text(path, config.max_characters)), [file], [text],
                api_name="text_of_file")  # fmt: skip
    shown.select(told(chosen), [kept], [shown, source, said], api_name="took", **limits)
    name.change(told(switched), [name], [text, file, sound], api_name="switched")


def _sentence(found: Interpreted, at: int) -> str:
    assert found.took is not None
    weights = found.took[at]
    word = repr(found.words[at])
    if not len(weights) or weights.max() <= 0:
        return f"{word} rests on nothing in the source, as far as striking it out shows."
    most = [int(i) for i in np.argsort(-weights)[:3] if weights[i] > 0]
    parts = ", ".join(f"{found.source[i]!r} ({weights[i]:+.2f})" for i in most)
    return (
        f"{word} took most of {parts}: in nats, how far its log-probability falls without it. "
        "Orange speaks for it, blue against."
    )


def read_text(path: Any, most: int) -> str:
    """The text of an uploaded file."""
    try:
        content = Path(str(path)).read_bytes()
        return check_text(content.decode("utf-8-sig"), most)
    except UnicodeDecodeError as error:
        raise FileError("the file is no text in UTF-8; convert it, with iconv") from error
    except OSError as error:
        raise FileError("the file cannot be read; upload it again") from error


def load_sound(path: Any, rate: int, seconds: float) -> Any:
    """The samples of an uploaded or recorded sound, at the model's rate."""
    if not isinstance(path, str) or not path:
        raise InputError("there is no sound yet; upload or record some")
    try:
        n, own = sound_facts(Path(path))
        if own < 1 or n / own > seconds:
            raise InputError(
                f"the sound lasts {n / max(own, 1):.0f} s, and this page takes {seconds:g}; give a "
                "shorter one, or start leap app with a larger --max-seconds"
            )
        return read_sound(Path(path), rate)
    except FileError as error:  # Its message names a file that nobody knows.
        raise FileError("this is no sound file that can be read; give wav, flac or ogg") from error
