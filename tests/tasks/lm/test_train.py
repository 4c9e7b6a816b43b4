import json
import subprocess
import sys
from dataclasses import replace

import pytest

from leap.errors import ConfigError, FileError
from leap.tasks.lm.train import train


class Stop(Exception):
    pass


def losses(metrics):
    """Step, and the loss on training or held-out text."""
    return [
        (row["step"], name, row[name])
        for row in metrics["history"]
        for name in ("loss", "eval_loss")
        if name in row
    ]


def test_a_run_leaves_everything_in_its_folder(trained):
    for name in (
        "config.json",
        "metrics.json",
        "curve.png",
        "tokenizer/tokenizer.json",
        "model/model.safetensors",
        "model/config.json",
        "model/tokenizer.json",
        "checkpoints/checkpoint-6/optimizer.pt",
    ):
        assert (trained / name).stat().st_size > 0, name
    metrics = json.loads((trained / "metrics.json").read_text())
    assert metrics["steps"] == 6
    assert metrics["tokens_seen"] == 6 * 4 * 32
    assert metrics["parameters"] > 1000
    first, *_, last = (row["loss"] for row in metrics["history"] if "loss" in row)
    assert last < first - 0.2
    assert metrics["test"]["perplexity"] < 257


def test_a_finished_run_is_told_again_without_training(small, tmp_path):
    config = small(output=tmp_path, position_embedding="none")
    metrics = train(config)
    told = []
    assert train(config, told.append) == json.loads(json.dumps(metrics))
    assert told == []


def test_a_finished_run_on_a_text_that_changed_is_not_told_again(small, tmp_path, play):
    text = tmp_path / "text.txt"
    text.write_text(play.read_text(encoding="utf-8"), encoding="utf-8")
    config = small(output=tmp_path / "run", data=str(text), steps=1)
    train(config)
    text.write_text("More. " + text.read_text(encoding="utf-8"), encoding="utf-8")
    with pytest.raises(FileError, match="has changed since it began"):
        train(config)


def test_the_text_is_told_before_the_work(small, play, tmp_path):
    told = []
    config = small(output=tmp_path, steps=1)
    train(config, lambda _: told.append("trained"), lambda corpus: told.append(corpus.name))
    assert told[:2] == [str(play), "trained"] and told.count(str(play)) == 1


def test_a_killed_run_goes_on_to_the_same_curve(small, tmp_path):
    config = small(output=tmp_path / "whole", dropout=0.1, train_tokenizer=280)
    whole = train(config)

    def stop(status):
        if status.step == 5:
            raise Stop

    killed = replace(config, output=tmp_path / "killed")
    with pytest.raises(Stop):
        train(killed, stop)
    steps = []
    resumed = train(killed, lambda status: steps.append(status.step))
    assert steps[0] == 4
    assert losses(resumed) == losses(whole)
    assert resumed["test"] == whole["test"]


def test_a_killed_run_can_go_on_before_its_first_checkpoint(small, tmp_path):
    def stop(status):
        raise Stop

    config = small(output=tmp_path / "run", steps=3)
    with pytest.raises(Stop):
        train(config, stop)
    assert train(config)["steps"] == 3


def test_other_settings_do_not_overwrite_a_run(small, trained):
    before = sorted(trained.rglob("*"))
    with pytest.raises(FileError, match=r"holds a run with seed=0, not 7; give another output"):
        train(small(output=trained, position_embedding="none", attention="leap,leapformer", seed=7))
    assert sorted(trained.rglob("*")) == before


def test_a_text_that_changed_does_not_go_on(small, tmp_path, play):
    text = tmp_path / "text.txt"
    text.write_text(play.read_text(encoding="utf-8"), encoding="utf-8")
    config = small(output=tmp_path / "run", data=str(text))

    def stop(status):
        raise Stop

    with pytest.raises(Stop):
        train(config, stop)
    text.write_text("More. " + text.read_text(encoding="utf-8"), encoding="utf-8")
    with pytest.raises(FileError, match="has changed since it began"):
        train(config)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"data": "missing.txt"}, FileError, "no text file at missing.txt"),
        ({"tokenizer": "missing.model"}, FileError, "no tokenizer at missing.model"),
        ({"length": 100_000}, FileError, "tokens, too few for one sequence of length=100000"),
        ({"attention": "leapfromer"}, ConfigError, "attention='leapfromer' is none that"),
        ({"n_head": 3}, ConfigError, "hidden_size=16"),
    ],
    ids=str,
)
def test_bad_input_leaves_no_folder(small, tmp_path, settings, error, message):
    with pytest.raises(error, match=message):
        train(small(output=tmp_path / "run", **settings))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("attention", ["leapformer", "leap", "gpt2"])
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"n_head": 3}, "does not divide into n_head=3|n_head=3"),
        ({"n_head": 0}, "n_head=0 must be 1 or more"),
        ({"n_layer": 0}, "n_layer=0 must be 1 or more"),
        ({"hidden_size": 0}, "hidden_size=0 must be 1 or more"),
        ({"dropout": 1.5}, "hidden_dropout_prob=1.5 is a share"),
        ({"convolution": 1}, "convolution=1"),
        ({"windows": "0,global"}, "windows"),
        ({"formulation": "nix"}, "formulation"),
        ({"clocks": 0}, "clocks=0"),
    ],
    ids=str,
)
def test_sizes_that_make_no_model_are_refused_before_the_text_is_read(
    small, tmp_path, attention, settings, message
):
    with pytest.raises(ConfigError, match=message):
        train(small(output=tmp_path, data="missing.txt", attention=attention, **settings))


@pytest.mark.parametrize("name", ["length", "valid_tokens"])
def test_numbers_below_one_are_named(small, name):
    with pytest.raises(ConfigError, match=f"{name}=0 must be 1 or more"):
        small(**{name: 0})


def test_held_out_text_shorter_than_a_sequence_is_one_sequence(small, tmp_path):
    text = tmp_path / "short.txt"
    text.write_text("word " * 60)
    metrics = train(small(output=tmp_path / "run", data=str(text), length=64, steps=1))
    assert metrics["steps"] == 1


def test_two_processes_learn_what_one_does(small, tmp_path, play):
    one = train(small(output=tmp_path / "one", steps=3))
    flags = (
        f"--data {play} --output {tmp_path / 'two'} --hidden-size 16 --n-layer 2 --n-head 2 "
        "--dropout 0 --length 32 --batch 4 --steps 3 --evaluate-every 3 --log-every 1 "
        "--learning-rate 5e-3"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    done = subprocess.run(
        [*command, "2", "-m", "leap.cli", "lm", "train", *flags.split()],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    two = json.loads((tmp_path / "two" / "metrics.json").read_text())
    for ours, theirs in zip(losses(one), losses(two), strict=True):
        assert ours[:2] == theirs[:2]
        assert ours[2] == pytest.approx(theirs[2], rel=1e-5)
    assert two["test"]["nats"] == pytest.approx(one["test"]["nats"], rel=1e-5)
    assert done.stdout.count("wrote") == 1
