import pytest

pytest.importorskip("gradio", reason="the extra app is not installed")

from leap.app.config import AppConfig
from leap.app.models import open_models
from leap.errors import ConfigError, FileError


def test_each_folder_is_opened_as_what_it_is(lm_run, classifier, translator, speech_translator):
    folders = (lm_run, classifier, translator, speech_translator)
    found = open_models(folders)
    assert [model.kind for model in found] == ["lm", "classifier", "text", "speech"]
    assert [model.name for model in found] == [folder.name for folder in folders]


def test_two_folders_of_one_name_are_told_apart(lm_run):
    first, second = open_models([lm_run, lm_run])
    assert first.name != second.name


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(FileError, match=r"no run folder at .*/nowhere"):
        open_models([tmp_path / "nowhere"])


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"max_characters": 0}, "max_characters=0 must be 1 or more"),
        ({"max_seconds": float("nan")}, "max_seconds=nan must be more than 0"),
        ({"port": 70000}, "port=70000 must be from 0 to 65535"),
    ],
)
def test_a_setting_that_cannot_work_is_refused(setting, words):
    with pytest.raises(ConfigError, match=words):
        AppConfig(**setting)
