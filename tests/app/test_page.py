"""The page in a browser, used as a person would; and by many at once."""

import os
import re
import shutil
import signal
import subprocess
import sys
import wave
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import numpy as np
import pytest

httpx = pytest.importorskip("httpx", reason="the extra dev is not installed")
pytest.importorskip("gradio", reason="the extra app is not installed")

CHROMIUM = shutil.which("chromium")
FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"),
    *("--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream"),
]
PATIENCE = 120_000
"""Milliseconds that a busy machine may take."""
MOST = 300
"""Characters that this page takes."""
SOURCE = "three hundred and nine seven"
HOSTILE = "<b>one</b> ${1+1} {{two}} <img src=x onerror=alert(1)> & three"


@pytest.fixture(scope="module")
def url(lm_run, exported, classifier, translator, speech_translator, recorded):
    """The page of every kind of model, as the command serves it."""
    folders = (lm_run, exported, classifier, translator, speech_translator)
    given = ("--run", *folders, "--benchmarks", recorded, "--port", 0)
    bounds = ("--max-characters", MOST, "--max-seconds", 20, "--max-upload", 4, "--max-tokens", 40)
    command = [sys.executable, "-m", "leap.cli", "app", *map(str, (*given, *bounds))]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ
    ) as server:
        said = server.stdout.readline()
        found = re.fullmatch(r"open (http://127\.0\.0\.1:\d+) in a browser; Ctrl-C ends it\n", said)
        assert found, server.communicate()
        yield found[1]
        server.send_signal(signal.SIGINT)
        _, err = server.communicate(timeout=60)
    assert "Traceback" not in err and "request failed" not in err, err


@pytest.fixture(scope="module")
def spoken(tmp_path_factory):
    """A sound file, which the browser's microphone plays again and again: a tone of 440 Hz."""
    file = tmp_path_factory.mktemp("spoken") / "tone.wav"
    tone = 0.5 * np.sin(2 * np.pi * 440 * np.arange(2 * 48000) / 48000)
    with wave.open(str(file), "wb") as written:
        written.setnchannels(1)
        written.setsampwidth(2)
        written.setframerate(48000)
        written.writeframes((tone * 32767).astype("<i2").tobytes())
    return file


@pytest.fixture(scope="module")
def browser(spoken):
    playwright = pytest.importorskip("playwright.sync_api", reason="browsing needs playwright")
    if CHROMIUM is None:
        pytest.skip("browsing needs chromium")
    flags = [*FLAGS, f"--use-file-for-fake-audio-capture={spoken}"]
    with playwright.sync_playwright() as started:
        found = started.chromium.launch(executable_path=CHROMIUM, args=flags)
        yield found
        found.close()


@pytest.fixture
def page(browser, url):
    """The page, open, of which every request is to this machine and nothing goes wrong in it."""
    context = browser.new_context(viewport={"width": 1100, "height": 820}, color_scheme="light")
    context.set_default_timeout(PATIENCE)
    found = context.new_page()
    asked, wrong = set(), []
    found.on("request", lambda request: asked.add(urlsplit(request.url)))
    found.on("pageerror", lambda error: wrong.append(str(error)))
    found.on("dialog", lambda dialog: (wrong.append(dialog.message), dialog.dismiss()))
    found.goto(url)
    yield found
    assert {each.hostname for each in asked if each.scheme.startswith("http")} == {"127.0.0.1"}
    assert not wrong
    context.close()


def open_tab(page, name, model=None):
    page.get_by_role("tab", name=name).click()
    if model is not None:
        box = page.get_by_role("tabpanel").filter(visible=True).get_by_label("Model")
        box.click()
        page.get_by_role("option", name=model, exact=True).click()
        page.wait_for_timeout(1500)  # Its form takes the place of another, and clicks are lost.


def press(page, name):
    page.get_by_role("button", name=name, exact=True).click()


def says(page, words, timeout=PATIENCE):
    """Wait until the status of the tab says something."""
    status = page.get_by_role("status").filter(has_text=re.compile(words)).filter(visible=True)
    status.wait_for(timeout=timeout)


def warns(page, words, timeout=PATIENCE):
    toast = page.get_by_test_id("toast-text").filter(has_text=re.compile(words)).first
    toast.wait_for(timeout=timeout)
    assert "Traceback" not in toast.inner_text()


def interpret(page, reaction, words):
    """Press until it answers: a click is lost while another model's form takes its place."""
    playwright = pytest.importorskip("playwright.sync_api")
    for _ in range(5):
        press(page, "Interpret to the end")
        try:
            return reaction(page, words, PATIENCE / 5)
        except playwright.TimeoutError:
            continue
    return reaction(page, words)


def measure(page, name):
    panel = page.get_by_label("Measures").filter(visible=True)
    return panel.get_by_text(name).locator("xpath=../strong").inner_text()


@pytest.mark.parametrize("model", ["writer", "exported-writer"])
def test_write_goes_on_and_tells_what_carried_a_token(page, model, tmp_path):
    open_tab(page, "Write", model)
    page.get_by_label("Begin with").fill(HOSTILE)
    page.get_by_label("number input for Temperature").fill("0")
    press(page, "Write")
    says(page, r"Wrote 40 tokens")
    text = page.locator("#written")
    assert text.text_content().strip().startswith(HOSTILE)
    assert int(measure(page, "Tokens per second").replace(",", "")) > 0
    assert measure(page, "State, the same after every token").endswith(" kB")
    assert measure(page, "Tokens written") == "40" and measure(page, "Tokens read") == "62"
    text.locator("[data-i]").nth(9).click()
    says(page, "What counted most for .* in nats, by " + ("st" if "exp" in model else "roll-up"))
    assert text.locator(".chosen").count() == 1
    assert text.locator("[style*=background]").count() > 3
    page.screenshot(path=tmp_path / "write.png")


def test_writing_can_be_stopped_and_bad_input_is_a_sentence(page):
    open_tab(page, "Write")
    page.get_by_label("Begin with").fill(" ")
    press(page, "Write")
    warns(page, "there is no text yet; type or paste some")
    page.get_by_label("Begin with").fill("a" * (MOST + 1))
    press(page, "Write")
    warns(page, f"the text has {MOST + 1} characters, and this page takes {MOST}")
    press(page, "Stop")


def test_explain_shades_and_strikes_out(page, tmp_path):
    open_tab(page, "Explain", "writer")
    page.get_by_label("Text to explain").fill("one two three")
    press(page, "Explain")
    says(page, "Predicted: .* Click a word to strike it out")
    shown = page.locator("#explained")
    assert shown.locator("[style*=background]").count() > 3
    page.locator(".js-plotly-plot .heatmaplayer").wait_for()
    shown.locator("[data-i]").nth(5).click()
    says(page, "Without what is struck out, ")
    assert shown.locator(".struck").all_text_contents() == [" ", "t", "w", "o"]
    assert page.get_by_role("columnheader", name="struck out").count() == 1
    page.screenshot(path=tmp_path / "explain.png")
    shown.locator(".struck").nth(1).press("Enter")
    says(page, "Click a word to strike it out")


@pytest.mark.parametrize(
    ("model", "words"),
    [("reviewer", "Predicted: 'class [01]'"), ("exported-writer", "does not show its layers")],
)
def test_explain_is_for_classes_and_exported_models_too(page, model, words):
    open_tab(page, "Explain", model)
    page.get_by_label("Text to explain").fill("a good film")
    press(page, "Explain")
    says(page, words)


def test_interpret_translates_as_one_types_and_tells_what_a_word_took(page, tmp_path):
    open_tab(page, "Interpret", "text-translator")
    page.get_by_label("Policy").fill("wait-1")
    page.get_by_label("Policy").press("Enter")
    box = page.get_by_label("Source, translated as you type")
    box.press_sequentially(SOURCE[:18], delay=20)
    says(page, "As far as the source goes")
    box.press_sequentially(SOURCE[18:])
    interpret(page, says, "Click a word to see what it took")
    assert " ".join(page.locator("#source").text_content().split()) == SOURCE
    assert measure(page, "LAAL").endswith(" words")
    page.locator("#translation [data-i]").first.click()
    says(page, "took most of|rests on nothing")
    page.screenshot(path=tmp_path / "interpret.png")


def test_interpret_takes_files_and_says_why_it_does_not(page, tmp_path):
    open_tab(page, "Interpret", "text-translator")
    file = tmp_path / "source.txt"
    upload = page.locator("input[type=file]").first
    file.write_text("seven one")
    upload.set_input_files(file)
    box = page.get_by_label("Source, translated as you type")
    page.wait_for_function("e => e.value === 'seven one'", arg=box.element_handle())
    other = tmp_path / "other.txt"  # A browser does not take the same file twice.
    other.write_bytes(b"\xff\xfe\xff")
    upload.set_input_files(other)
    warns(page, "the file is no text in UTF-8")
    page.get_by_label("Policy").fill("hurry")
    page.get_by_label("Policy").press("Enter")
    interpret(page, warns, "hurry")


def test_interpret_hears_a_file(page, tmp_path):
    soundfile = pytest.importorskip("soundfile", reason="reading sound needs soundfile")
    open_tab(page, "Interpret", "speech-translator")
    interpret(page, warns, "there is no sound yet; upload or record some")
    noise = np.random.default_rng(0).standard_normal(21 * 16000) / 20
    for seconds, words in ((21, "the sound lasts 21 s, and this page takes 20"), (1, None)):
        soundfile.write(tmp_path / "talk.wav", noise[: seconds * 16000], 16000)
        page.locator("input[type=file]").last.set_input_files(tmp_path / "talk.wav")
        page.get_by_label("Remove").or_(page.get_by_label("Clear")).first.wait_for()
        if words is None:
            interpret(page, says, "Click a word to see what it took")
            assert measure(page, "Mean lag of a word").endswith(" ms")
        else:
            interpret(page, warns, words)
            page.get_by_label("Remove").or_(page.get_by_label("Clear")).first.click()


def test_interpret_hears_a_microphone(page):
    soundfile = pytest.importorskip("soundfile", reason="reading sound needs soundfile")
    open_tab(page, "Interpret", "speech-translator")
    page.get_by_label("Record audio").click()
    page.locator("button.record-button:visible").click()
    page.wait_for_timeout(1500)
    with page.expect_response("**/gradio_api/upload*") as sent:
        page.locator("button.stop-button:visible").click()
    sound, rate = soundfile.read(sent.value.json()[0], always_2d=True)
    heard = sound[:, 0]
    assert len(heard) > rate and np.abs(heard).max() > 0.1
    spectrum = np.abs(np.fft.rfft(heard))
    assert np.fft.rfftfreq(len(heard), 1 / rate)[spectrum.argmax()] == pytest.approx(440, rel=0.02)
    interpret(page, says, "Click a word to see what it took")
    assert measure(page, "Mean lag of a word").endswith(" ms")


def test_compare_draws_what_is_chosen_and_tells_it_under_the_pointer(page, tmp_path):
    open_tab(page, "Compare")
    page.get_by_label("Benchmark").click()
    page.get_by_role("option", name="speed").click()
    says(page, "processor abacus <b>")
    points = page.locator(".js-plotly-plot .scatterlayer .point")
    page.wait_for_function("() => document.querySelectorAll('.scatterlayer .point').length === 6")
    points.first.hover(force=True)
    page.locator(".hovertext").filter(has_text="length: 128").wait_for()
    page.get_by_role("combobox", name="Across", exact=True).click()
    page.get_by_role("option", name="mechanism").click()
    page.wait_for_function("() => document.querySelectorAll('.barlayer .point').length > 0")
    page.screenshot(path=tmp_path / "compare.png")


def write_by_http(url, prompt):
    """What a user gets who asks without a browser: the last of what the page would show."""
    asked = {"data": ["writer", prompt, 20, 0, 0]}
    with httpx.Client(timeout=300) as client:
        event = client.post(f"{url}/gradio_api/call/write", json=asked).json()["event_id"]
        told = client.get(f"{url}/gradio_api/call/write/{event}").text
    assert "event: complete" in told, told
    return re.sub(r"<[^>]*>", "", told.rpartition("data: ")[2].split('"')[3])


TABS = {
    "write": lambda text: ["writer", text, 2, 0, 0],
    "explain": lambda text: ["writer", text],
    "interpret": lambda text: ["text-translator", "wait-3", text, None],
    "typed": lambda text: ["text-translator", "wait-3", text],
}
"""What each tab sends of a text."""


@pytest.mark.parametrize("tab", TABS)
def test_texts_of_any_length_get_an_answer_or_a_sentence(url, tab):
    def ask(text):
        with httpx.Client(timeout=300) as client:
            asked = client.post(f"{url}/gradio_api/call/{tab}", json={"data": TABS[tab](text)})
            told = client.get(f"{url}/gradio_api/call/{tab}/{asked.json()['event_id']}").text
        assert "Traceback" not in told
        return told

    tokens = "one " * 100_000
    assert f"the text has 400,000 characters, and this page takes {MOST}" in ask(tokens)
    assert "event: complete" in ask("a")
    assert ("event: complete" if tab == "typed" else "there is no text yet") in ask("")


def test_twenty_users_at_once_get_what_each_would_get_alone(url):
    prompts = [f"user {i % 4}" for i in range(20)]
    alone = {prompt: write_by_http(url, prompt) for prompt in set(prompts)}
    with ThreadPoolExecutor(20) as pool:
        together = list(pool.map(lambda prompt: write_by_http(url, prompt), prompts))
    assert together == [alone[prompt] for prompt in prompts]


def test_what_is_too_large_or_from_elsewhere_is_refused(url):
    large = httpx.post(f"{url}/gradio_api/call/write", content=b"x" * (2**20 + 1))
    assert large.status_code == 413 and "1 MiB" in large.text
    files = {"files": ("a.txt", b"x" * (6 * 2**20))}
    assert httpx.post(f"{url}/gradio_api/upload", files=files).status_code == 413
    named = httpx.get(url, headers={"Host": "elsewhere.example"})
    assert named.status_code == 400
    policy = httpx.get(url).headers["content-security-policy"]
    assert policy.startswith("default-src 'self'") and "http" not in policy
