"""Promises of the test of memory."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from leap.errors import ConfigError
from leap.reports.files import read_json
from leap.tasks.lm.recall import MARK, Questions, RecallConfig, accuracy_at, recall

FILLER = torch.arange(97, 123).repeat(20)


def test_a_word_stands_after_a_mark_and_is_asked_for_after_others():
    for i in range(50):
        item = Questions(FILLER, 4, length=80, count=50, seed=1)[i]
        tokens, answer = item["input_ids"], item["shift_labels"]
        first, *asked = (tokens == MARK).nonzero().flatten().tolist()
        assert asked[-1] == 79 and len(asked) <= 8
        word = tokens[first + 1]
        assert word > MARK
        assert (answer[asked] == word).all() and (answer != -100).sum() == len(asked)
        assert ((tokens >= 97) | (tokens == MARK) | (tokens == word)).all()


def test_words_stand_anywhere_and_are_drawn_anew():
    items = [Questions(FILLER, 4, length=12, count=400, seed=1)[i] for i in range(400)]
    places = {int((item["input_ids"] == MARK).nonzero()[0]) for item in items}
    words = {int(item["shift_labels"][-1]) - MARK for item in items}
    assert places == set(range(10))
    assert words == {1, 2, 3, 4}


class Memory(torch.nn.Module):
    """Answers with the word it read `reach` tokens ago at most, and else with the first one."""

    def __init__(self, reach):
        super().__init__()
        self.reach = reach

    def forward(self, input_ids, past_key_values=None, **_):
        text = input_ids
        if past_key_values is not None:
            text = torch.cat([past_key_values, input_ids], dim=1)
        known = text[:, 1] if text.shape[1] - 3 <= self.reach else torch.full_like(text[:, 1], 15)
        logits = torch.nn.functional.one_hot(known, 257)[:, None]
        return SimpleNamespace(past_key_values=text, logits=logits)


@pytest.mark.parametrize(("distance", "expected"), [(5, 1.0), (3000, 1.0), (3001, 0.25)])
def test_accuracy_is_that_of_a_model_whose_memory_is_known(distance, expected):
    found = accuracy_at(Memory(3000), FILLER, 4, distance=distance, questions=400)
    assert found == pytest.approx(expected, abs=0.08 * (expected < 1))


def test_questions_are_asked_where_the_model_is():
    class Elsewhere(torch.nn.Module):
        """Has its weights on a device without numbers, as any machine has it."""

        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1, device="meta"))
            self.devices = set()

        def forward(self, input_ids, past_key_values=None, **_):
            self.devices.add(input_ids.device.type)
            return SimpleNamespace(past_key_values=(), logits=torch.zeros(len(input_ids), 1, 257))

    model = Elsewhere()
    accuracy_at(model, FILLER, 4, distance=3, questions=2)
    assert model.devices == {"meta"}


@pytest.fixture
def config(play, tmp_path):
    return RecallConfig(
        models=("softmax:rotary", "leap:none"),
        data=str(play),
        length=6,
        distances=(3, 300),
        words=2,
        questions=16,
        hidden_size=16,
        n_layer=1,
        n_head=2,
        steps=2,
        learning_rate=2e-2,
        evaluate_every=200,
        log_every=200,
        output=tmp_path / "recall",
    )


def test_a_model_learns_to_recall(config):
    (row,) = recall(replace(config, models=("leap:none",), steps=100))
    assert row.accuracy[3] >= 0.9


def test_models_that_are_done_are_not_trained_again(config):
    rows = recall(config)
    assert [row.model for row in rows] == ["softmax:rotary", "leap:none"]
    assert len(read_json(config.output / "results.json")["rows"]) == 2
    assert (config.output / "recall.png").stat().st_size > 0
    assert "| leap:none |" in (config.output / "results.md").read_text()
    told = []
    assert recall(config, told.append) == rows
    assert not told


def test_another_distance_is_asked_without_training_again(config):
    config = replace(config, models=("leap:none",), steps=40)
    (row,) = recall(config)
    told = []
    (further,) = recall(replace(config, distances=(3, 50)), told.append)
    (whole,) = recall(replace(config, distances=(50,), output=config.output.with_name("anew")))
    assert list(further.accuracy) == [3, 50] and further.accuracy[3] == row.accuracy[3]
    assert further.accuracy[50] == whole.accuracy[50]
    assert all(status.step == config.steps for status in told)
    assert recall(config) == [row]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"models": ("leapformer:learned",)}, "leapformer:learned has learned positions"),
        ({"models": ()}, "models or distances are empty"),
        ({"words": 17}, "words=17 must be 16 or fewer"),
        ({"distances": (0,)}, "give 1 or more"),
    ],
)
def test_what_cannot_be_asked_is_named(change, message, play, tmp_path):
    with pytest.raises(ConfigError, match=message):
        recall(replace(RecallConfig(data=str(play), output=tmp_path / "r"), **change))
    assert not (tmp_path / "r").exists()
