import numpy as np
import pytest

from leap.errors import FileError
from leap.models.fbank import LeapformerFeatureExtractor
from leap.tasks.simul.audio.features import load_frames
from leap.tasks.simul.corpora import speech
from leap.tasks.simul.corpora.corpus import Corpus
from leap.tasks.simul.corpora.speech import estimate, store_speech


@pytest.fixture
def corpus(sentences):
    return Corpus("numbers", "en", "de", {"train": sentences, "test": sentences[:2]})


@pytest.fixture(autouse=True)
def small_shards(monkeypatch):
    monkeypatch.setattr(speech, "SHARD", 2)


class Voice:
    """Hums for as long as a sentence has letters, and counts how often it was asked to."""

    def __init__(self, fails_at=None):
        self.asked = []
        self.fails_at = fails_at

    def __call__(self, part, sentence):
        self.asked.append((part, sentence.id))
        if len(self.asked) == self.fails_at:
            raise KeyboardInterrupt
        if sentence.id == "3":
            raise FileError("there is nothing to say")
        if sentence.id == "4":
            return np.zeros(10, np.float32), "hum"
        times = np.arange(160 * len(sentence.source)) / 16000
        return (0.1 * np.sin(2000 * times)).astype(np.float32), "hum"


def store(corpus, folder, voice, kept="features"):
    extractor = LeapformerFeatureExtractor()
    return store_speech(corpus, folder, voice, extractor, kept, workers=1)


@pytest.mark.parametrize("kept", ["features", "sound"])
def test_every_sentence_gets_its_sound_and_the_others_are_noted(corpus, tmp_path, kept):
    found = store(corpus, tmp_path, Voice(), kept)
    extractor = LeapformerFeatureExtractor()
    assert [s.id for s in found.parts["train"]] == ["0", "1", "2", "5"]
    for sentence in found.parts["train"]:
        frames = load_frames(sentence.audio, extractor)
        assert len(frames) == sentence.n_frames == len(sentence.source)
        assert sentence.audio.holds_features == (kept == "features")
        assert sentence.speaker == "hum"
    assert found.left_out == [
        "train 3: there is nothing to say",
        "train 4: it is too short for a single frame of 10 ms",
    ]


def test_tests_are_kept_as_recordings(corpus, tmp_path):
    found = store(corpus, tmp_path, Voice())
    assert [s.audio.path.suffix for s in found.parts["test"]] == [".wav", ".wav"]


def test_work_that_was_stopped_goes_on(corpus, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        store(corpus, tmp_path / "stopped", Voice(fails_at=4))
    voice = Voice()
    resumed = store(corpus, tmp_path / "stopped", voice)
    assert ("train", "0") not in voice.asked and ("train", "2") in voice.asked
    whole = store(corpus, tmp_path / "whole", Voice())
    assert resumed.left_out == whole.left_out
    extractor = LeapformerFeatureExtractor()
    for part in ("train", "test"):
        for ours, theirs in zip(resumed.parts[part], whole.parts[part], strict=True):
            assert (ours.id, ours.n_frames) == (theirs.id, theirs.n_frames)
            np.testing.assert_array_equal(
                load_frames(ours.audio, extractor), load_frames(theirs.audio, extractor)
            )
    voice = Voice()
    assert store(corpus, tmp_path / "stopped", voice) == resumed
    assert not voice.asked


def test_a_folder_that_moves_keeps_its_sound(corpus, tmp_path):
    store(corpus, tmp_path / "here", Voice())
    (tmp_path / "here").rename(tmp_path / "there")
    found = store(corpus, tmp_path / "there", Voice())
    assert all(s.audio.path.is_file() for part in found.parts.values() for s in part)


def test_a_corpus_that_cannot_be_heard_is_refused(corpus, tmp_path):
    only = Corpus("numbers", "en", "de", {"train": corpus.parts["train"][3:4]})
    with pytest.raises(FileError, match=r"can be heard \(train 3: there is"):
        store(only, tmp_path, Voice())


def test_statistics_are_of_the_frames_as_they_are_kept(corpus, tmp_path):
    extractor = LeapformerFeatureExtractor()
    sentences = store(corpus, tmp_path, Voice()).parts["train"]
    frames = np.concatenate([load_frames(s.audio, extractor) for s in sentences])
    np.testing.assert_allclose(estimate(sentences, extractor).mean, frames.mean(axis=0), rtol=1e-4)
