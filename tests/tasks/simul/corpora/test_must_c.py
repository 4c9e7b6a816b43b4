import numpy as np
import pytest

from leap.errors import FileError
from leap.tasks.simul.audio.files import Audio, read_sound, write_sound
from leap.tasks.simul.corpora.corpus import Corpus, Sentence
from leap.tasks.simul.corpora.must_c import read_must_c, read_segments, write_must_c


@pytest.fixture
def must_c(tmp_path):
    chance = np.random.default_rng(0)
    for split in ("train", "dev", "tst-COMMON"):
        inside = tmp_path / "en-de" / "data" / split
        (inside / "wav").mkdir(parents=True)
        (inside / "txt").mkdir()
        sound = chance.uniform(-0.5, 0.5, 48000).astype(np.float32)
        write_sound(inside / "wav" / "ted_1.wav", sound)
        segments = [
            "- {duration: 1.000000, offset: 0.500000, speaker_id: spk.1, wav: ted_1.wav}\n",
            "- {duration: 0.250000, offset: 2.000000, speaker_id: spk.1, wav: ted_1.wav}\n",
        ]
        (inside / "txt" / f"{split}.yaml").write_text("".join(segments), encoding="utf-8")
        (inside / "txt" / f"{split}.en").write_text("one\ntwo\n", encoding="utf-8")
        (inside / "txt" / f"{split}.de").write_text("eins\nzwei\n", encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize("inside", ["", "en-de"])
def test_segments_are_found_in_their_talk(must_c, inside):
    corpus = read_must_c(must_c / inside)
    assert set(corpus.parts) == {"train", "valid", "tst-COMMON"}
    first, second = corpus.parts["train"]
    assert (first.source, first.target, first.speaker) == ("one", "eins", "spk.1")
    assert (first.n_frames, second.n_frames) == (100, 25)
    assert first.id != second.id
    whole = read_sound(first.audio.path)
    np.testing.assert_array_equal(read_sound(second.audio), whole[32000:36000])


def test_what_is_written_is_read_again(must_c, tmp_path):
    corpus = read_must_c(must_c)
    write_must_c(corpus, tmp_path / "again")
    again = read_must_c(tmp_path / "again")
    assert {part: [s.source for s in found] for part, found in again.parts.items()} == {
        part: [s.source for s in found] for part, found in corpus.parts.items()
    }
    ours, theirs = again.parts["train"][1], corpus.parts["train"][1]
    np.testing.assert_array_equal(read_sound(ours.audio), read_sound(theirs.audio))


def test_talks_of_one_name_stay_apart(tmp_path):
    sentences = []
    for n_samples in (1600, 3200):
        path = tmp_path / str(n_samples) / "talk.wav"
        path.parent.mkdir()
        write_sound(path, np.zeros(n_samples, np.float32))
        for start in (0, 800):
            audio = Audio(path, start, n_samples - start)
            sentences.append(Sentence("one", "eins", audio=audio))
    write_must_c(Corpus("digits", "en", "de", {"train": sentences}), tmp_path / "written")
    found = read_must_c(tmp_path / "written").parts["train"]
    assert [sentence.n_frames for sentence in found] == [10, 5, 20, 15]
    assert len(list((tmp_path / "written/en-de/data/train/wav").iterdir())) == 2


def test_a_missing_talk_costs_its_own_segments_alone(must_c):
    (must_c / "en-de/data/dev/wav/ted_1.wav").unlink()
    corpus = read_must_c(must_c)
    assert set(corpus.parts) == {"train", "tst-COMMON"}
    assert len(corpus.left_out) == 2
    assert corpus.left_out[0].startswith("segment 1 of dev: no sound file at")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("offset", "abc", "its offset is 'abc', no time in seconds"),
        ("offset", "null", "its offset is None, no time"),
        ("offset", "-0.4", "its offset is -0.4, no time"),
        ("duration", ".nan", "its duration is nan, no time"),
        ("duration", "true", "its duration is True, no time"),
        ("wav", "5", "its wav is 5, no name of a file"),
    ],
)
def test_a_segment_with_a_wrong_value_is_left_out_alone(must_c, key, value, message):
    path = must_c / "en-de/data/dev/txt/dev.yaml"
    segment = {"duration": "1.0", "offset": "0.5", "wav": "ted_1.wav"} | {key: value}
    written = ", ".join(f"{name}: {x}" for name, x in segment.items())
    _, second = path.read_text(encoding="utf-8").splitlines()
    path.write_text(f"- {{{written}}}\n{second}\n", encoding="utf-8")
    corpus = read_must_c(must_c)
    assert [sentence.target for sentence in corpus.parts["valid"]] == ["zwei"]
    assert corpus.left_out[0].startswith(f"segment 1 of dev: {message}")


def test_what_does_not_fit_is_named(must_c):
    txt = must_c / "en-de/data/dev/txt"
    (txt / "dev.de").write_text("eins\n", encoding="utf-8")
    with pytest.raises(FileError, match=r"dev\.de in .* has 1 lines, but dev\.yaml has 2"):
        read_must_c(must_c)
    (txt / "dev.de").unlink()
    with pytest.raises(FileError, match=r"cannot read .*dev\.de"):
        read_must_c(must_c)
    (txt / "dev.yaml").write_text("- {wav: a.wav, duration: 1}\n", encoding="utf-8")
    with pytest.raises(FileError, match=r"segment 1 of .*dev\.yaml has no offset"):
        read_segments(txt / "dev.yaml")
    (txt / "dev.yaml").write_text("{", encoding="utf-8")
    with pytest.raises(FileError, match=r"dev\.yaml is no YAML file"):
        read_segments(txt / "dev.yaml")
    with pytest.raises(FileError, match="no MuST-C at"):
        read_must_c(txt)


def test_a_file_can_neither_run_code_nor_overflow_the_stack(tmp_path):
    path, mark = tmp_path / "dev.yaml", tmp_path / "ran"
    path.write_text(f"- !!python/object/apply:os.mkdir ['{mark}']\n", encoding="utf-8")
    with pytest.raises(FileError, match=r"dev\.yaml is no YAML file .*could not determine"):
        read_segments(path)
    assert not mark.exists()
    path.write_text("[" * 100_000, encoding="utf-8")
    with pytest.raises(FileError, match=r"dev\.yaml is nested too deeply"):
        read_segments(path)
