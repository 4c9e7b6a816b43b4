"""Asterisk's prompts: half an hour of real speech, from the folder of data sets."""

import tarfile

import numpy as np
import pytest

from leap.errors import ConfigError, FileError
from leap.tasks.files import data_folder
from leap.tasks.simul.audio.features import load_frames
from leap.tasks.simul.audio.files import write_sound
from leap.tasks.simul.corpora.prompts import SPEAKER, prompts_sound, read_prompts
from leap.tasks.simul.prepare import PrepareConfig, prepare

ROWS = [("activated", "Activated.", "Activé."), ("dictate/both", "Press 1.", "")]
ROWS += [(f"vm-{i}", f"Message {i}.", f"Message {i}.") for i in range(100)]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A folder of data sets with prompts that hum."""
    folder = tmp_path_factory.mktemp("data")
    inside = folder / "asterisk-prompts"
    lines = ["id\tseconds\ten\tes\tfr\tit\tru\n"]
    lines += [f"{name}\t0.2\t{english}\t\t{french}\t\t\n" for name, english, french in ROWS]
    hum = (0.1 * np.sin(np.arange(1600))).astype(np.float32)  # 0.2 s at 8 kHz
    for name, _, _ in ROWS:
        path = folder / SPEAKER / f"{name}.wav"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_sound(path, hum, 8000)
    inside.mkdir()
    (inside / "prompts.tsv").write_text("".join(lines), encoding="utf-8")
    with tarfile.open(inside / f"{SPEAKER}.wav.tar.xz", "w:xz") as archive:
        archive.add(folder / SPEAKER, SPEAKER)
    return folder


def test_prompts_with_a_translation_are_read_and_a_tenth_is_held_out_twice(data):
    corpus = read_prompts("fr", data / "asterisk-prompts")
    counts = {part: len(sentences) for part, sentences in corpus.parts.items()}
    assert sum(counts.values()) == 101
    assert 4 <= counts["valid"] <= 20 and 4 <= counts["test"] <= 20
    assert corpus.left_out == ["dictate/both: it has no text"]


def test_packed_recordings_are_found_by_their_names(data):
    corpus = read_prompts("fr", data / "asterisk-prompts")
    sound_of = prompts_sound(data / "asterisk-prompts")
    sound, who = sound_of("train", corpus.parts["train"][0])
    assert (len(sound), who) == (3200, SPEAKER)  # at 16 kHz
    with pytest.raises(FileError, match=r"no recordings can be read from .*\.tar\.xz"):
        prompts_sound(data)


def test_prompts_are_prepared_as_speech(data, tmp_path, monkeypatch):
    monkeypatch.setenv("LEAP_DATA", str(data))
    settings = {"corpus": "asterisk-prompts", "target": "fr", "vocabulary": 60}
    found = prepare(PrepareConfig(**settings, output=tmp_path / "prompts"))
    sentence = found.sentences("train")[0]
    assert sentence.speaker == SPEAKER
    assert load_frames(sentence.audio, found.extractor).shape == (20, 80)
    assert found.sentences("test")[0].audio.path.suffix == ".wav"
    with pytest.raises(ConfigError, match="from en to es or fr or it or ru, not en to de"):
        PrepareConfig(corpus="asterisk-prompts")
    monkeypatch.setenv("LEAP_DATA", str(tmp_path))
    with pytest.raises(FileError, match="no Asterisk prompts at"):
        prepare(PrepareConfig(**settings, output=tmp_path / "other"))


def test_the_real_prompts_can_be_read():
    if not (data_folder() / "asterisk-prompts").is_dir():
        pytest.skip("the Asterisk prompts are not in the folder of data sets")
    corpus = read_prompts("fr")
    assert sum(map(len, corpus.parts.values())) == 512
    sound, _ = prompts_sound()("train", corpus.parts["train"][0])
    assert len(sound) > 4000
