"""The tab Interpret, used as a person would, beside the Python runtime."""

import json
import re
import shutil
import wave
from itertools import pairwise

import numpy as np
import pytest

from leap.runtime import Translator
from leap.runtime.fbank import FilterBank
from leap.runtime.streaming.vocabulary import Subwords
from leap.runtime.text import read_tokenizer

TEXT = "three hundred and nine five thousand sixty-eight (again) seven one"
SENTENCES = (
    f"{TEXT} nine. Mr. Seven met the U.S. They were one. five u.s. hundred! naïve \uff46ive № ﬁne"
)
POLICIES = ["wait-1", "wait-3", "agree-2", "align-1", "tail-0.3", "offline"]
RATE = 16000
PATIENCE = 120_000
"""Milliseconds that a busy machine may take."""
RESET = 200


def says(page, pattern):
    from playwright.sync_api import expect

    expect(page.get_by_role("status")).to_have_text(re.compile(pattern), timeout=PATIENCE)


def warns(page, pattern):
    from playwright.sync_api import expect

    alert = page.get_by_role("alert")
    expect(alert).to_have_text(re.compile(pattern), timeout=PATIENCE)
    assert "\n" not in alert.inner_text()


def tab(page):
    return page.get_by_role("region", name="Interpret")


def press(page, name):
    page.get_by_role("button", name=name).click()


def choose(page, name):
    tab(page).get_by_label("Model").select_option(name)
    says(page, "Ready")


def translation(page):
    """Lines of words, and the lag that is shown at each."""
    return [
        [
            (word.text_content(), int(word.get_attribute("data-lag")))
            for word in line.locator("span").all()
        ]
        for line in tab(page).get_by_label("The translation").locator("p").all()
    ]


def words(page):
    return [[word for word, _ in line] for line in translation(page)]


def shows(page, expected):
    """Wait until the translation is this."""
    from playwright.sync_api import expect

    box = tab(page).get_by_label("The translation")
    expect(box).to_have_text("".join(map(" ".join, expected)), timeout=PATIENCE)
    assert words(page) == expected


def read(folder, text, policy="wait-3"):
    """Lines of words with lags, as `leap simul stream` has them."""
    stream = Translator(folder, policy, reset=RESET).stream()
    lines = []
    for line in text.split("\n"):
        n_read, found = 0, []
        for word in line.split():
            n_read += 1
            for written in stream.push([word]):
                found.append((written, n_read - len(found)))
        for written in stream.finish():
            found.append((written, n_read - len(found)))
        lines.append(found)
    return [line for line in lines if line]


def hear(folder, sound, policy="wait-3"):
    reset = None if policy == "offline" else RESET
    stream = Translator(folder, policy, reset=reset, pauses="loudness").stream()
    if sound.dtype == np.int16:
        sound = sound.astype(np.float32) / 32768
    return [*stream.push(sound), *stream.finish()]


@pytest.fixture(scope="module")
def sound():
    """Two seconds that swell and fade, half a second of silence, and two more."""
    random = np.random.default_rng(0)
    swell = np.sin(np.arange(2 * RATE) / 3000) ** 2 / 5
    noise = random.standard_normal((2, 2 * RATE)) * swell
    quiet = np.zeros(RATE // 2)
    return (np.concatenate([noise[0], quiet, noise[1], quiet]) * 32767).astype(np.int16)


def write_wav(path, sound, rate=RATE):
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, rate, len(sound), "NONE", ""))
        file.writeframes(sound.tobytes())
    return path


@pytest.fixture(scope="module")
def recording(sound, tmp_path_factory):
    return write_wav(tmp_path_factory.mktemp("sound") / "spoken.wav", sound)


@pytest.fixture
def page(context, url):
    """The page at the tab, with the model of text."""
    found = context.new_page()
    found.goto(f"{url}#interpret")
    says(found, "Ready")
    return found


def test_a_typed_text_is_translated_word_by_word_as_in_python(page, translators, tmp_path):
    box = tab(page).get_by_role("textbox", name="Text")
    box.press_sequentially(TEXT[:30], delay=5)
    box.press_sequentially(TEXT[30:] + "\n", delay=5)
    expected = read(translators["text"], TEXT)
    assert len(expected[0]) > 3
    shows(page, [[word for word, _ in line] for line in expected])
    assert translation(page) == expected
    page.screenshot(path=tmp_path / "interpret.png")
    lags = [lag for line in expected for _, lag in line]
    measures = tab(page).get_by_label("Measures")
    assert f"{sum(lags) / len(lags):.1f} words" in measures.inner_text()


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_says_what_it_says_in_python(page, translators, policy):
    tab(page).get_by_label("Policy").select_option(policy)
    tab(page).get_by_role("textbox", name="Text").fill(SENTENCES)
    press(page, "Say the rest")
    expected = read(translators["text"], SENTENCES, policy)
    shows(page, [[word for word, _ in line] for line in expected])
    assert translation(page) == expected


def test_an_edit_begins_anew_and_lines_end_sentences(page, translators):
    box = tab(page).get_by_role("textbox", name="Text")
    box.fill("seven one nine hundred \nfive thousand\n")
    box.fill("nine five three hundred\nseven\nthree and ")
    press(page, "Say the rest")
    expected = read(translators["text"], "nine five three hundred\nseven\nthree and")
    shows(page, [[word for word, _ in line] for line in expected])
    press(page, "Clear")
    shows(page, [])


@pytest.mark.parametrize("policy", ["wait-1", "align-1", "offline"])
def test_a_sound_file_is_heard_as_in_python(page, translators, recording, sound, policy):
    choose(page, "speech")
    tab(page).get_by_label("Policy").select_option(policy)
    tab(page).get_by_label("as fast as it was spoken").uncheck()
    tab(page).get_by_label("Sound file").set_input_files(recording)
    says(page, r"Heard 5\.0 s to the end")
    expected = hear(translators["speech"], sound, policy)
    assert len(expected) > 3
    assert words(page) == [expected]
    assert all(lag > 0 for _, lag in translation(page)[0])


def drop(page, path):
    """Drop a file onto the tab."""
    data = [*path.read_bytes()]
    page.evaluate(
        """([name, data]) => {
            const files = new DataTransfer();
            files.items.add(new File([new Uint8Array(data)], name));
            const options = { dataTransfer: files, bubbles: true, cancelable: true };
            const place = document.querySelector("#interpret .drop");
            place.dispatchEvent(new DragEvent("drop", options));
        }""",
        [path.name, data],
    )


def test_a_dropped_file_is_heard_as_fast_as_it_was_spoken(page, translators, sound, tmp_path):
    choose(page, "speech")
    short = sound[: 2 * RATE]
    drop(page, write_wav(tmp_path / "dropped.wav", short))
    says(page, r"Heard 0\.\d s \.\.\.|Heard 1\.\d s …|Heard 0\.\d s …")
    page.screenshot(path=tmp_path / "heard.png")
    says(page, r"Heard 2\.0 s to the end")
    assert words(page) == [hear(translators["speech"], short)]


def test_a_file_at_another_rate_is_resampled(page, sound, tmp_path):
    choose(page, "speech")
    tab(page).get_by_label("as fast as it was spoken").uncheck()
    tab(page).get_by_label("Sound file").set_input_files(
        write_wav(tmp_path / "fast.wav", sound, 44100)
    )
    says(page, r"Heard 1\.8 s to the end")
    assert words(page)[0]


def test_what_cannot_be_heard_is_told(page, recording, tmp_path):
    drop(page, recording)
    warns(page, "Spoken.wav cannot be heard: the model translates text; choose one of speech")
    choose(page, "speech")
    (tmp_path / "song.mp3").write_text("no sound")
    drop(page, tmp_path / "song.mp3")
    warns(page, r"Song.mp3 is no sound file that this browser can read .*; give a WAV, FLAC")
    tab(page).get_by_label("as fast as it was spoken").uncheck()
    drop(page, recording)
    says(page, r"Heard 5\.0 s to the end")
    assert page.get_by_role("alert").is_hidden()


def test_what_is_spoken_is_translated(launch, url, translators, recording):
    """By a microphone that plays the recording again and again."""
    browser = launch(
        "--use-fake-ui-for-media-stream",
        "--use-fake-device-for-media-stream",
        f"--use-file-for-fake-audio-capture={recording}",
    )
    page = browser.new_context(service_workers="block").new_page()
    page.add_init_script(
        """globalThis.heard = [];
        const post = Worker.prototype.postMessage;
        Worker.prototype.postMessage = function (message, ...more) {
            if (message.type === "sound") globalThis.heard.push(...message.samples);
            return post.call(this, message, ...more);
        };"""
    )
    page.goto(f"{url}?model=speech#interpret")
    says(page, "Ready")
    press(page, "Speak")
    says(page, r"Heard ([3-9]|\d\d)\.\d s")
    press(page, "Stop")
    says(page, r"Heard .* s to the end")
    heard = np.array(page.evaluate("heard"), np.float32)
    assert np.abs(heard).max() > 0.1
    assert words(page) == [hear(translators["speech"], heard)]
    browser.close()


NO_MICROPHONE = "Object.defineProperty(navigator, 'mediaDevices', { value: undefined })"
REFUSED = (
    "navigator.mediaDevices.getUserMedia = async () => {"
    " throw new DOMException('Permission denied', 'NotAllowedError') }"
)


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (NO_MICROPHONE, "This browser gives the page no microphone; .* or give a sound file"),
        (REFUSED, "The microphone was refused; allow it for this page, or give a sound file"),
        ("", "No microphone was found; plug one in, or give a sound file|microphone was refused"),
    ],
    ids=["no-microphone", "refused", "not-found"],
)
def test_a_browser_without_a_microphone_is_told(context, url, recording, script, message):
    context.add_init_script(script)
    page = context.new_page()
    page.goto(f"{url}?model=speech")
    says(page, "Ready")
    press(page, "Speak")
    warns(page, message)
    tab(page).get_by_label("as fast as it was spoken").uncheck()
    tab(page).get_by_label("Sound file").set_input_files(recording)
    says(page, r"Heard 5\.0 s to the end")


def test_both_tabs_work_in_one_page(page, translators):
    tab(page).get_by_role("textbox", name="Text").fill(TEXT + "\n")
    expected = [[word for word, _ in line] for line in read(translators["text"], TEXT)]
    shows(page, expected)
    page.get_by_role("link", name="Write").click()
    tab(page).wait_for(state="hidden")
    says(page, "Ready")
    page.get_by_role("link", name="Interpret").click()
    shows(page, expected)


def test_it_works_offline_once_loaded(browser, site, serve, translators):
    context = browser.new_context()
    page = context.new_page()
    with serve(site) as address:
        page.goto(address)
        page.get_by_text("works offline now").wait_for(timeout=PATIENCE)
    page.goto(f"{address}#interpret")
    page.reload()
    says(page, "Ready")
    tab(page).get_by_role("textbox", name="Text").fill(TEXT + "\n")
    shows(page, [[word for word, _ in line] for line in read(translators["text"], TEXT)])
    context.close()


def test_frames_are_those_of_python(page, sound):
    settings = {"feature_size": 80, "sampling_rate": RATE, "lead": 240}
    settings |= {"mean": [12.0] * 80, "std": [3.0] * 80}
    samples = (sound[: RATE // 2] / 32768).astype(np.float32)
    found = page.evaluate(
        """async ([settings, samples, cuts]) => {
            const { FilterBank } = await import("./fbank.js");
            const stream = new FilterBank(settings).stream();
            return cuts.flatMap(([from, to]) =>
                stream(Float32Array.from(samples.slice(from, to))).map((frame) => [...frame]));
        }""",
        [settings, samples.tolist(), [*pairwise([0, 1, 700, 701, len(samples)])]],
    )
    expected = FilterBank(**settings).stream().push(samples)
    assert len(found) == len(expected) == 50
    np.testing.assert_allclose(np.array(found), expected, atol=1e-5)


@pytest.mark.parametrize("rate", [8000, 44100, 48000])
def test_another_rate_gives_the_same_tones(page, rate):
    found = page.evaluate(
        """async ([from, to]) => {
            const { resampler } = await import("./resample.js");
            const resample = resampler(from, to);
            const wave = (hertz, i) => Math.sin(2 * Math.PI * hertz * i / from);
            const tone = Float32Array.from({ length: from }, (_, i) =>
                wave(440, i) + wave(3000, i) / 2);
            const [a, b] = [tone.slice(0, 1000), tone.slice(1000)];
            return [...resample(a), ...resample(b)];
        }""",
        [rate, RATE],
    )
    times = np.arange(len(found)) / RATE
    expected = np.sin(2 * np.pi * 440 * times) + np.sin(2 * np.pi * 3000 * times) / 2
    assert len(found) > 0.98 * RATE
    np.testing.assert_allclose(found[200:], expected[200:], atol=2e-3)


def test_odd_characters_have_the_subwords_of_python(page, translators):
    numbers = [x for x in range(1, 0x3000) if not 0xD800 <= x < 0xE000]
    texts = [f"a{chr(x)}b" for x in numbers]
    texts += ["e\u0301a", "\uff46ive", "가\u11a8", "</s> <unk>", "a\u200bb", "👩‍👩‍👧 one", "①²ﬁ"]
    found = page.evaluate(
        """async ([name, texts]) => {
            const { Subwords } = await import("./vocabulary.js");
            const json = await (await fetch(`models/${name}/tokenizer.json`)).json();
            const subwords = new Subwords(json);
            return texts.map((text) => subwords.encode(text));
        }""",
        ["text", texts],
    )
    expected = Subwords(read_tokenizer(translators["text"] / "tokenizer.json")).encode_all(texts)
    differ = [text for text, a, b in zip(texts, found, expected, strict=True) if a != b]
    assert not differ


def edited(change):
    def apply(folder):
        path = folder / "manifest.json"
        manifest = json.loads(path.read_text())
        change(manifest)
        path.write_text(json.dumps(manifest))

    return apply


def cut(file):
    def change(folder):
        path = folder / file
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])

    return change


BROKEN = [
    (cut("manifest.json"), "manifest.json is not a whole JSON file"),
    (edited(lambda x: x.update(version=2)), "version 2 of the format, and this is version 1"),
    (edited(lambda x: x.update(task="lm")), "holds a model for lm, and one for text or speech"),
    (edited(lambda x: x.pop("translation")), r"does not tell what it should \(translation\)"),
    (edited(lambda x: x.update(translation={})), "does not tell how its model reads"),
    (
        edited(lambda x: x["translation"]["sound"].update(sampling_rate=0)),
        "does not tell how its model reads",
    ),
    (edited(lambda x: x["graphs"].pop("write")), "no graph called write"),
    (edited(lambda x: x.update(vocabulary=7)), "knows 7 subwords, and its tokenizer 60"),
    (cut("write.onnx"), "write.onnx is no graph that can be run"),
    (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer.json is missing"),
]


def test_folders_that_are_no_exports_are_told_and_others_still_work(page, translators, tmp_path):
    for number, (change, message) in enumerate(BROKEN):
        folder = tmp_path / f"broken-{number}"
        shutil.copytree(translators["speech"], folder)
        change(folder)
        tab(page).get_by_label("Exported folder").set_input_files(folder)
        warns(page, f"roken-{number}.*{message}")
        assert tab(page).get_by_label("Policy").is_disabled()
    choose(page, "text")
    tab(page).get_by_role("textbox", name="Text").fill(TEXT + "\n")
    shows(page, [[word for word, _ in line] for line in read(translators["text"], TEXT)])


def test_a_word_without_end_and_a_policy_that_does_not_fit_are_told(page, translators):
    box = tab(page).get_by_role("textbox", name="Text")
    box.fill("a" * 2000 + " ")
    warns(page, r"A word of more than 1000 characters, a{20}\.\.\.; give text")
    box.fill(TEXT + "\n")
    shows(page, [[word for word, _ in line] for line in read(translators["text"], TEXT)])
    assert page.get_by_role("alert").is_hidden()


def test_it_fits_any_screen(page, tmp_path):
    page.emulate_media(color_scheme="dark")
    tab(page).get_by_role("textbox", name="Text").fill(TEXT + "\n")
    for name in ("text", "speech"):
        choose(page, name)
        for width in (360, 760, 1400):
            page.set_viewport_size({"width": width, "height": 800})
            page.screenshot(path=tmp_path / f"{name}-{width}.png", full_page=True)
            assert page.evaluate("document.documentElement.scrollWidth") <= width
