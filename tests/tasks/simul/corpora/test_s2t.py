from dataclasses import replace

import numpy as np
import pytest
import yaml

from leap.errors import FileError
from leap.tasks.simul.audio.files import Audio, write_frames, write_sound
from leap.tasks.simul.corpora.corpus import Sentence
from leap.tasks.simul.corpora.s2t import (
    COLUMNS,
    format_audio,
    parse_audio,
    read_part,
    read_s2t,
    read_table,
    write_config,
    write_part,
    write_table,
)


@pytest.fixture
def sentences(tmp_path):
    write_sound(tmp_path / "a.wav", np.zeros(16000, np.float32))
    write_sound(tmp_path / "b.wav", np.zeros(8000, np.float32), 8000)
    (stored,) = write_frames(tmp_path / "c.zip", {"c": np.zeros((30, 80), np.float32)})
    return [
        Sentence("one", 'sagte "eins"\\', "a", Audio(tmp_path / "a.wav"), 100, "x"),
        Sentence("two", "zwei", "b", Audio(tmp_path / "b.wav", 4000, 2000), 25, "y"),
        Sentence("", "drei", "c", stored, 30, "z"),
    ]


def test_what_is_written_is_read_again(sentences, tmp_path):
    write_part(tmp_path / "train.tsv", sentences)
    assert read_part(tmp_path / "train.tsv") == sentences
    write_part(tmp_path / "test.tsv", sentences[:1])
    write_part(tmp_path / "dev.tsv", sentences[1:])
    corpus = read_s2t(tmp_path)
    assert corpus.parts == {"train": sentences, "test": sentences[:1], "valid": sentences[1:]}


def test_text_alone_has_no_sound(tmp_path):
    text = [Sentence("one", "eins", "1")]
    write_part(tmp_path / "train.tsv", text)
    assert read_part(tmp_path / "train.tsv") == text


def test_the_table_is_fairseqs(sentences, tmp_path):
    write_part(tmp_path / "train.tsv", sentences)
    rows = (tmp_path / "train.tsv").read_text(encoding="utf-8").splitlines()
    assert rows[0] == "id\taudio\tn_frames\ttgt_text\tspeaker\tsrc_text"
    assert rows[1] == 'a\ta.wav\t100\tsagte "eins"\\\\\tx\tone'
    assert rows[2].split("\t")[1] == "b.wav:4000:2000"


def test_a_missing_file_costs_its_own_sentence_alone(sentences, tmp_path):
    write_part(tmp_path / "train.tsv", sentences)
    write_part(tmp_path / "dev.tsv", sentences[1:])
    write_part(tmp_path / "test.tsv", sentences[1:])
    (tmp_path / "a.wav").unlink()
    corpus = read_s2t(tmp_path)
    assert corpus.parts["train"] == sentences[1:]
    assert corpus.left_out == [f"line 2 of train.tsv: no file at {tmp_path / 'a.wav'}"]


def test_sound_that_is_none_is_left_out(sentences, tmp_path):
    (tmp_path / "a.wav").write_text("not sound", encoding="utf-8")
    beyond = replace(sentences[1], audio=Audio(tmp_path / "b.wav", 9000, 10))
    write_part(tmp_path / "train.tsv", [sentences[0], beyond, sentences[2]])
    for part in ("dev", "test"):
        write_part(tmp_path / f"{part}.tsv", sentences[2:])
    corpus = read_s2t(tmp_path)
    assert corpus.parts["train"] == sentences[2:]
    first, second = corpus.left_out
    assert "a.wav is no sound file" in first and "b.wav holds no sound at that place" in second


def test_a_missing_column_is_named(tmp_path):
    write_table(tmp_path / "train.tsv", ["id", "audio", "n_frames"], [])
    with pytest.raises(FileError, match=r"train\.tsv has no column tgt_text; it has id, audio"):
        read_s2t(tmp_path)


def test_no_table_is_named(tmp_path):
    with pytest.raises(FileError, match=r"no manifest in .*, such as train\.tsv"):
        read_s2t(tmp_path)
    with pytest.raises(FileError, match="no table at"):
        read_table(tmp_path / "train.tsv", COLUMNS)


def test_places_of_sound_are_read_as_they_are_written(tmp_path):
    for audio in (
        Audio(tmp_path / "a.wav"),
        Audio(tmp_path / "deep" / "a.zip", 57, 100),
        Audio(tmp_path.parent / "elsewhere.wav"),
    ):
        assert parse_audio(format_audio(audio, tmp_path), tmp_path) == audio
    with pytest.raises(FileError, match="neither path nor path:start:length"):
        parse_audio("a.wav:1:x", tmp_path)


def test_the_config_names_what_fairseq_needs(tmp_path):
    write_config(tmp_path, "vocabulary/sentencepiece.model", ["▁one", "s"], "gcmvn.npz")
    config = yaml.safe_load((tmp_path / "config.yaml").read_text(encoding="utf-8"))
    assert config["bpe_tokenizer"]["sentencepiece_model"] == "vocabulary/sentencepiece.model"
    assert config["global_cmvn"] == {"stats_npz_path": "gcmvn.npz"}
    assert config["transforms"]["_train"] == ["global_cmvn", "specaugment"]
    assert (tmp_path / config["vocab_filename"]).read_text(encoding="utf-8") == "▁one 1\ns 1\n"
