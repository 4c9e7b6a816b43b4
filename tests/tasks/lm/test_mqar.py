"""Promises of multi-query associative recall."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from leap.errors import ConfigError, FileError
from leap.reports.files import read_json
from leap.tasks.lm.mqar import HELD_OUT, TRAIN, Batches, MqarConfig, draw_sequences, mqar
from leap.training import RunFolder


def sequences(count=50, *, pairs=6, length=40, vocabulary=24, seed=0):
    drawn = draw_sequences(
        np.random.default_rng(seed), count=count, pairs=pairs, length=length, vocabulary=vocabulary
    )
    return drawn["input_ids"], drawn["shift_labels"]


def test_every_question_is_answered_by_the_value_of_its_key():
    for tokens, answers in zip(*sequences(), strict=True):
        keys, values = tokens[:12:2].tolist(), tokens[1:12:2].tolist()
        assert len(set(keys)) == len(set(values)) == 6
        assert max(keys) < 12 <= min(values)
        asked = (answers != -100).nonzero().flatten()
        value = dict(zip(keys, values, strict=True))
        assert sorted(tokens[asked].tolist()) == sorted(keys)
        assert answers[asked].tolist() == [value[key] for key in tokens[asked].tolist()]


def test_nothing_else_is_asked_and_no_filler_is_a_key():
    tokens, answers = sequences()
    assert (answers[:, :12] == -100).all()
    for row, answer in zip(tokens, answers, strict=True):
        filler = row[12:][answer[12:] == -100]
        assert len(filler) == 40 - 12 - 6
        assert not set(filler.tolist()) & set(row[:12:2].tolist())
    assert set(tokens.flatten().tolist()) == set(range(24))


def test_gaps_are_of_a_power_law():
    _, answers = sequences(20_000, pairs=1, length=34, vocabulary=8)
    asked = (answers != -100).nonzero()[:, 1]
    assert (asked % 2 == 0).all()
    found = torch.bincount((asked - 2) // 2, minlength=16) / len(asked)
    law = torch.arange(1, 17.0) ** -0.99
    torch.testing.assert_close(found, law / law.sum(), atol=0.01, rtol=0)


def test_keys_are_asked_for_in_any_order():
    tokens, answers = sequences(200, pairs=2, length=12)
    first = [row[answer != -100][0] == row[0] for row, answer in zip(tokens, answers, strict=True)]
    assert 50 < sum(first) < 150


@pytest.fixture
def config(tmp_path):
    return MqarConfig(
        models=("softmax:rotary",),
        widths=(16,),
        vocabulary=16,
        pairs=(2, 3),
        train_pairs=(2, 3),
        length=12,
        tokens_per_pair=4,
        sequences=8,
        steps=6,
        batch_tokens=96,
        evaluate_every=2,
        output=tmp_path / "mqar",
    )


def test_batches_mix_numbers_of_pairs_and_never_repeat(config):
    config = replace(config, train_pairs=(2, 6))
    batches = Batches(config, TRAIN, 4, seed=0)
    assert [batches[i]["input_ids"].shape for i in range(4)] == [(8, 12), (4, 24), (8, 12), (4, 24)]
    assert [int((batches[i]["labels"] != -100).sum()) for i in range(2)] == [16, 24]
    ids = batches[0]["input_ids"]
    assert torch.equal(ids, batches[0]["input_ids"])
    others = (batches[2], Batches(config, HELD_OUT, 4, 0)[0], Batches(config, TRAIN, 4, 1)[0])
    assert not any(torch.equal(ids, other["input_ids"]) for other in others)


def test_a_model_learns_to_recall_and_ends_early(config):
    told = []
    (row,) = mqar(
        replace(
            config,
            models=("softmax:rotary:conv4",),
            widths=(32,),
            steps=1000,
            batch_tokens=768,
            learning_rate=1e-2,
            sequences=100,
            evaluate_every=50,
            enough=0.9,
        ),
        lambda status: told.append((status.name, status.step)),
    )
    assert min(row.accuracy.values()) >= 0.85
    assert told[-1][0] == "softmax:rotary:conv4 32 seed 0" and told[-1][1] < 1000


def test_a_run_that_was_stopped_comes_to_the_same(config):
    class Killed(Exception):
        pass

    def kill(status):
        if status.step == 5:
            raise Killed

    with pytest.raises(Killed):
        mqar(config, kill)
    assert not (config.output / "results.json").exists()
    told = []
    rows = mqar(config, lambda status: told.append(status.step))
    assert min(told) == 5
    anew = replace(config, output=config.output.with_name("anew"))
    assert mqar(anew) == rows
    weights, expected = (
        torch.load(each.output / "softmax-rotary-16/seed-0/checkpoints/checkpoint-6/optimizer.pt")
        for each in (config, anew)
    )
    torch.testing.assert_close(weights["state"], expected["state"], rtol=0, atol=0)


def test_two_processes_do_not_train_in_one_folder(config):
    path = config.output / "softmax-rotary-16" / "seed-0"
    path.mkdir(parents=True)
    with RunFolder(path, {}).alone(), pytest.raises(FileError, match="is at work in"):
        mqar(config)


def test_the_table_and_the_picture_have_the_mean_and_spread_of_seeds(config):
    config = replace(config, models=("softmax:rotary", "linear:gate"), seeds=(0, 3), steps=2)
    rows = mqar(config)
    assert [(row.model, row.width) for row in rows] == [(model, 16) for model in config.models]
    for row in rows:
        both = [row.by_seed[seed][2] for seed in (0, 3)]
        assert row.accuracy[2] == pytest.approx(np.mean(both))
        assert row.spread[2] == pytest.approx(np.std(both, ddof=1))
    assert len(read_json(config.output / "results.json")["rows"]) == 2
    text = (config.output / "results.md").read_text()
    assert "| model | width | parameters | 2 in 12 | 3 in 12 |" in text
    assert "| linear:gate | 16 |" in text and " ± " in text and "seeds 0, 3" in text
    assert (config.output / "mqar.png").stat().st_size > 0


def test_what_is_done_is_kept_and_more_pairs_are_asked_without_training_again(config):
    (row,) = mqar(config)
    told = []
    (more,) = mqar(replace(config, pairs=(2, 5)), lambda status: told.append(status.step))
    assert more.accuracy[2] == row.accuracy[2] and list(more.accuracy) == [2, 5]
    assert all(step == config.steps for step in told)
    told.clear()
    assert mqar(config, lambda status: told.append(status.step)) == [row]
    assert not told


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"models": ("softmax:learned",)}, "softmax:learned has learned positions"),
        ({"models": ("softmax:rotary", "softmax:rotary")}, "none of them twice"),
        ({"models": ("nothing",)}, "attention='nothing' is none"),
        ({"widths": ()}, "widths=: give one or more"),
        ({"widths": (15,), "n_head": 2}, "'softmax:rotary': hidden_size=15 .* n_head=2"),
        ({"pairs": (0,)}, "pairs=.* give 1 or more"),
        ({"pairs": (9,)}, "vocabulary=16 is too small for 9 pairs.* 18 or more"),
        ({"tokens_per_pair": 3}, "tokens_per_pair=3 must be 4 or more"),
        ({"batch_tokens": 11}, "batch_tokens=11 is less than the 12 tokens"),
        ({"enough": 1.5}, "enough=1.5"),
        ({"seeds": (-1,)}, "seed=-1"),
    ],
)
def test_what_cannot_be_asked_is_named(change, message, config):
    with pytest.raises(ConfigError, match=message):
        mqar(replace(config, **change))
    assert not config.output.exists()
