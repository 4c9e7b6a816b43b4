"""Promises of `leap lra train`."""

import json
import math

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from leap.errors import ConfigError, FileError
from leap.models import usable_as
from leap.tasks.lra import budget as budgets
from leap.tasks.lra import cache
from leap.tasks.lra import train as training
from leap.tasks.lra.budget import Times, find_steps, steps_within
from leap.tasks.lra.cache import SPLITS, Examples, Sequences
from leap.tasks.lra.data import Collator, load_task
from leap.tasks.lra.evaluate import ACCURACY, score
from leap.tasks.lra.model import PAPER
from leap.tasks.lra.runs import Variant, run_configs, some
from leap.tasks.lra.train import TrainConfig, train


def read(path):
    return json.loads(path.read_text())


# The paper's configuration


@pytest.mark.parametrize("task", PAPER)
def test_the_default_is_the_papers(task):
    config = TrainConfig(task=task)
    (run,) = run_configs(config, [Variant(name="x", attention="leapformer")], PAPER[task].steps)
    known = PAPER[task]
    assert (run.steps, run.batch, run.learning_rate) == (
        known.steps,
        known.batch,
        known.learning_rate,
    )
    assert run.n_warmup(known.steps) == known.warmup
    assert (run.schedule, run.epsilon, run.weight_decay) == ("linear", 1e-6, 0.0)
    assert find_steps(config, []) == known.steps


def test_fewer_steps_keep_the_share_of_the_warmup_and_the_number_of_looks():
    config = TrainConfig(task="listops", steps=2000)
    recipe = config.recipe(2000, 0)
    assert recipe["warmup"] * 2000 == 100
    assert recipe["evaluate_every"] == 100
    assert config.recipe(130, 0)["evaluate_every"] == 50
    assert config.recipe(7, 0)["evaluate_every"] == 7


# Runs


def test_a_run_learns_and_leaves_all_it_should(trained, tiny_data):
    folder = trained / "text" / "leapformer" / "seed-1"
    metrics = read(folder / "metrics.json")
    names = {"task": "text", "attention": "leapformer", "seed": 1, "steps": 6, "batch": 8}
    assert metrics | names == metrics
    assert metrics["parameters"] == 75_650 + 2_180 + (512 + 16) * 64
    assert metrics["peak_bytes"] == 2**20
    for name in ("seconds_per_step", "cpu_seconds_per_step"):
        assert metrics[name] > 0
    assert metrics["test"]["examples"] == 14
    assert metrics["test"]["seconds"] > 0
    assert metrics["accuracy"] > 0.8  # There is one letter to look at.
    assert (folder / "curve.png").is_file() and (trained / "text" / "curves.png").is_file()

    model = AutoModelForSequenceClassification.from_pretrained(folder / "model")
    data = load_task("text", tiny_data, "test")
    again = score(model, data, Collator(data.info), 8)
    assert again.accuracy == metrics["accuracy"]
    assert again.loss == pytest.approx(metrics["loss"], rel=1e-5)


def test_the_best_checkpoint_is_the_most_accurate_on_validation(trained):
    metrics = read(trained / "text" / "softmax" / "seed-0" / "metrics.json")
    looks = {row["step"]: row for row in metrics["history"] if "eval_accuracy" in row}
    assert set(looks) == {3, 6}
    best = max(row["eval_accuracy"] for row in looks.values())
    assert metrics["best_score"] == best == looks[metrics["best_step"]]["eval_accuracy"]
    assert metrics["best_loss"] == looks[metrics["best_step"]]["eval_loss"]


def test_seeds_differ_and_a_run_can_be_repeated(trained, tiny, tmp_path):
    def losses(folder, seed=0):
        history = read(folder / "text" / "leapformer" / f"seed-{seed}" / "metrics.json")["history"]
        return [row["loss"] for row in history if "loss" in row]

    train(tiny(output=tmp_path))
    assert losses(tmp_path) == losses(trained)
    assert losses(trained, 1) != losses(trained)


class Stop(Exception):
    pass


def test_a_stopped_run_goes_on_to_the_same_result(trained, tiny, tmp_path):
    def stop(status):
        if status.step == 5:
            raise Stop

    with pytest.raises(Stop):
        train(tiny(output=tmp_path), stop)
    told = []
    (metrics,) = train(tiny(output=tmp_path), lambda status: told.append(status.step))
    assert told[0] == 4  # After the checkpoint of step 3.
    whole = read(trained / "text" / "leapformer" / "seed-0" / "metrics.json")
    for name in ("accuracy", "loss", "best_step", "best_loss"):
        assert metrics[name] == whole[name]


def test_a_run_that_is_done_is_not_trained_again(trained, tiny):
    told = []
    config = tiny(attention=("softmax",), seeds=(1,), output=trained)
    (metrics,) = train(config, told.append)
    assert not told
    assert metrics == read(trained / "text" / "softmax" / "seed-1" / "metrics.json")


def test_a_run_goes_on_to_more_steps(tiny, tmp_path):
    train(tiny(output=tmp_path))
    told = []
    (longer,) = train(tiny(output=tmp_path, steps=9, device="cpu"), told.append)
    assert [status.step for status in told if status.note is None][:1] == [7]
    assert longer["steps"] == 9


def test_a_folder_with_other_settings_is_not_written_to(trained, tiny):
    with pytest.raises(FileError, match="holds a run with batch=8, not 4"):
        train(tiny(batch=4, output=trained))


def test_data_that_was_made_anew_is_noticed(tiny, tiny_data, tmp_path, monkeypatch):
    def stop(status):
        raise Stop

    with pytest.raises(Stop):
        train(tiny(output=tmp_path), stop)
    monkeypatch.setattr(training, "digest", lambda data: "other")
    with pytest.raises(FileError, match="has changed since it began"):
        train(tiny(output=tmp_path))


def test_data_that_was_made_anew_is_noticed_after_the_end_too(trained, tiny, monkeypatch):
    monkeypatch.setattr(training, "digest", lambda data: "other")
    with pytest.raises(FileError, match="has changed since it began"):
        train(tiny(output=trained))


def test_every_validation_example_counts_alike(tiny, tiny_data, tmp_path):
    # 20 of them in batches of 8: the last is smaller.
    (metrics,) = train(tiny(output=tmp_path, valid_examples=None))
    folder = tmp_path / "text" / "leapformer" / "seed-0" / "model"
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    data = load_task("text", tiny_data, "valid")
    whole = score(model, data, Collator(data.info), 20)
    assert metrics["best_loss"] == pytest.approx(whole.loss, rel=1e-5)
    assert metrics["best_score"] == pytest.approx(whole.accuracy)


def test_a_test_takes_as_many_at_once_as_training(tiny, tmp_path, monkeypatch):
    sizes = []
    monkeypatch.setattr(
        training, "score", lambda *given, **how: sizes.append(given[-1]) or score(*given, **how)
    )
    train(tiny(batch=8, accumulate=4, steps=1, output=tmp_path))
    assert sizes == [2]


def test_the_curves_are_of_every_run_that_is_there(tiny, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(
        training, "plot_curves", lambda histories, *_, **__: drawn.append(set(histories))
    )
    for attention in ("softmax", "linear"):
        train(tiny(attention=(attention,), steps=1, output=tmp_path))
    assert drawn[-1] == {"softmax seed 0", "linear seed 0"}


@pytest.mark.parametrize("pooling", ["cls", "last"])
@pytest.mark.parametrize("task", ["retrieval-standin", "listops"])
def test_every_kind_of_task_and_pooling_trains(task, pooling, tiny, tmp_path):
    (metrics,) = train(tiny(task=task, pooling=pooling, steps=2, output=tmp_path))
    assert math.isfinite(metrics["loss"])
    assert metrics["peak_bytes"] is None


def test_the_model_is_changed_as_told(tiny, tmp_path):
    config = tiny(steps=1, evaluate_every=1, attention_dropout=0.25, dropout=0.5, output=tmp_path)
    train(config)
    settings = read(tmp_path / "text" / "leapformer" / "seed-0" / "model" / "config.json")
    assert (settings["attention_dropout"], settings["hidden_dropout_prob"]) == (0.25, 0.5)
    assert settings["attention"] == "leapformer"


# Scores


def test_a_score_is_over_every_example(trained, tiny_data):
    folder = trained / "text" / "leapformer" / "seed-0" / "model"
    model = AutoModelForSequenceClassification.from_pretrained(folder).train()
    data = load_task("text", tiny_data, "test")
    scores = [score(model, data, Collator(data.info), batch) for batch in (14, 3)]
    assert scores[0].accuracy == scores[1].accuracy
    assert scores[0].loss == pytest.approx(scores[1].loss, rel=1e-5)
    assert model.training
    logits = torch.tensor([[1.0, 0.0], [0.0, 1.0], [3.0, 2.0]]).numpy()
    labels = torch.tensor([0, 0, 0]).numpy()
    assert ACCURACY.compute(logits, labels) == pytest.approx(2 / 3)


def test_some_examples_are_the_same_for_all_and_of_every_class(tiny_data):
    data = load_task("text", tiny_data, "valid")
    chosen = some(data, 10)
    labels = [int(chosen[i]["labels"]) for i in range(10)]
    assert set(labels) == {0, 1}
    assert labels == [int(some(data, 10)[i]["labels"]) for i in range(10)]
    assert len(some(data, None)) == len(some(data, 99)) == len(data)
    lengths = [len(chosen[i]["input_ids"]) for i in range(10)]
    assert lengths == sorted(lengths) and lengths[0] < lengths[-1]


def test_batches_are_grouped_by_length_unless_told_otherwise(tiny, tmp_path, monkeypatch):
    seen = {}

    def collate(self, items, call=Collator.__call__):
        batch = call(self, items)
        seen[grouped].append(batch["attention_mask"].float().mean().item())
        return batch

    monkeypatch.setattr(Collator, "__call__", collate)
    for grouped in (True, False):
        seen[grouped] = []
        train(tiny(group_by_length=grouped, output=tmp_path / str(grouped)))
    assert sum(seen[True]) > sum(seen[False])


# Budgets


def test_a_budget_gives_every_run_equal_steps_that_are_kept(tiny, tmp_path, monkeypatch):
    budget = {"steps": None, "budget": 0.02, "evaluate_every": 5, "valid_examples": 8}
    config = tiny(**budget, attention=("softmax", "linear"), output=tmp_path)
    results = train(config)
    kept = read(tmp_path / "text" / "budget.json")
    assert set(kept["timed"]) == {"softmax", "linear"}
    assert {metrics["steps"] for metrics in results} == {kept["steps"]}
    (joined,) = train(tiny(**budget, attention=("leapformer",), output=tmp_path))
    assert joined["steps"] == kept["steps"]
    assert set(read(tmp_path / "text" / "budget.json")["timed"]) == {*kept["timed"], "leapformer"}
    for change, message in (
        ({"budget": 1.0}, r"budget=0\.02, not 1\.0"),
        ({"batch": 4}, "batch=8, not 4"),
        ({"accumulate": 2}, "accumulate=1, not 2"),
        ({"valid_examples": 9}, "valid_examples=8, not 9"),
        ({"test_examples": 9}, "test_examples=None, not 9"),
        ({"bf16": True}, "bf16=False, not True"),
    ):
        with pytest.raises(FileError, match=f"holds runs with {message}; give another output"):
            train(tiny(**budget | change, output=tmp_path))
    monkeypatch.setattr(budgets, "digest", lambda data: "other")
    with pytest.raises(FileError, match=r"holds runs with data=\w+, not other"):
        train(tiny(**budget, output=tmp_path))


@pytest.fixture
def timed(monkeypatch):
    """Names of the attentions whose steps were timed, each of which took a second."""
    names = []

    def time(config, variant):
        names.append(variant.name)
        return Times(step=1.0, look=0.0, test=0.0)

    monkeypatch.setattr(budgets, "_time", time)
    return names


def attentions(*names):
    return [Variant(name=name, attention=name) for name in names]


def test_runs_that_join_are_told_if_they_take_longer_than_the_budget(tiny, tmp_path, timed):
    def steps(*names, seeds=(0,)):
        config = tiny(steps=None, budget=2.0, seeds=seeds, output=tmp_path)
        return find_steps(config, attentions(*names), said.append)

    said = []
    assert steps("softmax", "linear") == steps("softmax", "linear") == steps("leap") == 60
    assert not said
    assert steps("softmax", "leap", "exp", seeds=(0, 1)) == 60
    sentence = "budget=2.0: these runs take 60 steps, as those that are there, and so about 6"
    assert said == [f"{sentence} minutes"]
    assert timed == ["softmax", "linear", "leap", "exp"]  # Each once.

    for name in ("softmax", "leap", "exp"):  # Runs that are done take no more time.
        folder = tmp_path / "text" / name / "seed-0"
        folder.mkdir(parents=True)
        (folder / "metrics.json").write_text("{}")
    steps("softmax", "leap", "exp", seeds=(0, 1))
    assert said[1].endswith("about 3 minutes")


def test_commands_that_begin_together_get_equal_steps(tiny, tmp_path, timed, monkeypatch):
    def settings(budget=1.0):
        return tiny(steps=None, budget=budget, output=tmp_path)

    def slow(config, times):
        monkeypatch.undo()
        monkeypatch.setattr(budgets, "_time", lambda *_: Times(step=2.0, look=0.0, test=0.0))
        find_steps(settings(), attentions("softmax"))  # Which is faster.
        return 99

    monkeypatch.setattr(budgets, "steps_within", slow)
    assert find_steps(settings(), attentions("linear")) == 30
    assert [path.name for path in (tmp_path / "text").iterdir()] == ["budget.json"]
    assert set(read(tmp_path / "text" / "budget.json")["timed"]) == {"softmax", "linear"}


def test_a_budget_is_for_all_runs_with_their_looks_and_tests(tiny):
    config = tiny(steps=None, budget=10.0, seeds=(0, 1), evaluate_every=10)
    times = [Times(step=1.0, look=2.0, test=30.0), Times(step=0.5, look=1.0, test=15.0)]
    # 300 seconds a seed, 45 of them for tests; a step takes 1.5 and each tenth of them 3 more.
    steps = steps_within(config, times)
    assert steps == 140
    assert 1.5 * 140 + 3 * 14 + 45 <= 300 < 1.5 * 141 + 3 * 15 + 45


def test_a_budget_too_small_for_a_step_says_so(tiny):
    with pytest.raises(ConfigError, match=r"budget=0\.1: one step and the tests take 0\.5 minutes"):
        steps_within(tiny(steps=None, budget=0.1), [Times(step=1.0, look=2.0, test=27.0)])


# Starting from a run of an easier level


@pytest.fixture(scope="module")
def shorter(tiny, tiny_data, tmp_path_factory):
    """Runs on texts half as long: a folder of them, and that of their task."""
    folder, name = tmp_path_factory.mktemp("shorter"), "text"
    whole = load_task(name, tiny_data).facts["task"]
    splits = {split: load_task(name, tiny_data, split).examples for split in SPLITS}
    halves = {
        split: Examples(Sequences.join([x.inputs[i][:6] for i in range(len(x))]), x.labels)
        for split, x in splits.items()
    }
    cache.write(folder / "data" / name, halves, {"task": whole | {"max_length": 6}})
    train(tiny(attention=("leapformer", "linformer"), data=folder / "data", output=folder))
    return folder / name


def test_a_run_begins_with_the_weights_of_another_and_new_positions(shorter, tiny, tmp_path):
    config = tiny(steps=1, learning_rate=1e-12, start=shorter, output=tmp_path)
    (metrics,) = train(config)
    assert metrics["start"] == "text, 6 steps of 8"
    before, after = (
        AutoModelForSequenceClassification.from_pretrained(
            folder / "leapformer" / "seed-0" / "model"
        ).state_dict()
        for folder in (shorter, tmp_path / "text")
    )
    positions = "model.embed_positions.weight"
    assert (len(before[positions]), len(after[positions])) == (8, 16)
    after[positions], new = after[positions].split(8)
    torch.testing.assert_close(after, before, atol=1e-6, rtol=0)
    assert new.std() > 0.01  # As embeddings begin.

    again = tiny(steps=1, start=tmp_path / "text", output=tmp_path / "again")
    assert train(again)[0]["start"] == "text, 6 steps of 8; text, 1 steps of 8"
    with pytest.raises(FileError, match="holds a run with start=text, 6 steps of 8, not None"):
        train(tiny(steps=1, learning_rate=1e-12, output=tmp_path))


def test_a_start_that_does_not_fit_is_named(shorter, tiny, tmp_path):
    with pytest.raises(FileError, match=r"no finished run in .*leapformer.seed-7; train it first"):
        train(tiny(start=shorter, seeds=(7,), output=tmp_path / "a"))
    with pytest.raises(ConfigError, match=r"has model\.layers\.0.* \[.*\], where this one has \["):
        train(tiny(attention=("leapformer", "linformer"), start=shorter, output=tmp_path / "b"))
    assert not (tmp_path / "b").exists()  # The first, which could, has not begun.
    (tmp_path / "other" / "leapformer" / "seed-0").mkdir(parents=True)
    (tmp_path / "other" / "leapformer" / "seed-0" / "metrics.json").write_text("{}")
    with pytest.raises(FileError, match="has no 'task': it is of no run of leap lra train"):
        train(tiny(start=tmp_path / "other", output=tmp_path / "d"))
    weights = shorter / "linformer" / "seed-0" / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(FileError, match=r"model\.safetensors cannot be read"):
        train(tiny(attention=("linformer",), start=shorter, output=tmp_path / "c"))


# Settings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"task": "chess"}, "task='chess' is not known; there are listops, listops-inter"),
        ({"attention": ("lstm",)}, "attention='lstm' is not known in encoders; there are leap"),
        ({"attention": ("linear", "linear")}, "attention=linear linear: .* none of them twice"),
        ({"steps": 5, "budget": 1.0}, r"steps=5 and budget=1\.0: give one of them"),
        ({"steps": None, "budget": 0.0}, r"budget=0\.0 must be more than 0 minutes"),
        ({"seeds": (1, 1)}, r"seeds=\(1, 1\): give one or more"),
        ({"seeds": (-1,)}, r"seeds=\(-1,\) must be from 0 to less than 2\^32"),
        ({"batch": 6, "accumulate": 4}, "batch=6 does not divide into accumulate=4 parts"),
        ({"valid_examples": 0}, "valid_examples=0 must be 1 or more"),
        ({"evaluate_every": 0}, "evaluate_every=0 must be 1 or more"),
        ({"steps": 0}, "steps=0 must be more than 0"),
        ({"batch": 0}, "batch=0 must be more than 0"),
        ({"learning_rate": 0.0}, r"learning_rate=0\.0 must be more than 0"),
    ],
    ids=str,
)
def test_settings_that_cannot_work_are_named(settings, message):
    with pytest.raises(ConfigError, match=message):
        TrainConfig(**settings)


def test_all_attentions_can_be_asked_for_at_once():
    named = [variant.attention for variant in TrainConfig(attention=("all",)).variants()]
    assert named == usable_as("bidirectional")


def test_an_attention_may_have_options_behind_its_name():
    (variant,) = TrainConfig(attention=("leapformer:divided:hidden8",)).variants()
    assert variant.name == "leapformer-divided-hidden8"
    assert variant.attention == "leapformer"
    assert variant.changes == {
        "proportion": "travelled",
        "places": "divided",
        "proportion_hidden": 8,
    }
    with pytest.raises(ConfigError, match=r"option 'sideways' in .* there are gate, .*conv4"):
        TrainConfig(attention=("leapformer:sideways",))


def test_data_that_is_not_there_says_how_to_make_it(tmp_path):
    with pytest.raises(FileError, match="leap lra prepare --task listops"):
        train(TrainConfig(data=tmp_path, output=tmp_path / "runs"))


@pytest.mark.parametrize("settings", [{"dropout": 2.0}, {"attention": ("linear", "leap:conv0")}])
def test_settings_that_make_no_model_are_refused_before_data_is_read(tiny, tmp_path, settings):
    with pytest.raises(ConfigError, match=r"dropout|convolution"):
        train(tiny(data=tmp_path / "missing", output=tmp_path / "runs", **settings))
