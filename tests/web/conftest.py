"""The page as it is built, served by a file server, in a browser without a window."""

import fcntl
import shutil
import subprocess
import sys
import threading
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
CHROMIUM = shutil.which("chromium")
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
SIZES = {"hidden_size": 32, "n_head": 4, "position_embedding": "none"}
MODELS = {
    "steady": {"attention": ["leapformer", "leap"], "n_layer": 2, "window_sizes": [None, 4]},
    "mixed": {"attention": ["gated-delta", "softmax", "cosformer"], "n_layer": 3, "convolution": 3},
}
"""One whose state is as large after any text, and one with the other kinds of state."""
TRANSLATORS = {
    "text": {
        "feature": "exp",
        "cross_attention": "leapformer,softmax",
        "cross_window": 8,
        "position_embedding": "alibi",
    },
    "speech": {"attention": "leapformer", "proportion": "travelled"},
}
SOURCE = "three hundred and nine five thousand sixty-eight (again) seven one"
TARGET = "dreihundertneun fünftausend achtundsechzig (noch einmal) sieben eins"


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Folders of exported models by name, with weights drawn at random and subwords."""
    for name in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(name, reason=f"exporting needs {name}")
    folder = tmp_path_factory.mktemp("models")
    text = folder / "text.txt"
    shutil.copy(subprocess.__file__, text)
    return {name: _exported(folder, name, text, **MODELS[name]) for name in MODELS}


@pytest.fixture(scope="session")
def translators(tmp_path_factory):
    """Folders of exported translation models by name, with weights drawn at random."""
    for name in ("onnx", "onnxscript", "onnxruntime", "sentencepiece", "kaldi_native_fbank"):
        pytest.importorskip(name, reason=f"exporting translation needs {name}")
    folder = tmp_path_factory.mktemp("translators")
    return {name: _translator(folder, name) for name in TRANSLATORS}


def _translator(folder, name):
    from leap.models.fbank import LeapformerFeatureExtractor
    from leap.runtime.streaming.vocabulary import EOS
    from leap.tasks.simul.model import ModelConfig, build_model, save_model
    from leap.tasks.simul.vocabulary import train_vocabulary

    extractor = None
    if name == "speech":
        extractor = LeapformerFeatureExtractor(mean=[12.0] * 80, std=[3.0] * 80)
    torch.manual_seed(1)
    vocabulary = train_vocabulary([SOURCE, TARGET], size=60)
    sizes = {"hidden_size": 16, "feed_forward_size": 16, "n_head": 2}
    config = ModelConfig(**sizes, n_layer=2, encoder_layers=2, **TRANSLATORS[name])
    model = build_model(config, vocabulary, extractor and 80)
    for parameter in model.parameters():
        parameter.data.mul_(2)
    model.lm_head.weight.data[EOS] *= 1.2
    begins = [i for i, piece in enumerate(vocabulary.pieces) if piece.startswith("▁")]
    model.lm_head.weight.data[begins] *= 1.5  # So that there are words, not one without an end.
    run, output = folder / "runs" / name, folder / name
    save_model(model, vocabulary, extractor, run)
    _export("--run", run, "--output", output)
    return output


def _export(*given):
    command = [sys.executable, "-m", "leap.cli", "export", *map(str, given)]
    subprocess.run(command, capture_output=True, text=True, check=True)


def _exported(folder, name, text, **settings):
    from leap.models import LeapformerConfig, LeapformerForCausalLM
    from leap.tasks.lm.tokenizer import train_tokenizer

    tokenizer = train_tokenizer([text.read_text(encoding="utf-8")], 400)
    tokens = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), tokenizer.eos_id)
    torch.manual_seed(0)
    model = LeapformerForCausalLM(
        LeapformerConfig(
            vocab_size=400,
            tokenizer_fingerprint=tokenizer.fingerprint,
            **tokens,
            **SIZES,
            **settings,
        )
    )
    for parameter in model.parameters():
        parameter.data.mul_(3)  # Else all tokens are alike.
    run, output = folder / "runs" / name, folder / name
    model.save_pretrained(run)
    tokenizer.save(run)
    _export("--run", run, "--output", output, "--data", text, "--tokens", 64)
    return output


def make(*arguments):
    """Run make in the project's folder."""
    return subprocess.run(
        ["make", "--no-print-directory", *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="session")
def build():
    """A function that builds the page with some models into a folder."""
    for tool in ("make", "npm", "node"):
        if shutil.which(tool) is None:
            pytest.skip(f"building the page needs {tool}")
    packages = "web/node_modules/.package-lock.json"
    with (ROOT / "web" / "package.json").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # Only one of the processes that run tests.
        done = make(packages)
    if done.returncode and not (ROOT / packages).exists():
        pytest.skip("npm could not fetch the packages of the page")
    return lambda output, *models: make(
        "web", f"WEB={output}", f"MODEL={' '.join(map(str, models))}"
    )


@pytest.fixture(scope="session")
def site(tmp_path_factory, build, models, translators):
    """The folder of the page with all models."""
    output = tmp_path_factory.mktemp("site") / "web"
    done = build(output, *models.values(), *translators.values())
    assert done.returncode == 0, done.stderr
    return output


class _Handler(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        """Say nothing."""


class _Server(ThreadingHTTPServer):
    def handle_error(self, *_):
        """Say nothing of pages that were closed while they loaded."""


@contextmanager
def served(folder):
    """The address of a folder while it is served."""
    server = _Server(("127.0.0.1", 0), partial(_Handler, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture(scope="session")
def serve():
    return served


@pytest.fixture(scope="session")
def url(site):
    with served(site) as address:
        yield address


@pytest.fixture(scope="session")
def launch():
    """A function that starts a browser with some more flags."""
    playwright = pytest.importorskip("playwright.sync_api", reason="browsing needs playwright")
    if CHROMIUM is None:
        pytest.skip("browsing needs chromium")
    with playwright.sync_playwright() as started:
        yield lambda *flags: started.chromium.launch(
            executable_path=CHROMIUM, args=[*FLAGS, *flags]
        )


@pytest.fixture(scope="session")
def browser(launch):
    found = launch()
    yield found
    found.close()


@pytest.fixture
def context(browser):
    """A person's visit; what the page keeps for being offline only costs time."""
    found = browser.new_context(
        viewport={"width": 1100, "height": 820}, color_scheme="light", service_workers="block"
    )
    found.set_default_timeout(60_000)
    yield found
    found.close()


@pytest.fixture
def page(context, url):
    """The page, open with the first model."""
    found = context.new_page()
    found.goto(url)
    return found
