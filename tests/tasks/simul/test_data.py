import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from leap.errors import ConfigError
from leap.tasks.simul.corpus import Sentence
from leap.tasks.simul.data import TextPairs, TokenBatches, collate
from leap.tasks.simul.vocabulary import EOS, PAD


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
