import json
import re
import subprocess
import sys

import numpy as np
import pytest
import torch

from leap.errors import ConfigError, FileError, InputError
from leap.runtime import Writer
from leap.runtime.writer import Sampler
from leap.tasks.lm.generate import write_on
from leap.tasks.lm.model import load_model
from leap.tasks.lm.writing import GenerateConfig, generate

PROMPT = "def read(path):\n    with open(path) as file, not one that is"


@pytest.fixture(scope="module")
def torch_model(hybrid):
    return load_model(hybrid[0])


@pytest.fixture(scope="module")
def writer(hybrid):
    return Writer(hybrid[1])


@pytest.fixture
def greedy(hybrid):
    return GenerateConfig(run=hybrid[1], prompt=PROMPT, tokens=30, temperature=0.0, past_end=True)


def test_an_export_tells_how_close_it_is_to_torch(hybrid):
    found = re.search(r"largest difference from torch (\S+)\nperplexity per token (\S+)", hybrid[2])
    assert float(found[1]) < 1e-5
    assert 1 < float(found[2]) < 1e4
    card = (hybrid[1] / "README.md").read_text()
    assert found[2] in card and "gated-delta" in card


def test_greedy_text_is_torchs(torch_model, greedy):
    expected = write_on(*torch_model, greedy)
    found = generate(greedy)
    assert found.tokens == expected.tokens
    assert found.text == expected.text


def test_a_model_with_gates_and_clocks_and_learned_positions_writes_the_same(fading):
    config = GenerateConfig(
        run=fading[1], prompt="import ", tokens=20, temperature=0.0, past_end=True
    )
    assert generate(config).tokens == write_on(*load_model(fading[0]), config).tokens


def test_a_prompt_may_be_cut_anywhere(writer):
    tokens = writer.codec.tokens(PROMPT * 3)[None]
    whole, after = writer.logits(tokens, writer.empty(), at=range(tokens.shape[1]))
    past, parts = writer.empty(), []
    for part in np.split(tokens, [1, 2, 70, 71, 140], axis=1):
        logits, past = writer.logits(part, past, at=range(part.shape[1]))
        parts.append(logits)
    np.testing.assert_allclose(np.concatenate(parts, axis=1), whole, rtol=1e-3, atol=1e-4)
    assert past.n_tokens == after.n_tokens == tokens.shape[1]
    for name, x in after.states.items():
        np.testing.assert_allclose(past.states[name], x, rtol=1e-3, atol=1e-4, err_msg=name)


def test_rows_are_read_as_they_are_alone(writer):
    tokens = writer.codec.tokens("abcdefgh" * 4).reshape(2, 16)
    both, past = writer.logits(tokens, writer.empty(2))
    for row in range(2):
        alone, after = writer.logits(tokens[row : row + 1], writer.empty())
        np.testing.assert_allclose(both[row], alone[0], rtol=1e-4, atol=1e-5)
        kept = past.select([row])
        for name, x in after.states.items():
            np.testing.assert_allclose(kept.states[name], x, rtol=1e-4, atol=1e-5)


def test_a_prefix_is_read_once_and_gone_on_from_twice(writer):
    prefix = writer.read(PROMPT)
    before = {name: x.copy() for name, x in prefix.states.items()}
    for more in (" a", " b"):
        found = writer.generate(more, past=prefix, tokens=8, temperature=0.0)
        whole = writer.generate(PROMPT + more, tokens=8, temperature=0.0)
        assert found.tokens == whole.tokens
    assert all((prefix.states[name] == x).all() for name, x in before.items())


@pytest.mark.parametrize("n_read", [1, 40], ids=["windows-not-full", "windows-full"])
def test_torch_goes_on_from_a_state_file_of_the_runtime(
    torch_model, greedy, writer, tmp_path, n_read
):
    path = tmp_path / "tale.safetensors"
    prompt = PROMPT[:n_read]
    whole = writer.generate(prompt, tokens=20, temperature=0.0, past_end=True)
    first = writer.generate(prompt, tokens=1, temperature=0.0, past_end=True)
    writer.save(path, first.past)
    config = GenerateConfig(run=greedy.run, tokens=19, temperature=0.0, past_end=True, state=path)
    assert [*first.tokens, *write_on(*torch_model, config).tokens] == whole.tokens


@pytest.mark.parametrize("n_read", [1, 40], ids=["windows-not-full", "windows-full"])
def test_the_runtime_goes_on_from_a_state_file_of_torch(
    torch_model, greedy, writer, tmp_path, n_read
):
    path = tmp_path / "tale.safetensors"
    given = {"run": greedy.run, "temperature": 0.0, "past_end": True}
    whole = write_on(*torch_model, GenerateConfig(prompt=PROMPT[:n_read], tokens=20, **given))
    begin = GenerateConfig(prompt=PROMPT[:n_read], tokens=1, state=path, **given)
    write_on(*torch_model, begin)
    found = generate(GenerateConfig(tokens=19, state=path, **given))
    assert [whole.tokens[0], *found.tokens] == whole.tokens
    assert writer.load(path).n_tokens == 1 + n_read + 19


def test_random_numbers_go_on_with_a_state(writer, tmp_path):
    whole = writer.generate(PROMPT, tokens=12, temperature=1.0, seed=3, past_end=True)
    first = writer.generate(PROMPT, tokens=5, temperature=1.0, seed=3, past_end=True)
    writer.save(tmp_path / "state", first.past)
    rest = writer.generate(
        past=writer.load(tmp_path / "state"), tokens=7, temperature=1.0, past_end=True
    )
    assert [*first.tokens, *rest.tokens] == whole.tokens
    assert whole.tokens != writer.generate(PROMPT, tokens=12, temperature=1.0, seed=4).tokens


def test_sampling_cuts_as_hugging_face_does():
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(0))
    for temperature, k, p in ((0.7, 10, 1.0), (1.3, None, 0.8), (1.0, 20, 0.5)):
        expected = TemperatureLogitsWarper(temperature)(None, logits)
        expected = expected if k is None else TopKLogitsWarper(k)(None, expected)
        expected = expected if p == 1 else TopPLogitsWarper(p)(None, expected)
        found = Sampler(temperature, k, p).probabilities(logits[0].numpy())
        np.testing.assert_allclose(found, expected.softmax(-1)[0], rtol=1e-4, atol=1e-7)


def test_sampled_tokens_are_as_frequent_as_they_are_likely():
    logits, random = np.log([0.5, 0.3, 0.15, 0.05]), np.random.default_rng(0)
    choose = Sampler(1.0)
    counts = np.bincount([choose(logits, random) for _ in range(4000)], minlength=4)
    np.testing.assert_allclose(counts / 4000, [0.5, 0.3, 0.15, 0.05], atol=0.03)


WITHOUT_TORCH = """
import sys
from leap.cli import main
main(sys.argv[1:])
print(*sys.modules, file=sys.stderr)
"""


def test_the_command_writes_without_torch(hybrid, greedy, tmp_path):
    arguments = ["lm", "generate", "--run", hybrid[1], "--prompt", PROMPT, "--tokens", "30"]
    arguments += ["--temperature", "0", "--past-end", "--state", tmp_path / "state"]
    command = [sys.executable, "-c", WITHOUT_TORCH, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip("\n") == (PROMPT + generate(greedy).text).strip("\n")
    told, _, modules = done.stderr.partition("\n")
    assert "30 tokens" in told and "kept in" in told
    assert not {"torch", "transformers", "onnx", "onnxscript"} & {*modules.split()}


def test_learned_positions_end_in_one_line(fading):
    writer = Writer(fading[1])
    with pytest.raises(ConfigError, match=r"96 positions this model has learned"):
        writer.generate("a" * 60, tokens=50)
    with pytest.raises(ConfigError, match=r"96 positions this model has learned"):
        writer.logits(np.zeros((1, 97), np.int64), writer.empty())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tokens": 0}, "tokens=0 must be 1 or more"),
        ({"temperature": -1.0}, "temperature=-1.0 must be 0 or more"),
        ({"top_k": 0}, "top_k=0 must be 1 or more"),
        ({"top_p": 0.0}, "top_p=0.0 must be more than 0"),
        ({"seed": -1}, "seed=-1 must be from 0"),
        ({"prompt": "\udc80"}, "not text in UTF-8"),
    ],
)
def test_settings_that_cannot_be_are_refused(writer, settings, message):
    with pytest.raises(ConfigError, match=message):
        writer.generate(**settings)


def test_what_cannot_be_read_or_kept_is_refused(writer, tmp_path):
    with pytest.raises(InputError, match="there is no token to read"):
        writer.logits(np.zeros((1, 0), np.int64), writer.empty())
    with pytest.raises(InputError, match="nothing has been read yet"):
        writer.save(tmp_path / "state", writer.empty())
    with pytest.raises(InputError, match="the past has 2 rows"):
        writer.generate("a", past=writer.empty(2))


def test_state_files_that_are_not_the_models_are_refused(writer, fading, tmp_path):
    path = tmp_path / "state"
    with pytest.raises(FileError, match="no state file at"):
        writer.load(path)
    other = Writer(fading[1])
    other.save(path, other.generate("a", tokens=2).past)
    with pytest.raises(FileError, match="state of another model"):
        writer.load(path)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(FileError, match="not a whole safetensors file"):
        writer.load(path)


def test_folders_that_are_no_exports_are_refused_in_one_sentence(hybrid, tmp_path):
    def broken(name, change):
        folder = tmp_path / name
        folder.mkdir()
        for path in hybrid[1].iterdir():
            (folder / path.name).write_bytes(path.read_bytes())
        change(folder)
        with pytest.raises(FileError) as caught:
            Writer(folder)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    def edit(**values):
        def change(folder):
            manifest = json.loads((folder / "manifest.json").read_text())
            (folder / "manifest.json").write_text(json.dumps(manifest | values))

        return change

    def cut(file):
        def change(folder):
            path = folder / file
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])

        return change

    manifest = json.loads((hybrid[1] / "manifest.json").read_text())
    states = manifest["states"]
    wrong = [states[0] | {"shape": [*states[0]["shape"], 7]}, *states[1:]]
    with pytest.raises(FileError, match=r"no exported model at .*; make one with leap export"):
        Writer(tmp_path)
    assert "is not a whole JSON file" in broken("a", cut("manifest.json"))
    assert "no manifest of an exported model" in broken("b", edit(format="other"))
    assert "version 99 of the format, and this is version 1" in broken("c", edit(version=99))
    assert "holds a model for text" in broken("d", edit(task="text"))
    assert "does not tell what it should" in broken("e", edit(states=[{"name": "x"}]))
    assert "is not the graph that its manifest tells of" in broken(
        "f", edit(graphs={"step": manifest["graphs"]["step"] | {"inputs": ["tokens"]}})
    )
    assert "and its manifest tells of" in broken("g", edit(states=wrong))
    assert "is no graph that can be run" in broken("h", cut("step.onnx"))
    assert "step.onnx is missing" in broken("i", lambda folder: (folder / "step.onnx").unlink())
    assert "is no tokenizers file" in broken("j", cut("tokenizer.json"))
    told = manifest["tokenizer"] | {"fingerprint": "0"}
    assert "is not the model's own" in broken("k", edit(tokenizer=told))


def test_a_temperature_next_to_nothing_takes_the_likeliest_token():
    found = Sampler(temperature=5e-324).probabilities(np.array([1.0, 3.0, 2.0]))
    assert found.tolist() == [0, 1, 0]
