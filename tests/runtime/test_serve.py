"""Exported folders behind `leap serve`: here, beside the exports that other tests make."""

import contextlib
import json
import shutil
import subprocess
import sys
import threading

import numpy as np
import pytest

from leap.cli import main
from leap.runtime import Translator, Writer
from leap.serve.protocol import Kept, Model

testclient = pytest.importorskip("fastapi.testclient", reason="the extra serve is not installed")
config = pytest.importorskip("leap.serve.config")
exported = pytest.importorskip("leap.serve.exported")
PROMPTS = ["import os", "def wait(self):\n    return ", "", "class Popen" * 3]
LINES = ["three hundred and nine", "seven", "five thousand sixty-eight seven one"]


@contextlib.contextmanager
def serving(folder, **settings):
    with testclient.TestClient(config.build(config.ServeConfig(run=folder, **settings))) as client:
        yield client


def at_once(*calls):
    """What some functions give that are called side by side."""
    found = [None] * len(calls)

    def keep(i, call):
        found[i] = call()

    threads = [threading.Thread(target=keep, args=each) for each in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    return found


@pytest.mark.parametrize("kind", ["fading", "hybrid"])
def test_many_users_get_what_each_gets_alone(request, kind):
    folder = request.getfixturevalue(kind)[1]
    writer = Writer(folder)

    def ask(prompt, tokens):
        asked = {"prompt": prompt, "max_tokens": tokens, "temperature": 0}
        answer = client.post("/v1/completions", json=asked)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["text"]

    with serving(folder, slots=3, block=8, budget=16) as client:
        wanted = [(prompt, 8 + 3 * i) for i, prompt in enumerate(PROMPTS)]
        found = at_once(*(lambda each=each: ask(*each) for each in wanted))
    assert found == [writer.generate(p, tokens=n, temperature=0.0).text for p, n in wanted]
    assert isinstance(exported.ExportedModel(folder), Model)


def test_texts_of_states_that_keep_their_size_are_read_as_one_batch(fading, monkeypatch):
    model = exported.ExportedModel(fading[1])
    shapes, logits = [], model.writer.logits

    def spied(tokens, past, at=None):
        shapes.append(tokens.shape)
        return logits(tokens, past, at)

    monkeypatch.setattr(model.writer, "logits", spied)
    _, state = model.read([[1, 2], [3, 4]], model.join([model.empty(), model.empty()]))
    found, state = model.read([[5], [6, 7]], state)
    assert shapes == [(2, 2), (1, 1), (1, 2)]
    alone = [model.read([row], model.empty())[0] for row in ([1, 2, 5], [3, 4, 6, 7])]
    np.testing.assert_allclose(found, np.concatenate(alone), atol=1e-4)


def test_a_text_is_saved_and_gone_on_with(hybrid, tmp_path):
    _, folder, _ = hybrid
    model = exported.ExportedModel(folder)
    tokens = model.begin() + model.encode("import sub")
    _, state = model.read([tokens], model.empty())
    model.save(Kept(state, (*tokens, 5), len(tokens)), tmp_path / "text")
    kept = model.load(tmp_path / "text")
    assert kept.tail == (5,) and kept.n_read == len(tokens)
    found, _ = model.read([[5]], kept.state)
    expected, _ = model.read([[*tokens, 5]], model.empty())
    np.testing.assert_allclose(found, expected, atol=1e-4)


def sound(seed):
    noise = np.random.default_rng(seed).standard_normal(24000)
    return (6000 * noise * np.sin(np.arange(24000) / 3000) ** 2).astype("<i2")


@pytest.mark.parametrize("kind", ["text", "speech"])
def test_streams_side_by_side_have_the_words_they_have_alone(folders, kind):
    folder = folders(kind)[1]
    sources = LINES if kind == "text" else [sound(i) for i in range(3)]
    translator = Translator(folder, "wait-1", reset=200)

    def alone(source):
        stream = translator.stream()
        if kind == "speech":
            source = source.astype(np.float32) / 32768
        return stream.push(source) + stream.finish()

    def use(source):
        found = []
        with client.websocket_connect("/v1/translations") as socket:
            socket.send_json({"type": "start", "policy": "wait-1"})
            assert socket.receive_json()["type"] == "ready"
            for start in range(0, len(source), 7 if kind == "text" else 3000):
                if kind == "text":
                    socket.send_json({"type": "text", "text": source[start : start + 7]})
                else:
                    socket.send_bytes(source[start : start + 3000].tobytes())
            socket.send_json({"type": "end"})
            while (answer := socket.receive_json())["type"] == "words":
                found += answer["words"]
            assert answer["type"] == "end", answer
        return found

    with serving(folder) as client:
        found = at_once(*(lambda source=source: use(source) for source in sources))
    assert found == [alone(source) for source in sources]
    assert any(found)


CODE = """
import sys
from pathlib import Path
from leap.cli.serve import serving
for run in sys.argv[1:]:
    serving.build(serving.ServeConfig(run=Path(run)))
print(*sys.modules)
"""


def test_it_serves_without_torch(fading, folders):
    command = [sys.executable, "-c", CODE, str(fading[1]), str(folders("text")[1])]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert not {"torch", "transformers"} & {*done.stdout.split()}


def cut(folder):
    path = folder / "step.onnx"
    path.write_bytes(path.read_bytes()[:1000])


def edited(**values):
    def change(folder):
        path = folder / "manifest.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (cut, r"step.onnx is no graph that can be run"),
        (edited(version=9), "exported in version 9 of the format, and this is version 1"),
        (edited(task="images"), "holds a model for images, and one for lm or text or speech"),
        (edited(graphs={}), "has no graph called step"),
    ],
    ids=["truncated", "version", "task", "graphs"],
)
def test_a_folder_that_is_no_export_is_one_line(fading, tmp_path, capsys, change, message):
    folder = tmp_path / "broken"
    shutil.copytree(fading[1], folder)
    change(folder)
    with pytest.raises(SystemExit) as leaving:
        main(["serve", "--run", str(folder), "--port", "0"])
    error = capsys.readouterr().err
    assert leaving.value.code == 1 and error.count("\n") == 1
    assert message in error
