import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from leap.errors import ConfigError, FileError
from leap.tasks.simul import prepare as preparing
from leap.tasks.simul import speech
from leap.tasks.simul.audio import read_sound, write_sound
from leap.tasks.simul.corpus import Audio, Sentence
from leap.tasks.simul.data import SpeechPairs, TextPairs, TokenBatches, collate
from leap.tasks.simul.prepare import PrepareConfig, load_prepared, prepare
from leap.tasks.simul.s2t import write_part
from leap.tasks.simul.simuleval import write_simuleval


def numbers(output, **settings):
    return PrepareConfig(**{"limit": 60, "vocabulary": 80, "output": output} | settings)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    return prepare(numbers(tmp_path_factory.mktemp("prepared") / "numbers"))


def test_numbers_become_batches(prepared):
    data = prepared.dataset("train")
    assert isinstance(data, TextPairs) and len(data) == 60
    batch = collate(TokenBatches(data, tokens=200)[0])
    assert set(batch) == {"input_ids", "attention_mask", "labels"}
    assert batch["input_ids"].max() < len(prepared.vocabulary) <= 80


def test_a_folder_says_what_it_holds(prepared):
    facts = json.loads((prepared.folder / "metrics.json").read_text(encoding="utf-8"))
    assert facts["sentences"] == {"train": 60, "valid": 200, "test": 200}
    assert prepared.parts == ["train", "valid", "test"]
    sources = (prepared.folder / "simuleval/test.source").read_text(encoding="utf-8").splitlines()
    assert sources == [sentence.source for sentence in prepared.sentences("test")]
    with pytest.raises(ConfigError, match="has no part dev; there are train, valid, test"):
        prepared.sentences("dev")


def test_finished_work_is_not_done_again(prepared, monkeypatch):
    monkeypatch.setattr(preparing, "read_corpus", None)
    assert prepare(numbers(prepared.folder)).facts == prepared.facts
    with pytest.raises(FileError, match="holds a run with limit=60, not 61"):
        prepare(numbers(prepared.folder, limit=61))


def test_a_vocabulary_can_be_taken_over(prepared, tmp_path):
    for number, given in enumerate(
        [prepared.folder, prepared.folder / "vocabulary/sentencepiece.model"]
    ):
        again = prepare(numbers(tmp_path / str(number), seed=1, use_vocabulary=given))
        assert again.vocabulary.pieces == prepared.vocabulary.pieces
    with pytest.raises(FileError, match="no vocabulary at gone"):
        prepare(numbers(tmp_path / "2", use_vocabulary=Path("gone")))


def make_manifest(folder, parts=("train", "dev", "test")):
    """Recordings of noise at 8 kHz; one of them is none."""
    folder.mkdir()
    chance = np.random.default_rng(0)
    for part in parts:
        sentences = []
        for i in range(5):
            path = folder / f"{part}{i}.wav"
            write_sound(path, 0.1 * chance.standard_normal(2400 + 80 * i).astype(np.float32), 8000)
            sentences.append(Sentence(f"one {i}", f"eins {i}", f"{part}{i}", Audio(path), 1))
        write_part(folder / f"{part}.tsv", sentences)
    (folder / "train3.wav").write_text("not sound", encoding="utf-8")
    return folder


@pytest.mark.parametrize("store", ["features", "sound"])
def test_recordings_become_batches_and_a_bad_one_is_left_out(tmp_path, store):
    given = make_manifest(tmp_path / "given")
    found = prepare(
        PrepareConfig(
            corpus="s2t", data=given, vocabulary=40, store=store, output=tmp_path / "prepared"
        )
    )
    data = found.dataset("train")
    assert isinstance(data, SpeechPairs) and len(data) == 4
    frames = np.concatenate([data[i]["input_features"] for i in range(4)])
    assert abs(frames.mean()) < 0.01 and abs(frames.std() - 1) < 0.05
    batch = collate(TokenBatches(data, tokens=1000)[0])
    assert set(batch) == {"input_features", "attention_mask", "transcript", "labels"}
    assert batch["attention_mask"].sum(dim=1).tolist() == [
        s.n_frames for s in found.sentences("train")
    ]
    (note,) = (found.folder / "left_out.txt").read_text(encoding="utf-8").splitlines()
    assert note.startswith("line 5 of train.tsv: ") and "train3.wav is no sound file" in note
    for path in (found.folder / "simuleval/test.source").read_text(encoding="utf-8").splitlines():
        assert len(read_sound(Path(path))) >= 4800


@pytest.mark.skipif(shutil.which("espeak-ng") is None, reason="espeak-ng is not installed")
def test_text_can_be_spoken_and_stopped_between(tmp_path, monkeypatch):
    monkeypatch.setattr(speech, "SHARD", 3)
    text = tmp_path / "text"
    text.mkdir()
    for part, count in {"train": 7, "valid": 1, "test": 2}.items():
        lines = [f"{part} {i}\n" for i in range(count)]
        for language in ("en", "de"):
            (text / f"{part}.{language}").write_text("".join(lines), encoding="utf-8")
    config = PrepareConfig(
        corpus="text", data=text, speak=True, vocabulary=40, output=tmp_path / "spoken"
    )
    seen = []

    def stop(name, done, total):
        seen.append((name, done, total))
        if done == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(config, stop)
    with pytest.raises(FileError, match="is no finished folder"):
        load_prepared(config.output)
    found = prepare(config)
    assert seen == [("sentences", 3, 10), ("sentences", 6, 10)]
    assert found.facts["sentences"] == {"test": 2, "train": 7, "valid": 1}
    assert found.facts["seconds"]["train"] > 2
    assert len(found.dataset("train")[6]["input_features"]) > 30
    assert found.sentences("test")[0].audio.path.suffix == ".wav"


def test_only_the_tests_asked_for_are_kept(tmp_path):
    given = make_manifest(tmp_path / "given", ["train", "dev", "first", "second"])
    settings = {"corpus": "s2t", "data": given, "vocabulary": 40, "store": "sound"}
    config = PrepareConfig(**settings, tests=("second",), limit=2, output=tmp_path / "some")
    assert prepare(config).facts["sentences"] == {"train": 2, "valid": 5, "second": 5}
    config = PrepareConfig(**settings, tests=("third",), output=tmp_path / "other")
    with pytest.raises(ConfigError, match="has no third; it has "):
        prepare(config)


def test_settings_that_do_not_go_together_are_refused():
    with pytest.raises(ConfigError, match="corpus=must-c needs data"):
        PrepareConfig(corpus="must-c")
    with pytest.raises(ConfigError, match="corpus=numbers takes no data"):
        PrepareConfig(data=Path("text"))
    with pytest.raises(ConfigError, match="corpus=multi30k is from en to de, not en to fr"):
        PrepareConfig(corpus="multi30k", target="fr")
    with pytest.raises(ConfigError, match="limit=0"):
        PrepareConfig(limit=0)


def test_simuleval_gets_recordings_of_their_own(tmp_path):
    write_sound(tmp_path / "talk.wav", np.full(16000, 0.1, np.float32))
    stretch = Sentence("one", "eins", "1", Audio(tmp_path / "talk.wav", 100, 1600), 10)
    source, target = write_simuleval(tmp_path / "simuleval", "test", [stretch])
    assert len(read_sound(Path(source.read_text(encoding="utf-8").strip()))) == 1600
    assert target.read_text(encoding="utf-8") == "eins\n"
