from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from leap.errors import ConfigError, InputError
from leap.models.fbank import LeapformerFeatureExtractor
from leap.runtime.streaming.vocabulary import EOS, PAD
from leap.tasks.simul.audio.features import SpecAugment, load_frames
from leap.tasks.simul.audio.files import Audio, write_sound
from leap.tasks.simul.corpora.corpus import Sentence
from leap.tasks.simul.data import Collate, Drawn, SpeechPairs, TextPairs, TokenBatches, collate
from leap.tasks.simul.paths import Paths


class Sized:
    """Sentences of which only the size matters."""

    def __init__(self, sizes):
        self.sizes = sizes

    def __len__(self):
        return len(self.sizes)

    def __getitem__(self, index):
        return {"labels": torch.full([self.sizes[index]], index)}


def test_both_sides_end_with_eos(sentences, vocabulary):
    item = TextPairs(sentences, vocabulary)[0]
    assert item["input_ids"].tolist() == [*vocabulary.encode("twenty-one"), EOS]
    assert item["labels"].tolist() == [*vocabulary.encode("einundzwanzig"), EOS]


def test_padding_is_marked(sentences, vocabulary):
    data = TextPairs(sentences, vocabulary)
    batch = collate([data[0], data[1]])
    for row in (0, 1):
        source, target = data[row]["input_ids"], data[row]["labels"]
        real = batch["attention_mask"][row].bool()
        assert_close(batch["input_ids"][row][real], source)
        assert (batch["input_ids"][row][~real] == PAD).all()
        assert_close(batch["labels"][row][: len(target)], target)
        assert (batch["labels"][row][len(target) :] == -100).all()
    assert batch["attention_mask"].sum() == sum(len(data[row]["input_ids"]) for row in (0, 1))


def test_whole_batches_become_one(sentences, vocabulary):
    data = TextPairs(sentences, vocabulary)
    torch.testing.assert_close(collate([[data[0], data[1]]]), collate([data[0], data[1]]))


@given(
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=60),
    tokens=st.integers(1, 100),
    seed=st.none() | st.integers(0, 5),
)
def test_each_pass_has_every_sentence_once_in_batches_that_are_not_too_large(sizes, tokens, seed):
    batches = TokenBatches(Sized(sizes), tokens, seed=seed)
    for n_pass in (0, 1):
        found = [batches.places(n_pass * batches.per_pass + i) for i in range(batches.per_pass)]
        assert sorted(place for batch in found for place in batch) == list(range(len(sizes)))
        for batch in found:
            assert len(batch) * max(sizes[place] for place in batch) <= tokens or len(batch) == 1


def test_passes_differ_and_a_stopped_run_finds_its_batch_again():
    data = Sized([3, 4] * 20)
    batches = TokenBatches(data, tokens=16, n_batches=25, seed=1)
    assert len(batches) == 25
    drawn = [batches.places(i) for i in range(25)]
    first, second = drawn[: batches.per_pass], drawn[batches.per_pass : 2 * batches.per_pass]
    assert sorted(map(sorted, first)) != sorted(map(sorted, second))
    assert TokenBatches(data, tokens=16, n_batches=25, seed=1).places(20) == drawn[20]
    assert TokenBatches(data, tokens=16, seed=2).places(0) != drawn[0]
    assert [item["labels"][0].item() for item in batches[3]] == drawn[3]


def test_batches_of_nothing_are_refused(vocabulary):
    with pytest.raises(ConfigError, match="no sentences"):
        TokenBatches(TextPairs([], vocabulary), tokens=16)
    with pytest.raises(ConfigError, match="tokens=0 must be 1 or more"):
        TokenBatches(TextPairs([Sentence("a", "b")], vocabulary), tokens=0)


@pytest.fixture
def spoken(tmp_path, sentences):
    """The sentences with noise of different length for sound."""
    chance = np.random.default_rng(0)
    found = []
    for i, sentence in enumerate(sentences):
        sound = 0.1 * chance.standard_normal(1600 * (i + 1))
        write_sound(tmp_path / f"{i}.wav", sound.astype(np.float32))
        audio = Audio(tmp_path / f"{i}.wav")
        found.append(replace(sentence, audio=audio, n_frames=10 * (i + 1)))
    return found


def test_speech_comes_with_its_transcript(spoken, vocabulary):
    extractor = LeapformerFeatureExtractor(mean=[9.0] * 80, std=[2.0] * 80)
    data = SpeechPairs(spoken, vocabulary, extractor)
    item = data[1]
    expected = extractor.normalise(load_frames(spoken[1].audio, extractor))
    assert_close(item["input_features"], torch.from_numpy(expected))
    assert item["transcript"].tolist() == vocabulary.encode(spoken[1].source)
    assert item["labels"].tolist() == [*vocabulary.encode(spoken[1].target), EOS]

    batch = collate([data[0], item])
    assert batch["input_features"].shape == (2, 20, 80)
    assert batch["attention_mask"].sum(dim=1).tolist() == [10, 20]
    assert (batch["input_features"][0, 10:] == 0).all()
    assert (batch["transcript"][0, len(data[0]["transcript"]) :] == -100).all()
    assert set(batch) == {"input_features", "attention_mask", "transcript", "labels"}


def test_speech_whose_words_are_not_known_has_no_transcript(spoken, vocabulary):
    unknown = [replace(sentence, source="") for sentence in spoken[:2]]
    data = SpeechPairs([*unknown, spoken[2]], vocabulary, LeapformerFeatureExtractor())
    assert collate([data[0], data[1]])["transcript"].shape == (2, 0)
    transcript = collate([data[0], data[2]])["transcript"]
    assert (transcript[0] == -100).all() and (transcript[1] != -100).all()


def test_speech_to_train_on_has_gaps(spoken, vocabulary):
    data = SpeechPairs(spoken, vocabulary, LeapformerFeatureExtractor(), SpecAugment(1, 40, 1, 5))
    draws = [data[3]["input_features"] for _ in range(4)]
    assert any((draw == 0).any() for draw in draws)
    assert not all(torch.equal(draw, draws[0]) for draw in draws)


def test_sentences_that_nobody_speaks_are_refused(sentences, vocabulary):
    with pytest.raises(InputError, match="sentence 0 is not spoken"):
        SpeechPairs(sentences, vocabulary, LeapformerFeatureExtractor())


def test_speech_is_batched_by_its_frames(spoken, vocabulary):
    data = SpeechPairs(spoken, vocabulary, LeapformerFeatureExtractor())
    assert data.sizes == [16, 32, 32, 48, 64, 64]
    batches = TokenBatches(data, tokens=128, seed=None)
    assert [batches.places(i) for i in range(len(batches))] == [[0, 1, 2], [3, 4], [5]]


def item(n_source, n_target):
    return {"input_ids": torch.arange(4, 4 + n_source), "labels": torch.arange(4, 4 + n_target)}


def test_a_batch_has_one_path_which_its_number_decides():
    collate = Collate(Paths(waits=(1, 5, "offline"), chunk_sizes=(1, 0)))
    batches = [collate([(number, [item(3, 4), item(2, 2)])]) for number in range(60)]
    drawn = {
        (batch["chunk_size"], tuple(batch["visible"].tolist()) if "visible" in batch else None)
        for batch in batches
    }
    assert drawn == {(1, (1, 2, 3, 4)), (1, (5, 6, 7, 8)), (1, None), (0, None)}
    again = collate([(7, [item(3, 4), item(2, 2)])])
    assert again["chunk_size"] == batches[7]["chunk_size"]
    assert ("visible" in again) == ("visible" in batches[7])
    assert again["labels"].shape == (2, 4)


def test_a_transcript_is_kept_for_models_that_learn_it():
    spoken = {
        "input_features": torch.zeros(5, 2),
        "transcript": torch.tensor([4]),
        "labels": torch.tensor([5]),
    }
    for kept in (False, True):
        batch = Collate(Paths(waits=(1,)), with_transcript=kept)([(0, [spoken])])
        assert ("transcript" in batch) == kept


def test_batches_are_numbered(sentences, vocabulary):
    batches = TokenBatches(TextPairs(sentences, vocabulary), tokens=1, seed=None)
    drawn = Drawn(batches)
    assert len(drawn) == len(sentences)
    number, items = drawn[2]
    assert number == 2
    assert torch.equal(items[0]["labels"], batches[2][0]["labels"])
