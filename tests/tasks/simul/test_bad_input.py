"""What a user may give by mistake, from the command line: one line that says what is wrong."""

import io
import json
import random
import shutil

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from leap.cli import main
from leap.errors import FileError
from leap.models import LeapformerConfig, LeapformerForCausalLM
from leap.tasks.simul.audio.files import write_sound
from leap.tasks.simul.prepare import PrepareConfig, prepare
from leap.tasks.simul.streaming.stream import load_trained
from leap.tasks.simul.vocabulary import train_vocabulary
from leap.training import quiet

pytestmark = pytest.mark.usefixtures("shapes_unchecked")
SPEECH_TABLE = "id\taudio\tn_frames\ttgt_text\tspeaker\n"


@pytest.fixture(scope="module")
def speech_run(random_run, tmp_path_factory, vocabulary):
    return random_run(tmp_path_factory.mktemp("speech"), vocabulary, speech=True)


@pytest.fixture(scope="module")
def text_run(random_run, tmp_path_factory, vocabulary):
    return random_run(tmp_path_factory.mktemp("text"), vocabulary)


@pytest.fixture
def fails(capsys):
    def fail(*arguments):
        with pytest.raises(SystemExit) as leaving:
            main(["simul", *map(str, arguments)])
        said = capsys.readouterr().err
        assert leaving.value.code == 1
        assert said.startswith("leap: ") and said.count("\n") == 1
        return said

    return fail


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"this is no sound", "is no sound file that can be read"),
        (b"", "is no sound file that can be read"),
        (b"RIFF\x24\0\0\0WAVEfmt ", "is no sound file that can be read"),
        (None, "no sound file at"),
    ],
    ids=["text", "empty", "cut-off", "missing"],
)
def test_a_wav_that_is_none(speech_run, fails, tmp_path, content, message):
    path = tmp_path / "talk.wav"
    if content is not None:
        path.write_bytes(content)
    said = fails("stream", "--run", speech_run, "--sound", path)
    assert message in said and str(path) in said


def test_a_wav_without_samples(speech_run, fails, tmp_path):
    write_sound(tmp_path / "empty.wav", np.zeros(0, np.float32))
    assert "empty.wav holds no sound" in fails(
        "stream", "--run", speech_run, "--sound", tmp_path / "empty.wav"
    )


@pytest.mark.parametrize("rate", [8000, 48000])
@pytest.mark.parametrize("channels", [1, 2])
def test_other_rates_and_stereo_are_translated(speech_run, tmp_path, capsys, rate, channels):
    tone = np.sin(np.arange(rate) * 2 * np.pi * 440 / rate).astype(np.float32) / 2
    sound = tone if channels == 1 else np.stack([tone, 0 * tone], axis=1)
    write_sound(tmp_path / "talk.wav", sound, rate)
    main(["simul", "stream", "--run", str(speech_run), "--sound", str(tmp_path / "talk.wav")])
    shown = capsys.readouterr()
    assert shown.out.strip() and "ms behind" in shown.err


def test_silence_has_no_translation(speech_run, tmp_path, capsys):
    write_sound(tmp_path / "silence.wav", np.zeros(16000, np.float32))
    main(["simul", "stream", "--run", str(speech_run), "--sound", str(tmp_path / "silence.wav")])
    shown = capsys.readouterr()
    assert shown.out == "\n" and shown.err == ""


def test_a_manifest_without_a_column(fails, tmp_path):
    (tmp_path / "train.tsv").write_text("id\taudio\tspeaker\n")
    said = fails("prepare", "--corpus", "s2t", "--data", tmp_path, "--output", tmp_path / "out")
    assert "train.tsv has no column" in said


def test_a_manifest_whose_files_are_missing(fails, tmp_path):
    (tmp_path / "train.tsv").write_text(f"{SPEECH_TABLE}a\tgone.wav\t100\teins\tx\n")
    said = fails("prepare", "--corpus", "s2t", "--data", tmp_path, "--output", tmp_path / "out")
    assert "gone.wav" in said


def test_a_vocabulary_of_another_model(text_run, fails, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(text_run, run)
    other = train_vocabulary(["one two three four five six seven"], size=30)
    other.save(run)
    said = fails("stream", "--run", run)
    assert "but the vocabulary has" in said and "it was trained with" in said


def test_a_source_that_ends_in_the_middle_of_a_word(text_run, capsys, monkeypatch):
    shown = []
    for text in ("one hundred sev", "one hundred sev\n"):
        monkeypatch.setattr("sys.stdin", io.StringIO(text))
        main(["simul", "stream", "--run", str(text_run), "--no-lag"])
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1] and shown[0].strip()


def test_a_test_that_does_not_fit_the_model(text_run, speech_run, fails, tmp_path):
    prepare(PrepareConfig(limit=20, vocabulary=300, output=tmp_path / "data"))
    options = ("--data", tmp_path / "data", "--limit", "1", "--output", tmp_path / "out")
    assert "not of one kind of source" in fails("eval", "--run", speech_run, *options)
    assert "no part talks" in fails("eval", "--run", text_run, *options, "--part", "talks")
    assert "no finished run at" in fails("eval", "--run", tmp_path / "gone", *options)
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun/data.json").write_text('{"sentences": ""}')
    assert "begun is not finished" in fails("eval", "--run", tmp_path / "begun", *options)
    assert not (tmp_path / "out").exists()
    assert "no finished folder" in fails("eval", "--run", text_run, "--data", tmp_path)
    (tmp_path / "file").touch()
    options = ("--data", tmp_path / "data", "--limit", "1", "--output", tmp_path / "file")
    said = fails("eval", "--run", text_run, *options, "--waits", "3")
    assert "cannot write to" in said and said.endswith("give another output folder\n")


@pytest.mark.parametrize("verb", ["stream", "eval"])
def test_a_run_of_another_task(verb, fails, tmp_path):
    sizes = {"vocab_size": 20, "hidden_size": 8, "n_head": 2, "n_layer": 1}
    language_model = LeapformerForCausalLM(LeapformerConfig(**sizes))
    with quiet():
        language_model.save_pretrained(tmp_path / "lm/model")
    data = {"data": {"text": "digest of a text"}, "begun": {"data": "digest of a task"}}
    for name, digest in data.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "data.json").write_text(json.dumps(digest))
    prepare(PrepareConfig(limit=20, vocabulary=300, output=tmp_path / "numbers"))
    options = ("--data", tmp_path / "numbers") if verb == "eval" else ()
    assert fails(verb, "--run", tmp_path / "lm", *options) == (
        f"leap: {tmp_path / 'lm'} holds no translation model, but a leapformer of another task; "
        "give the run folder of leap simul train\n"
    )
    for name in (*data, "numbers"):
        assert fails(verb, "--run", tmp_path / name, *options) == (
            f"leap: {tmp_path / name} is of another command; give the run folder of leap simul "
            "train\n"
        )


def test_data_that_is_a_run(text_run, fails, tmp_path):
    (tmp_path / "metrics.json").write_text("{}")
    said = fails("train", "--data", tmp_path, "--output", tmp_path / "out")
    assert said == (
        f"leap: {tmp_path} is no finished folder of leap simul prepare; run that first\n"
    )


def test_no_espeak(fails, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    said = fails("prepare", "--speak", "--limit", "20", "--output", tmp_path / "out")
    assert said == (
        "leap: speaking text needs espeak-ng, which is not installed: apt-get install espeak-ng, "
        "or brew install espeak-ng\n"
    )


def test_weights_of_another_model(text_run, fails, tmp_path):
    shutil.copytree(text_run, tmp_path / "run")
    folder = tmp_path / "run/model"
    folder = folder if folder.is_dir() else tmp_path / "run"
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"n_layer": config["n_layer"] + 1}))
    shown = fails("stream", "--run", tmp_path / "run")
    assert "of another model than its config.json" in shown and "is missing" in shown


OTHER_VALUES = (
    *(None, True, -1, 0, 7, 0.5, float("nan")),
    *("x", "", [], [1], {}, {"a": 1}),
)


@pytest.mark.parametrize("name", ["config.json", "preprocessor_config.json", "../config.json"])
def test_settings_with_any_value_changed_work_or_are_an_error_in_a_line(tmp_path, speech_run, name):
    """Of a model, of its features and of its run: every field, with values of every type."""
    shutil.copytree(speech_run, tmp_path / "model")
    path = tmp_path / "model" / name
    (tmp_path / "config.json").write_text(json.dumps({"ratio": 1, "chunk_sizes": [1]}))
    settings = json.loads(path.read_text())
    chance = random.Random(0)
    for field in settings:
        for value in chance.sample(OTHER_VALUES, 3):
            path.write_text(json.dumps(settings | {field: value}))
            try:
                load_trained(tmp_path)
            except FileError as error:
                assert "\n" not in str(error)


def test_weights_that_are_no_numbers_are_named(tmp_path, text_run):
    path = shutil.copytree(text_run, tmp_path / "model") / "model.safetensors"
    weights = load_file(path)
    weights["model.decoder.norm.weight"][0] = float("nan")
    save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(FileError, match=r"hold NaN or infinite numbers \(model\.decoder\.norm"):
        load_trained(tmp_path)
