"""CPU time per token in a browser, by onnxruntime's WebAssembly.

    leap bench runtime --keep graphs
    python benchmarks/runtime/browser.py graphs [--context 1024] [--tokens 100]

Each graph that the first command kept is run in Debian's chromium, without a window, in the page
that `make web` builds; CPU time is that of the process that shows the page, as the browser has it.
"""

import argparse
import functools
import http.server
import json
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from playwright.sync_api import sync_playwright

ROOT = Path(__file__).parents[2]
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
STEPS = """async ([file, fills, context, n]) => {
    const ort = await import("./vendor/ort.mjs");
    ort.env.wasm.numThreads = 1;
    ort.env.wasm.wasmPaths = { wasm: new URL("vendor/ort.wasm", location.href).href };
    globalThis.sessions ??= {};
    globalThis.sessions[file] ??= await ort.InferenceSession.create(
        new Uint8Array(await (await fetch(file)).arrayBuffer()), { logSeverityLevel: 3 });
    const session = globalThis.sessions[file];
    const arrays = { float32: Float32Array, float64: Float64Array, int64: BigInt64Array };
    const given = {};
    for (const { name, type, shape } of session.inputMetadata) {
        const isState = name !== "tokens" && name !== "at";
        const free = (axis) => (isState && axis ? context : 1);
        const dims = shape.map((size, axis) => (Number.isInteger(size) ? size : free(axis)));
        const fill = Number(String(fills[name] ?? 0).replace("inf", "Infinity"));
        const data = new arrays[type](dims.reduce((a, b) => a * b, 1));
        given[name] = new ort.Tensor(type, data.fill(type === "int64" ? BigInt(fill) : fill), dims);
    }
    for (let i = 0; i < n; i++) await session.run(given);
}"""


def fills(folder):
    """What states are filled with before the first token, by name."""
    manifest = folder / "manifest.json"
    if not manifest.exists():
        return {}
    return {each["name"]: each["fill"] for each in json.loads(manifest.read_text())["states"]}


def tell(line):
    """Write a line at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


class Handler(http.server.SimpleHTTPRequestHandler):
    """A file server that says nothing."""

    def log_message(self, *_):
        """Say nothing."""


def main():
    """Run the graphs, and tell."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("graphs", type=Path, help="what leap bench runtime --keep left")
    parser.add_argument("--context", type=int, default=1024, help="tokens of a KV cache")
    parser.add_argument("--tokens", type=int, default=100)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        site = Path(folder, "web")
        subprocess.run(["node", ROOT / "web" / "build.mjs", site], check=True)
        found = sorted(asked.graphs.glob("*/*/step.onnx"))
        for path in found:
            shutil.copy(path, site / f"{path.parts[-3]}-{path.parts[-2]}.onnx")
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
            page.get_by_text("No model lies beside this page").wait_for()
            tell("| model | precision | CPU ms per token |\n| --- | --- | --: |")
            for path in found:
                name, precision = path.parts[-3:-1]
                given = [f"{name}-{precision}.onnx", fills(path.parent), asked.context]
                page.evaluate(STEPS, [*given, 20])  # Loads, and lets V8 compile.
                took = []
                for _ in range(3):
                    before = cpu()
                    page.evaluate(STEPS, [*given, asked.tokens])
                    took.append((cpu() - before) / asked.tokens)
                tell(f"| {name} | {precision} | {1000 * min(took):.2f} |")
            browser.close()
        server.shutdown()


if __name__ == "__main__":
    main()
