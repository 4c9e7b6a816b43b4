import json
import random
import shutil
from dataclasses import replace
from importlib import import_module

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from leap.errors import ConfigError, FileError, TrainingError
from leap.models import LeapformerConfig, LeapformerForCausalLM
from leap.reports.progress import silent
from leap.training import Measure, Recipe, RunFolder, fit, whole_batches
from leap.training.checkpoints import Checkpoints
from leap.training.fit import Shuffled, mean_weights

RECIPE = Recipe(steps=8, batch=4, evaluate_every=4, log_every=1, warmup=0.0, learning_rate=1e-2)


class Counting(Dataset):
    """Rows that count upwards from anywhere: easy to foretell."""

    def __len__(self):
        return 10

    def __getitem__(self, index):
        row = (torch.arange(9) + index) % 11
        return {"input_ids": row[:-1], "labels": row[:-1], "shift_labels": row[1:]}


def make_model(dropout=0.0, attention="leapformer", **changes):
    torch.manual_seed(0)
    config = LeapformerConfig(
        attention=attention,
        vocab_size=11,
        hidden_size=8,
        n_layer=1,
        n_head=2,
        n_positions=8,
        hidden_dropout_prob=dropout,
        **changes,
    )
    return LeapformerForCausalLM(config)


def run(path, recipe=RECIPE, progress=silent, measure=None, collate=None, **options):
    folder = RunFolder(path, {"steps": recipe.steps}, recipe.extends)
    folder.create({})
    model = make_model(**options)
    further = {"measure": measure, "collate": collate}
    return model, fit(model, Counting(), Counting(), recipe, folder, progress, **further)


def losses(fitted):
    """Step, training loss or None, held-out loss or None."""
    points = [(row["step"], row.get("loss"), row.get("eval_loss")) for row in fitted.history]
    return [point for point in points if point[1:] != (None, None)]


class Stop(Exception):
    pass


def stop_at(step):
    def progress(status):
        if status.step == step:
            raise Stop

    return progress


def test_training_lowers_the_loss(tmp_path):
    _, fitted = run(tmp_path)
    trained = [loss for _, loss, _ in losses(fitted) if loss is not None]
    assert len(trained) == fitted.steps == 8
    assert trained[-1] < trained[0] - 0.2
    assert fitted.seconds_per_step > 0 and fitted.cpu_seconds_per_step > 0


def test_a_step_is_timed_until_the_device_is_done_with_it(tmp_path, monkeypatch):
    """Of wall time the median, which one slow step does not change; of CPU time the mean."""
    times = iter(range(100))
    devices = []
    module = import_module("leap.training.fit")  # By this name the package has its function.

    def now(device):
        devices.append(device.type)
        time = next(times)
        return time, time + 4.0 * (time > 10)

    monkeypatch.setattr(module, "now", now)
    _, fitted = run(tmp_path)
    assert fitted.seconds_per_step == 1.0
    assert fitted.cpu_seconds_per_step == pytest.approx((8 + 4) / 8)
    assert devices == ["cpu"] * 16


@pytest.mark.parametrize("step", [2, 4, 7])
def test_a_stopped_run_goes_on_to_the_same_curve(tmp_path, step):
    _, whole = run(tmp_path / "whole", dropout=0.2)
    with pytest.raises(Stop):
        run(tmp_path / "stopped", progress=stop_at(step), dropout=0.2)
    _, resumed = run(tmp_path / "stopped", dropout=0.2)
    assert losses(resumed) == losses(whole)


@pytest.mark.parametrize("step", [4, 8])
@pytest.mark.parametrize("where", ["begin", "seal", "rotate"])
def test_so_does_one_that_was_killed_while_it_wrote_a_checkpoint(
    tmp_path, monkeypatch, where, step
):
    _, whole = run(tmp_path / "whole", dropout=0.2)
    usual = getattr(Checkpoints, where)

    def stop(checkpoints, *args, **kwargs):
        if checkpoints.steps()[-1:] == [step] or args[0] == step:
            raise Stop
        usual(checkpoints, *args, **kwargs)

    with monkeypatch.context() as patch, pytest.raises(Stop):
        patch.setattr(Checkpoints, where, stop)
        run(tmp_path / "stopped", dropout=0.2)
    told = []
    _, resumed = run(tmp_path / "stopped", progress=told.append, dropout=0.2)
    assert losses(resumed) == losses(whole)
    assert not any(status.note for status in told)


def test_a_run_that_is_done_is_not_trained_again(tmp_path):
    model, first = run(tmp_path)
    steps = []
    again, second = run(tmp_path, progress=lambda status: steps.append(status.step))
    assert steps == []
    assert losses(second) == losses(first)
    torch.testing.assert_close(dict(again.named_parameters()), dict(model.named_parameters()))


@pytest.mark.parametrize("rate", [1e9, 1e30])
def test_a_loss_that_is_no_number_ends_the_run_at_once(tmp_path, rate):
    steps = []
    recipe = replace(RECIPE, learning_rate=rate, steps=100, schedule="constant")
    message = r"loss is (nan|inf) at step \d+, .* learning_rate below 1e.*, a longer warmup"
    with pytest.raises(TrainingError, match=message):
        run(tmp_path, recipe, lambda status: steps.append(status.step))
    assert max(steps, default=0) < 50


def test_a_held_out_loss_that_is_no_number_ends_the_run(tmp_path):
    class Blank(Counting):
        def __getitem__(self, index):
            row = super().__getitem__(index)
            return row | {"shift_labels": torch.full_like(row["labels"], -100)}

    folder = RunFolder(tmp_path, {})
    folder.create({})
    with pytest.raises(TrainingError, match="held-out loss is nan at step 4"):
        fit(make_model(), Counting(), Blank(), RECIPE, folder)


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_a_finished_run_goes_on_for_more_steps(tmp_path, schedule):
    recipe = replace(RECIPE, schedule=schedule, warmup=2.0)
    run(tmp_path / "longer", recipe, dropout=0.2)
    told = []
    longer = replace(recipe, steps=16)
    _, extended = run(tmp_path / "longer", longer, told.append, dropout=0.2)
    assert next(status.step for status in told if status.note is None) == 9
    notes = [status.note for status in told if status.note is not None]
    assert notes == [
        "going on from step 8 to 16: from here on the learning rate is that of the "
        f"{schedule} schedule over 16 steps"
    ]
    _, whole = run(tmp_path / "whole", longer, dropout=0.2)
    rates = [
        {row["step"]: row["learning_rate"] for row in fitted.history if "loss" in row}
        for fitted in (extended, whole)
    ]
    assert [rates[0][step] for step in range(9, 17)] == [rates[1][step] for step in range(9, 17)]
    if schedule == "constant":
        assert losses(extended) == losses(whole)


def test_a_run_without_its_checkpoints_cannot_go_on_for_more_steps(tmp_path):
    run(tmp_path)
    shutil.rmtree(tmp_path / "checkpoints")
    with pytest.raises(FileError, match="has no checkpoint to go on from to 16 steps"):
        run(tmp_path, replace(RECIPE, steps=16))
    assert json.loads((tmp_path / "config.json").read_text()) == {"steps": 8}


def test_the_last_checkpoint_is_kept_even_if_another_is_best(tmp_path):
    recipe = replace(RECIPE, steps=12, warmup=1.0, learning_rate=3.0, clip=1e6)
    _, fitted = run(tmp_path, recipe)
    assert fitted.best_step < 12
    assert Checkpoints(tmp_path / "checkpoints").whole() == [fitted.best_step, 12]


@pytest.mark.parametrize("seed", range(8))
def test_a_damaged_checkpoint_is_passed_over_and_the_result_is_the_same(tmp_path, seed):
    """Whatever file is damaged, and however."""
    recipe = replace(RECIPE, average=2)  # So that both checkpoints are kept.
    _, whole = run(tmp_path, recipe)
    chance = random.Random(seed)
    files = sorted((tmp_path / "checkpoints" / "checkpoint-8").iterdir())
    path = chance.choice(files)
    content = bytearray(path.read_bytes())
    if seed % 2:
        path.unlink()
    elif seed % 4:
        path.write_bytes(content[: chance.randrange(len(content))])
    else:
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
        path.write_bytes(content)
    told = []
    _, resumed = run(tmp_path, recipe, told.append)
    assert losses(resumed) == losses(whole)
    notes = [status.note for status in told if status.note is not None]
    assert len(notes) == 1 and "checkpoint-8 is passed over for checkpoint-4: " in notes[0]


def test_if_the_best_checkpoint_is_damaged_another_is_chosen_and_told_of(tmp_path):
    recipe = replace(RECIPE, steps=12, warmup=1.0, learning_rate=3.0, clip=1e6)
    _, first = run(tmp_path, recipe)
    (tmp_path / "checkpoints" / f"checkpoint-{first.best_step}" / "model.safetensors").unlink()
    told = []
    _, second = run(tmp_path, recipe, told.append)
    assert (second.best_step, second.best_loss) == (12, losses(second)[-1][2])
    (note,) = (status.note for status in told)
    assert "the best so far, is passed over for checkpoint-12: model.safetensors is missing" in note


def test_a_run_goes_on_where_it_was_moved_to(tmp_path):
    recipe = replace(RECIPE, steps=12, warmup=1.0, learning_rate=3.0, clip=1e6)
    first_model, first = run(tmp_path / "here", recipe)
    assert first.best_step < 12
    (tmp_path / "here").rename(tmp_path / "there")
    model, second = run(tmp_path / "there", recipe)
    assert second.best_step == first.best_step
    assert_close = torch.testing.assert_close
    assert_close(dict(model.named_parameters()), dict(first_model.named_parameters()))


def test_a_checkpoint_that_cannot_be_written_is_named_and_the_last_one_kept(tmp_path, monkeypatch):
    def fail(trainer, folder):
        if trainer.state.global_step > 4:
            raise RuntimeError("PytorchStreamWriter failed writing file data/0\nmore")

    _, whole = run(tmp_path / "whole")
    with monkeypatch.context() as patch:
        patch.setattr("transformers.Trainer._save_scaler", fail)
        message = (
            r"cannot write .*checkpoint-8 \(PytorchStreamWriter failed writing file data/0\); "
        )
        with pytest.raises(FileError, match=message):
            run(tmp_path / "full")
    assert Checkpoints(tmp_path / "full" / "checkpoints").whole() == [4]
    _, resumed = run(tmp_path / "full")
    assert losses(resumed) == losses(whole)


def test_a_checkpoint_holds_nothing_that_runs_when_it_is_read(tmp_path):
    """Even with a manifest that fits."""
    run(tmp_path)
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    torch.save(Runs(), checkpoints.at(8) / "optimizer.pt")
    checkpoints.seal(8)
    with pytest.raises(FileError, match=r"cannot go on from .*checkpoint-8 \(Weights only load"):
        run(tmp_path, replace(RECIPE, steps=16))
    assert not Runs.has_run


class Runs:
    """Does what it likes when it is unpickled."""

    has_run = False

    def __reduce__(self):
        return setattr, (Runs, "has_run", True)


def test_files_of_a_checkpoint_have_the_mode_of_others(tmp_path):
    run(tmp_path)
    usual = (tmp_path / "config.json").stat().st_mode
    files = (tmp_path / "checkpoints" / "checkpoint-8").iterdir()
    assert {path.stat().st_mode for path in files} == {usual}


def test_a_device_that_is_not_there_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    message = "device=cuda is not there; this machine and its torch have cpu"
    with pytest.raises(ConfigError, match=message):
        run(tmp_path, replace(RECIPE, device="cuda"))


def test_the_cpu_is_used_if_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: True)
    model, _ = run(tmp_path, replace(RECIPE, device="cpu"))
    assert model.device.type == "cpu"


def test_a_batch_that_cannot_fit_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"batch=100000000000 in parts of .* GiB and more"):
        run(tmp_path, replace(RECIPE, batch=10**11))


def test_the_best_weights_are_kept(tmp_path):
    # So large a rate, rising all the while, that it ends worse than it was.
    recipe = replace(RECIPE, steps=12, warmup=1.0, learning_rate=3.0, clip=1e6)
    model, fitted = run(tmp_path, recipe)
    held_out = {step: loss for step, _, loss in losses(fitted) if loss is not None}
    assert fitted.best_loss == min(held_out.values()) == held_out[fitted.best_step]
    assert fitted.best_step < 12
    rows = [Counting()[i] for i in range(10)]
    batch = {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
    with torch.no_grad():
        loss = float(model.eval()(**batch).loss)
    assert loss == pytest.approx(fitted.best_loss, rel=1e-5)


def test_the_best_weights_are_those_that_score_most_if_there_is_a_measure(tmp_path):
    scores = iter([0.25, 0.75, 0.5])
    seen, told = [], []

    def compute(logits, labels):
        seen.append((logits.shape, labels.shape))
        return next(scores)

    measure = Measure("luck", compute)
    recipe = replace(RECIPE, steps=12)
    _, fitted = run(tmp_path, recipe, told.append, measure, loss_without_logits=False)
    assert (fitted.best_step, fitted.best_score) == (8, 0.75)
    held_out = {step: loss for step, _, loss in losses(fitted) if loss is not None}
    assert fitted.best_loss == held_out[8] > held_out[12]
    assert seen == [((10, 8, 11), (10, 8))] * 3  # All of the held-out examples.
    assert told[-1].numbers["scoring"] == 0.5
    assert [row["eval_luck"] for row in fitted.history if "eval_luck" in row] == [0.25, 0.75, 0.5]


def test_batches_are_made_as_told(tmp_path):
    sizes = []

    def collate(items):
        sizes.append(len(items))
        return {key: torch.stack([item[key] for item in items]) for key in items[0]}

    run(tmp_path, collate=collate)
    # Eight to learn from, and twice three to look at; some are fetched before their turn. And one
    # example by itself, for the alarm.
    assert sorted(sizes) == [1] + [2] * 2 + [4] * (8 + 2 * 2)


def test_held_out_data_can_be_cut_to_whole_batches():
    assert [len(whole_batches(Counting(), n)) for n in (3, 5, 10, 11)] == [9, 10, 10, 10]


def test_the_optimiser_is_as_the_recipe_says(tmp_path):
    def curve(name, **changes):
        _, fitted = run(tmp_path / name, replace(RECIPE, **changes))
        return [loss for _, loss, _ in losses(fitted) if loss is not None]

    plain = curve("plain")
    assert curve("betas", betas=(0.5, 0.9)) != plain
    assert curve("epsilon", epsilon=0.1) != plain
    assert curve("share", warmup=0.5) == curve("steps", warmup=4.0) != plain


def test_accumulation_does_not_change_what_is_learnt(tmp_path):
    _, whole = run(tmp_path / "1")
    _, parts = run(tmp_path / "4", replace(RECIPE, accumulate=4))
    for one, other in zip(losses(whole), losses(parts), strict=True):
        assert one[0] == other[0]
        assert (one[1] or one[2]) == pytest.approx(other[1] or other[2], rel=1e-5)


@pytest.mark.parametrize("attention", ["leapformer", "leap", "softmax"])
def test_bfloat16_trains_too(tmp_path, attention):
    _, fitted = run(tmp_path, replace(RECIPE, bf16=True), attention=attention)
    trained = [loss for _, loss, _ in losses(fitted) if loss is not None]
    assert trained[-1] < trained[0] - 0.1


def test_progress_is_told_after_every_step(tmp_path):
    told = []
    run(tmp_path, progress=told.append)
    assert [status.step for status in told] == [1, 2, 3, 4, 4, 5, 6, 7, 8, 8]
    assert all(status.steps == 8 for status in told)
    assert set(told[-1].numbers) == {"loss", "held-out"}


def test_the_last_step_is_evaluated_even_between_evaluations(tmp_path):
    _, fitted = run(tmp_path, replace(RECIPE, steps=6))
    assert [step for step, _, loss in losses(fitted) if loss is not None] == [4, 6]


def test_a_batch_that_does_not_divide_among_processes_says_what_would(tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.TrainingArguments.world_size", property(lambda _: 3))
    with pytest.raises(ConfigError, match=r"batch=4 does not divide among 3 parts .* is 6"):
        run(tmp_path)


def test_nothing_is_printed(tmp_path, capfd):
    run(tmp_path)
    assert capfd.readouterr() == ("", "")


def test_there_is_a_log_for_tensorboard(tmp_path):
    pytest.importorskip("tensorboard")
    run(tmp_path)
    assert list((tmp_path / "log").glob("events.out.tfevents.*"))


def test_each_pass_shows_everything_once_in_an_order_of_its_own():
    rows = Shuffled(Counting(), 5, 4, 1)
    shown = [int(rows[i]["input_ids"][0]) for i in range(20)]
    assert sorted(shown[:10]) == sorted(shown[10:]) == list(range(10))
    assert shown[:10] != shown[10:]
    again = Shuffled(Counting(), 5, 4, 1)
    assert int(again[13]["input_ids"][0]) == shown[13]  # Wherever one begins.
    other = [int(Shuffled(Counting(), 5, 4, 2)[i]["input_ids"][0]) for i in range(10)]
    assert other != shown[:10]


def test_batches_are_of_about_one_length_and_shuffled(monkeypatch):
    lengths = np.array([9, 1, 5, 2, 8, 3, 7, 4, 6, 0])
    rows = Shuffled(Counting(), 5, 4, 1, lengths)
    shown = np.array([int(rows[i]["input_ids"][0]) for i in range(20)])
    assert sorted(shown) == sorted([*range(10)] * 2)  # Two passes, which share a batch.
    batches = lengths[shown].reshape(5, 4)
    assert (np.ptp(batches, axis=1) <= 2).all()
    assert batches.min(axis=1).tolist() != sorted(batches.min(axis=1))
    again = Shuffled(Counting(), 5, 4, 1, lengths)
    assert int(again[13]["input_ids"][0]) == shown[13]
    monkeypatch.setattr(Shuffled, "SPAN", 2)
    spans = Shuffled(Counting(), 5, 4, 1, lengths)
    shown = [int(spans[i]["input_ids"][0]) for i in range(20)]
    plain = [int(Shuffled(Counting(), 5, 4, 1)[i]["input_ids"][0]) for i in range(20)]
    for start in (0, 8, 16):  # Sorted among those of two batches, the last being one.
        assert sorted(shown[start : start + 8]) == sorted(plain[start : start + 8])


def test_the_mean_of_the_last_checkpoints_is_taken_if_it_does_better(tmp_path):
    # Steps too large to stay in the valley: between them lies a better place.
    changes = {"steps": 40, "learning_rate": 0.1, "schedule": "constant"}
    recipe = replace(RECIPE, evaluate_every=1, average=12, **changes)
    model, fitted = run(tmp_path, recipe, dropout=0.3, proportion="learned")
    seen = [loss for _, _, loss in losses(fitted) if loss is not None]
    assert fitted.averaged
    assert fitted.best_loss < min(seen)
    newest = sorted_checkpoints(tmp_path)[-12:]
    mean = mean_weights([path / "model.safetensors" for path in newest])
    for name, value in mean.items():
        torch.testing.assert_close(model.state_dict()[name], value)


def test_the_mean_is_left_alone_if_it_does_worse(tmp_path):
    _, fitted = run(tmp_path, replace(RECIPE, evaluate_every=1, average=8))
    assert not fitted.averaged
    assert fitted.best_loss == losses(fitted)[-1][2]


def test_examples_of_the_whole_run_are_taken_in_order(tmp_path):
    seen = []

    def collate(examples):
        seen.extend(int(example["input_ids"][0]) for example in examples)
        return torch.utils.data.default_collate(examples)

    folder = RunFolder(tmp_path, {})
    folder.create({})
    recipe = replace(RECIPE, steps=2, batch=4, evaluate_every=2)
    fit(make_model(), Counting(), Counting(), recipe, folder, collate=collate, shuffle=False)
    assert seen[:9] == [0, *range(8)]  # The alarm looks at one before.


def sorted_checkpoints(path):
    return sorted((path / "checkpoints").iterdir(), key=lambda p: int(p.name.split("-")[1]))
