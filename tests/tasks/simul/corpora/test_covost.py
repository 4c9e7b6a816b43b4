import numpy as np
import pytest

from leap.errors import FileError
from leap.tasks.simul.audio.files import Audio, write_sound
from leap.tasks.simul.corpora.corpus import Corpus, Sentence
from leap.tasks.simul.corpora.covost import read_covost, write_covost
from leap.tasks.simul.corpora.s2t import read_table, write_table

NAMES = ["a.wav", "b.wav", "c.wav", "d.wav"]


@pytest.fixture
def covost(tmp_path):
    (tmp_path / "clips").mkdir()
    for name in NAMES:
        write_sound(tmp_path / "clips" / name, np.zeros(24000, np.float32), 48000)
    splits = ["train", "train_covost", "dev", "test"]
    write_table(
        tmp_path / "covost_v2.en_de.tsv",
        ["path", "translation", "split", "client_id"],
        [
            {"path": name, "translation": f"Satz {name}", "split": split, "client_id": "x"}
            for name, split in zip(NAMES, splits, strict=True)
        ],
    )
    write_table(
        tmp_path / "validated.tsv",
        ["client_id", "path", "sentence", "up_votes"],
        [{"path": name, "sentence": f"Sentence {name}", "client_id": "x"} for name in NAMES],
    )
    return tmp_path


def test_translations_are_joined_with_recordings(covost):
    corpus = read_covost(covost)
    found = {part: [s.id for s in sentences] for part, sentences in corpus.parts.items()}
    assert found == {"train": ["a", "b"], "valid": ["c"], "test": ["d"]}
    first = corpus.parts["train"][0]
    assert (first.source, first.target, first.n_frames) == ("Sentence a.wav", "Satz a.wav", 50)


def test_what_is_written_is_read_again(covost, tmp_path):
    corpus = read_covost(covost)
    write_covost(corpus, tmp_path / "again")
    again = read_covost(tmp_path / "again")
    for part, sentences in corpus.parts.items():
        assert [s.target for s in again.parts[part]] == [s.target for s in sentences]


def test_recordings_of_one_name_stay_apart(tmp_path):
    parts = {}
    for part, n_samples in {"train": 1600, "test": 3200}.items():
        path = tmp_path / part / "0.wav"
        path.parent.mkdir()
        write_sound(path, np.zeros(n_samples, np.float32))
        n_frames = n_samples // 160
        parts[part] = [Sentence(f"{part} 0", "null", audio=Audio(path), n_frames=n_frames)]
    for _ in range(2):  # Again, over what is there.
        write_covost(Corpus("digits", "en", "de", parts), tmp_path / "written")
        again = read_covost(tmp_path / "written")
        for part, (sentence,) in parts.items():
            (found,) = again.parts[part]
            assert (found.source, found.n_frames) == (sentence.source, sentence.n_frames)
        assert {path.name for path in (tmp_path / "written/clips").iterdir()} >= {"0.wav"}
        assert len(list((tmp_path / "written/clips").iterdir())) == 2


def test_a_missing_recording_or_transcript_costs_its_own_sentence_alone(covost):
    (covost / "clips" / "a.wav").unlink()
    rows = read_table(covost / "validated.tsv", [])
    write_table(covost / "validated.tsv", list(rows[0]), rows[:3])
    corpus = read_covost(covost)
    assert {part: len(found) for part, found in corpus.parts.items()} == {"train": 1, "valid": 1}
    first, second = corpus.left_out
    assert first.startswith("line 2 of covost_v2.en_de.tsv: no sound file at")
    assert second == "line 5 of covost_v2.en_de.tsv: validated.tsv has no transcript of d.wav"


def test_a_missing_column_or_table_is_named(covost):
    with pytest.raises(FileError, match=r"no table at .*covost_v2\.en_fr\.tsv"):
        read_covost(covost, "en", "fr")
    write_table(covost / "validated.tsv", ["path", "client_id"], [])
    with pytest.raises(FileError, match=r"validated\.tsv has no column sentence"):
        read_covost(covost)
