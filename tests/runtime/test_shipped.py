"""The models that come with the package."""

import subprocess
import sys

import pytest

from leap.errors import ConfigError
from leap.runtime import Translator
from leap.runtime.shipped import names, shipped
from leap.runtime.streaming.took import Recording
from leap.tasks.simul.live import StreamConfig

MOST_BYTES = 8_000_000


@pytest.mark.parametrize("name", names())
def test_each_is_small_and_has_a_card_with_its_licence(name):
    folder = shipped(name)
    assert sum(path.stat().st_size for path in folder.iterdir()) < MOST_BYTES
    card = (folder / "README.md").read_text(encoding="utf-8")
    for said in ("leap simul train", "CC BY", "BLEU", "LAAL", "cannot"):
        assert said in card


def test_english_becomes_german():
    stream = Translator(shipped("en-de"), "offline").stream()
    said = stream.push("I have a dog.") + stream.finish()
    assert said == ["Ich", "habe", "einen", "Hund."]


def test_the_command_translates_right_after_the_install(tmp_path):
    command = [sys.executable, "-m", "leap.cli", "simul", "stream", "--no-lag"]
    done = subprocess.run(
        command, input="I have a dog.\n", capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert done.stdout.split()[0] == "Ich"
    assert "by en-de, which comes with the package" in done.stderr


def test_a_translated_word_tells_the_source_word_that_it_took():
    interpreter = Translator(shipped("en-de"))
    recording = Recording.of(interpreter)
    stream = recording.stream(interpreter)
    said = stream.push("I have a dog.") + stream.finish()
    sentence = recording.sentences[0]
    took = sentence.rests_on(interpreter)
    source = [unit.text for unit in sentence.units(interpreter.vocabulary)]
    assert source[took[said.index("Hund.")].argmax()] == "dog."


def test_a_model_that_was_trained_or_named_goes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert StreamConfig().model == shipped("en-de")
    assert StreamConfig(run=tmp_path).model == tmp_path
    (tmp_path / "runs" / "simul").mkdir(parents=True)
    assert str(StreamConfig().model) == "runs/simul"


def test_a_name_that_is_none_is_told_with_those_there_are():
    with pytest.raises(ConfigError, match=r"no model 'fr-de' .* en-de"):
        shipped("fr-de")
