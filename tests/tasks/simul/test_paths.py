"""Read schedules, drawn for each batch."""

import pytest
import torch

from leap.errors import ConfigError
from leap.tasks.simul.data import TextPairs, TokenBatches
from leap.tasks.simul.paths import Collate, Drawn, Paths, wait_schedule


def item(n_source, n_target):
    return {"input_ids": torch.arange(4, 4 + n_source), "labels": torch.arange(4, 4 + n_target)}


def test_a_wait_is_a_staircase():
    assert wait_schedule(4, 3).tolist() == [3, 4, 5, 6]
    assert wait_schedule(3, 2, ratio=4).tolist() == [8, 12, 16]


def test_states_come_by_the_chunk():
    assert wait_schedule(4, 3, chunk_size=2).tolist() == [4, 4, 6, 6]
    assert wait_schedule(2, 1, ratio=4, chunk_size=8).tolist() == [8, 8]
    assert wait_schedule(2, 1, chunk_size=0) is None
    assert wait_schedule(2, "offline") is None


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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"waits": ()}, "one or more"),
        ({"waits": (0,)}, "holds 0"),
        ({"ratio": 0}, "ratio=0"),
        ({"chunk_sizes": (-1,)}, "chunk_sizes"),
    ],
)
def test_paths_that_lead_nowhere_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        Paths(**options)
