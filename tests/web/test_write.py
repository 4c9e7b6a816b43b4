"""The tab Write, used as a person would, beside the Python runtime."""

import json
import re
import shutil
from urllib.parse import urlsplit

import pytest

from leap.runtime import Writer

PROMPT = "def read(path):  # naïve, “as is” 😀\n    with open(path) as "
PATIENCE = 120_000
"""Milliseconds that a busy machine may take."""


def tab(page):
    """The tab that is shown."""
    return page.get_by_role("region")


def says(page, pattern):
    """Wait until the status says something."""
    from playwright.sync_api import expect

    expect(page.get_by_role("status")).to_have_text(re.compile(pattern), timeout=PATIENCE)


def warns(page, pattern):
    """Wait for an error."""
    from playwright.sync_api import expect

    alert = page.get_by_role("alert")
    expect(alert).to_have_text(re.compile(pattern), timeout=PATIENCE)
    assert "\n" not in alert.inner_text()


def fill(page, **values):
    names = {"seed": "Random seed"}
    for name, value in values.items():
        tab(page).get_by_label(names.get(name, name.capitalize())).fill(str(value))


def press(page, name):
    page.get_by_role("button", name=name).click()


def write(page, prompt=PROMPT, *, temperature=0, seed=0, tokens=40):
    """Let the page write to the end."""
    says(page, "Ready|Wrote|ends here")
    fill(page, prompt=prompt, temperature=temperature, seed=seed, tokens=tokens)
    press(page, "Write")
    says(page, r"Wrote \d+ tokens?\.|ends here")
    return written(page)


def written(page):
    """What the text box shows."""
    return tab(page).get_by_label("The text").text_content()


def measure(page, name):
    return (
        tab(page).get_by_label("Measures").get_by_text(name).locator("xpath=../strong").inner_text()
    )


@pytest.fixture
def expected(models):
    """What the Python runtime writes."""

    def generate(model="steady", prompt=PROMPT, **settings):
        found = Writer(models[model]).generate(prompt, **{"tokens": 40, **settings})
        return prompt + found.text, found.past

    return generate


@pytest.mark.parametrize("model", ["steady", "mixed"])
def test_a_prompt_goes_on_as_in_python(page, expected, model, tmp_path):
    tab(page).get_by_label("Model").select_option(model)
    text, past = expected(model, temperature=0.0)
    assert write(page) == text
    page.screenshot(path=tmp_path / "write.png")
    assert measure(page, "Tokens read and written") == str(past.n_tokens)
    assert measure(page, "State") == f"{past.n_bytes / 1000:.1f} kB"
    assert int(measure(page, "Tokens per second").replace(",", "")) > 0


def test_a_prompt_longer_than_one_call_takes_goes_on_as_in_python(page, expected):
    text = PROMPT * 5
    assert write(page, text) == expected(prompt=text, temperature=0.0)[0]


def test_a_random_seed_writes_what_it_writes_in_python(page, expected):
    texts = [write(page, temperature=0.9, seed=seed) for seed in (0, 2**32 - 1)]
    assert texts[0] != texts[1]
    assert texts == [expected(temperature=0.9, seed=seed)[0] for seed in (0, 2**32 - 1)]


def test_a_text_is_gone_on_with_and_its_state_stays_as_large(page, expected):
    write(page, tokens=10)
    size = measure(page, "State")
    fill(page, tokens=30)
    press(page, "Go on")
    says(page, "Wrote 30 tokens")
    assert written(page) == expected(temperature=0.0)[0]
    assert measure(page, "State") == size


def test_stop_stops_and_another_text_can_begin(page, expected):
    from playwright.sync_api import expect

    says(page, "Ready")
    fill(page, prompt="a", tokens=1_000_000, temperature=1)
    press(page, "Write")
    expect(tab(page).get_by_label("The text")).to_have_text(
        re.compile("a.+", re.DOTALL), timeout=PATIENCE
    )
    press(page, "Stop")
    says(page, r"Wrote [\d,]+ tokens?|ends here")
    assert write(page) == expected(temperature=0.0)[0]


def test_a_folder_of_this_machine_is_opened(page, models, expected):
    says(page, "Ready")
    tab(page).get_by_label("Exported folder").set_input_files(models["mixed"])
    says(page, "Loading mixed|Ready")
    assert write(page) == expected("mixed", temperature=0.0)[0]


def test_nothing_is_asked_of_other_places(context, url):
    asked = []
    context.on("request", lambda request: asked.append(urlsplit(request.url)))
    page = context.new_page()
    page.goto(url)
    write(page)
    assert {each.netloc for each in asked if each.scheme != "blob"} == {urlsplit(url).netloc}


def test_it_works_offline_once_loaded(browser, site, serve, expected):
    context = browser.new_context()
    page = context.new_page()
    with serve(site) as address:
        page.goto(address)
        page.get_by_text("works offline now").wait_for(timeout=PATIENCE)
    page.reload()
    assert write(page) == expected(temperature=0.0)[0]
    context.close()


def edited(**values):
    def change(folder):
        path = folder / "manifest.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return change


def cut(file):
    def change(folder):
        path = folder / file
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])

    return change


def misshapen(folder):
    states = json.loads((folder / "manifest.json").read_text())["states"]
    edited(states=[states[0] | {"shape": ["batch", 7]}, *states[1:]])(folder)


def spaced(folder):
    path = folder / "tokenizer.json"
    path.write_text(path.read_text() + " ")


BROKEN = [
    (lambda folder: (folder / "manifest.json").unlink(), "No exported model at"),
    (cut("manifest.json"), "manifest.json is not a whole JSON file"),
    (edited(format="other"), "no manifest of an exported model"),
    (edited(version=99), "version 99 of the format, and this is version 1"),
    (edited(task="text"), "holds a model for text"),
    (edited(states=[{"name": "x"}]), r"does not tell what it should \(states\)"),
    (edited(graphs={}), "no graph called step"),
    (misshapen, r"and its manifest tells of \w+ \[batch,7\]"),
    (cut("step.onnx"), "step.onnx is no graph that can be run"),
    (lambda folder: (folder / "step.onnx").unlink(), "step.onnx is missing"),
    (cut("tokenizer.json"), "tokenizer.json is not a whole JSON file"),
    (spaced, "is not the model's own"),
]


def test_folders_that_are_no_exports_are_told_and_others_still_work(
    page, models, expected, tmp_path
):
    says(page, "Ready")
    for number, (change, message) in enumerate(BROKEN):
        folder = tmp_path / f"broken-{number}"
        shutil.copytree(models["steady"], folder)
        change(folder)
        tab(page).get_by_label("Exported folder").set_input_files(folder)
        warns(page, f"roken-{number}.*{message}|{message} broken-{number}")
        assert page.get_by_role("button", name="Write").is_disabled()
    tab(page).get_by_label("Model").select_option("steady")
    assert write(page, tokens=5) == expected(temperature=0.0, tokens=5)[0]
    assert page.get_by_role("alert").is_hidden()


def test_a_model_that_is_not_served_is_told(context, url):
    page = context.new_page()
    page.goto(f"{url}?model=nowhere")
    warns(page, "No exported model at nowhere; make one with leap export")


def test_learned_positions_end_in_one_line(page, models, tmp_path):
    shutil.copytree(models["steady"], tmp_path / "short")
    edited(n_positions=50)(tmp_path / "short")
    says(page, "Ready")
    tab(page).get_by_label("Exported folder").set_input_files(tmp_path / "short")
    says(page, "Ready")
    fill(page, prompt="abc", tokens=60)
    press(page, "Write")
    warns(page, "tokens read and 60 to write are more than the 50 positions this model has learned")
    fill(page, tokens=5)
    press(page, "Write")
    says(page, "Wrote 5 tokens|ends here")


def test_a_browser_without_webassembly_is_told(context, url):
    context.add_init_script("delete globalThis.WebAssembly")
    page = context.new_page()
    page.goto(url)
    warns(page, "no WebAssembly.*; use a current")


def test_it_fits_any_screen(page, tmp_path):
    page.emulate_media(color_scheme="dark")
    write(page, "a" * 300, tokens=20)
    for width in (360, 760, 1400):
        page.set_viewport_size({"width": width, "height": 800})
        page.screenshot(path=tmp_path / f"write-{width}.png", full_page=True)
        assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_without_a_model_the_page_asks_for_one(build, context, serve, tmp_path):
    assert build(tmp_path / "web").returncode == 0
    with serve(tmp_path / "web") as address:
        page = context.new_page()
        page.goto(address)
        says(page, "No model lies beside this page: open a folder of leap export")


def test_what_cannot_be_built_is_refused_in_one_line(build, models, tmp_path):
    def refused(output, *given):
        done = build(output, *given)
        assert done.returncode
        return done.stderr.splitlines()[0]

    web = tmp_path / "web"
    assert "no exported model at" in refused(web, tmp_path)
    assert "two models are called mixed" in refused(web, models["mixed"], models["mixed"])
    (tmp_path / "thesis.txt").write_text("")
    assert "holds something else" in refused(tmp_path)
    assert (tmp_path / "thesis.txt").exists() and not web.exists()
