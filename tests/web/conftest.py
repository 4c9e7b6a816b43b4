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


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Folders of exported models by name, with weights drawn at random and subwords."""
    for name in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(name, reason=f"exporting needs {name}")
    folder = tmp_path_factory.mktemp("models")
    text = folder / "text.txt"
    shutil.copy(subprocess.__file__, text)
    return {name: _exported(folder, name, text, **MODELS[name]) for name in MODELS}


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
    given = ("--run", run, "--output", output, "--data", text, "--tokens", 64)
    command = [sys.executable, "-m", "leap.cli", "export", *map(str, given)]
    subprocess.run(command, capture_output=True, text=True, check=True)
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
def site(tmp_path_factory, build, models):
    """The folder of the page with the models."""
    output = tmp_path_factory.mktemp("site") / "web"
    done = build(output, *models.values())
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
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="browsing needs playwright")
    if CHROMIUM is None:
        pytest.skip("browsing needs chromium")
    with playwright.sync_playwright() as started:
        found = started.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
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
