import json
import subprocess
import sys
from itertools import chain

import numpy as np
import pytest

from leap.errors import ConfigError, FileError, InputError
from leap.runtime import Translator

TEXT = "three hundred and nine five thousand sixty-eight (again) seven one"
POLICIES = ["wait-1", "offline", "agree-2", "align-1", "tail-0.3"]


@pytest.fixture(scope="module", params=["text", "speech"])
def kind(request):
    return request.param


def sources(kind):
    """Text word by word, or sound that swells and fades, a fifth of a second at a time."""
    if kind == "text":
        return [[word] for word in TEXT.split()]
    random = np.random.default_rng(0)
    sound = random.standard_normal(32000) * np.sin(np.arange(32000) / 3000) ** 2 / 5
    return np.split(sound.astype(np.float32), 10)


def words(stream, parts):
    """The words that each part brings, and the end."""
    return [*(stream.push(part) for part in parts), stream.finish()]


def joined(lists):
    return [*chain.from_iterable(lists)]


@pytest.mark.parametrize("policy", POLICIES)
def test_words_come_when_they_come_in_torch(folders, kind, policy):
    from leap.tasks.simul.streaming.stream import load_trained

    run, exported = folders(kind)
    expected = words(load_trained(run).interpreter(policy).stream(), sources(kind))
    assert words(Translator(exported, policy).stream(), sources(kind)) == expected
    assert any(expected)


def test_a_search_for_the_end_finds_what_it_finds_in_torch(folders, kind):
    from leap.tasks.simul.streaming.stream import load_trained

    run, exported = folders(kind)
    expected = load_trained(run).interpreter("wait-3", beam=3)
    found = Translator(exported, "wait-3", beam=3)
    assert words(found.stream(), sources(kind)) == words(expected.stream(), sources(kind))


def test_a_stream_can_be_forked_and_saved(folders, kind, tmp_path):
    translator = Translator(folders(kind)[1], "wait-1")
    parts = sources(kind)
    whole = joined(words(translator.stream(), parts))
    stream = translator.stream()
    said = joined(stream.push(part) for part in parts[:4])
    fork = stream.fork()
    stream.save(tmp_path / "stream")
    stream.push(parts[0])
    for other in (fork, translator.load(tmp_path / "stream")):
        assert said + joined(words(other, parts[4:])) == whole


def test_all_at_once_is_as_word_by_word(folders):
    translator = Translator(folders("text")[1], "wait-3")
    expected = joined(words(translator.stream(), sources("text"))[:-1])
    assert translator.stream().push(TEXT + " ") == expected


CODE = """
import sys
from leap.cli import main
main(sys.argv[1:])
print(*sys.modules, file=sys.stderr)
"""


def test_the_command_translates_without_torch(folders):
    _, exported = folders("text")
    given = ["simul", "stream", "--run", str(exported), "--policy", "wait-1", "--no-lag"]
    command = [sys.executable, "-c", CODE, *given]
    done = subprocess.run(command, input=TEXT, capture_output=True, text=True, check=True)
    stream = Translator(exported, "wait-1", reset=200).stream()
    expected = joined(words(stream, sources("text")))
    assert done.stdout.split() == expected
    assert not {"torch", "transformers", "onnx", "onnxscript"} & {*done.stderr.split()}


def test_what_does_not_fit_is_told_in_one_sentence(folders, tmp_path):
    exported = folders("text")[1]
    with pytest.raises(FileError, match="no exported model at"):
        Translator(tmp_path)
    with pytest.raises(ConfigError, match="no policy is called 'hurry'"):
        Translator(exported, "hurry")
    with pytest.raises(ConfigError, match=r"align-9 .* cross_window=8"):
        Translator(exported, "align-9")
    for path in exported.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    manifest = json.loads((exported / "manifest.json").read_text())
    for change, message in (
        ({"task": "lm"}, "holds a model for lm, and one for text or speech is wanted"),
        ({"translation": {}}, "does not tell how its model reads"),
        (
            {"translation": manifest["translation"] | {"chunk_sizes": []}},
            "does not tell how its model reads",
        ),
        ({"vocabulary": 7}, "knows 7 subwords, and its tokenizer 60"),
        ({"graphs": {"read": manifest["graphs"]["read"]}}, "no graph called write"),
    ):
        (tmp_path / "manifest.json").write_text(json.dumps(manifest | change))
        with pytest.raises(FileError, match=message):
            Translator(tmp_path)


def test_streams_of_different_sizes_are_not_stepped_together(folders):
    pool = Translator(folders("text")[1], "offline").pool(2)
    with pytest.raises(InputError, match="step them one by one"):
        pool.push([["seven", "one"], None])
