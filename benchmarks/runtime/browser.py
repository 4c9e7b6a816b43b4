"""CPU time per token in a browser: our model beside GPT-2, in onnxruntime's WebAssembly.

    python benchmarks/runtime/browser.py [--context 1024] [--tokens 100] [--preset small]

The models are those of `leap bench runtime`, with random weights. Each graph is run in Debian's
chromium, without a window, in the page that `make web` builds; CPU time is that of the process that
shows the page, as the browser tells it.
"""

import argparse
import functools
import http.server
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import torch
from playwright.sync_api import sync_playwright

from leap.bench.decode import GPT2, random_model
from leap.bench.runtime import Gpt2Step, trace_gpt2
from leap.export.graph import in_int8
from leap.export.lm import traced
from leap.tasks.lm.tokenizer import byte_tokenizer

ROOT = Path(__file__).parents[2]
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
STEP = """async ([file, inputs, n]) => {
    const ort = await import("./vendor/ort.mjs");
    ort.env.wasm.numThreads = 1;
    ort.env.wasm.wasmPaths = { wasm: new URL("vendor/ort.wasm", location.href).href };
    globalThis.session ??= {};
    globalThis.session[file] ??= await ort.InferenceSession.create(
        new Uint8Array(await (await fetch(file)).arrayBuffer()));
    const arrays = { float32: Float32Array, float64: Float64Array, int64: BigInt64Array };
    const given = {};
    for (const [name, type, dims, fill] of inputs) {
        const data = new arrays[type](dims.reduce((a, b) => a * b, 1));
        data.fill(type === "int64" ? BigInt(fill) : Number(fill.replace("inf", "Infinity")));
        given[name] = new ort.Tensor(type, data, dims);
    }
    for (let i = 0; i < n; i++) await globalThis.session[file].run(given);
}"""


def graphs(name, preset, context):
    """The graph of a model, and what it is to be given: name, type, dimensions, value."""
    model = random_model(name, preset, context + 1, 0).eval()
    if name == GPT2:
        heads, width = model.config.n_head, model.config.n_embd // model.config.n_head
        past = [torch.zeros(1, heads, context, width) for _ in range(2 * model.config.n_layer)]
        graph = trace_gpt2(Gpt2Step(model).eval(), torch.zeros(1, 1, dtype=torch.long), past)
        inputs = [("tokens", "int64", [1, 1], "1")]
        return graph, inputs + [
            (f"past.{i}", "float32", list(x.shape), "0") for i, x in enumerate(past)
        ]
    manifest, graph = traced(model, byte_tokenizer())
    sizes = {"batch": 1, "tokens": context}
    inputs = [("tokens", "int64", [1, 1], "1"), ("at", "int64", [1], "0")]
    return graph, inputs + [
        (each.name, each.type, [sizes.get(x, x) for x in each.shape], f"{each.fill:g}")
        for each in manifest.states
    ]


def tell(line):
    """Write a line at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


class Handler(http.server.SimpleHTTPRequestHandler):
    """A file server that says nothing."""

    def log_message(self, *_):
        """Say nothing."""


def main():
    """Export, run and tell."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--preset", default="small")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        site = Path(folder, "web")
        subprocess.run(["node", ROOT / "web" / "build.mjs", site], check=True)
        found = {}
        for name in ("leapformer", "leap", GPT2):
            with torch.no_grad():
                graph, inputs = graphs(name, asked.preset, asked.context)
            for precision in ("float32", "int8"):
                file = f"{name}-{precision}.onnx"
                made = graph if precision == "float32" else in_int8(graph)
                (site / file).write_bytes(made.SerializeToString())
                found[name, precision] = file, inputs
        server = http.server.ThreadingHTTPServer(
            ("127.0.0.1", 0), functools.partial(Handler, directory=str(site))
        )
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(
                executable_path=shutil.which("chromium"), args=FLAGS
            )
            told = browser.new_browser_cdp_session()

            def cpu():
                listed = told.send("SystemInfo.getProcessInfo")["processInfo"]
                return sum(each["cpuTime"] for each in listed if each["type"] == "renderer")

            page = browser.new_page()
            page.set_default_timeout(0)
            page.goto(f"http://127.0.0.1:{server.server_port}/")
            page.wait_for_timeout(2000)
            tell("| model | precision | CPU ms per token |\n| --- | --- | --: |")
            for (name, precision), (file, inputs) in found.items():
                page.evaluate(STEP, [file, inputs, 20])  # Loads, and lets V8 compile.
                took = []
                for _ in range(3):
                    before = cpu()
                    page.evaluate(STEP, [file, inputs, asked.tokens])
                    took.append((cpu() - before) / asked.tokens)
                tell(f"| {name} | {precision} | {1000 * min(took):.2f} |")
            browser.close()
        server.shutdown()


if __name__ == "__main__":
    main()
