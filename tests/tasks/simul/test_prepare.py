import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import soundfile
from numpy.testing import assert_array_equal

from leap.errors import ConfigError, FileError
from leap.models.fbank import LeapformerFeatureExtractor
from leap.tasks.simul import prepare as preparing
from leap.tasks.simul.audio.files import Audio, read_sound, write_frames, write_sound
from leap.tasks.simul.corpora import speech
from leap.tasks.simul.corpora.corpus import PARTS, Sentence
from leap.tasks.simul.corpora.s2t import read_part, write_part
from leap.tasks.simul.data import SpeechPairs, TextPairs, TokenBatches, collate
from leap.tasks.simul.prepare import PrepareConfig, load_prepared, prepare, read_corpus
from leap.tasks.simul.scoring.simuleval import write_simuleval


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
        taken = {"vocabulary": None, "use_vocabulary": given}
        again = prepare(numbers(tmp_path / str(number), seed=1, **taken))
        assert again.vocabulary.pieces == prepared.vocabulary.pieces
    with pytest.raises(FileError, match="no vocabulary at gone"):
        prepare(numbers(tmp_path / "2", vocabulary=None, use_vocabulary=Path("gone")))


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


@pytest.mark.parametrize("store", ["features", "sound"])
def test_a_recording_with_a_sample_that_is_no_number_is_left_out(tmp_path, store):
    given = make_manifest(tmp_path / "given")
    for name in ("train1", "test2"):
        sound = np.zeros(2400, np.float32)
        sound[5] = np.nan
        soundfile.write(given / f"{name}.wav", sound, 8000, subtype="FLOAT")
    found = prepare(
        PrepareConfig(
            corpus="s2t", data=given, vocabulary=40, store=store, output=tmp_path / "prepared"
        )
    )
    assert found.facts["sentences"] == {"train": 3, "valid": 5, "test": 4}
    assert np.isfinite(found.extractor.mean).all() and np.isfinite(found.extractor.std).all()
    _, *notes = (found.folder / "left_out.txt").read_text(encoding="utf-8").splitlines()
    for note, name in zip(notes, ("train1", "test2"), strict=True):
        assert name in note and "no finite numbers" in note


def store_as_fairseq(folder, *parts):
    """Exchange the recordings of a manifest for a zip file of frames, as fairseq prepares it."""
    for part in parts:
        sentences = read_part(folder / f"{part}.tsv")
        extractor = LeapformerFeatureExtractor()
        frames = {
            sentence.id: extractor.frames(read_sound(sentence.audio))
            for sentence in sentences
            if sentence.id != "train3"
        }
        stored = write_frames(folder / f"{part}.zip", frames)
        write_part(
            folder / f"{part}.tsv",
            [
                Sentence("", f"eins {name}", name, audio, len(frames[name]))
                for name, audio in zip(frames, stored, strict=True)
            ],
        )


@pytest.mark.parametrize("store", ["features", "sound"])
@pytest.mark.parametrize("parts", [("train", "dev", "test"), ("train",), ("dev", "test")], ids=str)
def test_frames_that_were_stored_are_taken_as_they_are(tmp_path, store, parts):
    given = make_manifest(tmp_path / "given")
    store_as_fairseq(given, *parts)
    found = prepare(
        PrepareConfig(
            corpus="s2t", data=given, vocabulary=40, store=store, output=tmp_path / "prepared"
        )
    )
    assert found.facts["sentences"] == {"train": 4, "valid": 5, "test": 5}
    for part in parts:
        name = PARTS.get(part, part)
        assert found.sentences(name) == read_part(given / f"{part}.tsv")
        assert len(found.dataset(name)[0]["input_features"]) == found.sentences(name)[0].n_frames
    source = found.folder / "simuleval/test.source"
    if "test" in parts:
        assert not source.exists()
        (note,) = found.facts["notes"]
        assert note.startswith("test is not there for SimulEval")
    else:
        assert len(source.read_text(encoding="utf-8").splitlines()) == 5
        assert found.facts["notes"] == []


def test_recordings_and_stored_frames_can_be_in_one_part(tmp_path):
    given = make_manifest(tmp_path / "given")
    recorded = (given / "train.tsv").read_text(encoding="utf-8")
    store_as_fairseq(given, "train")
    _, *stored = (given / "train.tsv").read_text(encoding="utf-8").splitlines(keepends=True)
    (given / "train.tsv").write_text(recorded + "".join(stored), encoding="utf-8")
    found = prepare(
        PrepareConfig(corpus="s2t", data=given, vocabulary=40, output=tmp_path / "prepared")
    )
    data = found.dataset("train")
    assert len(data) == 8
    for i in range(4):
        assert_array_equal(data[i]["input_features"], data[4 + i]["input_features"])


@pytest.mark.parametrize(
    ("limit", "chosen"),
    [(1, [0]), (2, [0, 3]), (4, [0, 1, 3, 5]), (5, [0, 1, 2, 4, 5]), (9, [0, 1, 2, 3, 4, 5, 6])],
)
def test_a_limit_takes_sentences_from_everywhere(tmp_path, limit, chosen):
    for part in ("train", "valid", "test"):
        for language in ("en", "de"):
            lines = "".join(f"{part} {i}\n" for i in range(7))
            (tmp_path / f"{part}.{language}").write_text(lines, encoding="utf-8")
    corpus = read_corpus(PrepareConfig(corpus="text", data=tmp_path, limit=limit))
    assert [sentence.source for sentence in corpus.parts["train"]] == [f"train {i}" for i in chosen]


def test_fairseq_finds_the_pieces_by_our_numbers(prepared):
    lines = (prepared.folder / "dict.txt").read_text(encoding="utf-8").splitlines()
    theirs = ["<s>", "<pad>", "</s>", "<unk>", *(line.rsplit(" ", 1)[0] for line in lines)]
    assert theirs == prepared.vocabulary.pieces
    assert all(int(line.rsplit(" ", 1)[1]) > 0 for line in lines)


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

    def stop(status):
        seen.append((status.name or status.doing, status.step, status.steps))
        if status.step == 6:
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
    with pytest.raises(ConfigError, match=r"silence=-1.0 is no number of seconds from 0 to 10"):
        PrepareConfig(speak=True, silence=-1.0)
    with pytest.raises(ConfigError, match="silence=nan is no number of seconds"):
        PrepareConfig(speak=True, silence=float("nan"))
    with pytest.raises(ConfigError, match=r"silence=0.3 is for text that is spoken: give --speak"):
        PrepareConfig(silence=0.3)


def test_simuleval_gets_recordings_of_their_own(tmp_path):
    write_sound(tmp_path / "talk.wav", np.full(16000, 0.1, np.float32))
    stretch = Sentence("one", "eins", "1", Audio(tmp_path / "talk.wav", 100, 1600), 10)
    source, target = write_simuleval(tmp_path / "simuleval", "test", [stretch])
    assert len(read_sound(Path(source.read_text(encoding="utf-8").strip()))) == 1600
    assert target.read_text(encoding="utf-8") == "eins\n"
