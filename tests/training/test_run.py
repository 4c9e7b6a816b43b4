"""Promises of a run, whatever its task."""

import json
from dataclasses import asdict, replace

import pytest
import torch
from torch.utils.data import Dataset

from leap.errors import ConfigError, FileError
from leap.models import LeapformerConfig, LeapformerForCausalLM
from leap.training import Recipe, RunFolder, Work, train_run

RECIPE = Recipe(steps=2, batch=2, evaluate_every=2, log_every=1)
LIKE = {"best_loss": float, "seen": int}


class Rows(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        row = (torch.arange(9) + index) % 11
        return {"input_ids": row[:-1], "labels": row[:-1], "shift_labels": row[1:]}


def build():
    sizes = {"hidden_size": 8, "n_layer": 1, "n_head": 2, "n_positions": 8}
    return LeapformerForCausalLM(LeapformerConfig(vocab_size=11, **sizes))


WORK = Work(
    name="leapformer",
    title="rows",
    digests={"rows": "4"},
    build=build,
    train=Rows(),
    held_out=Rows(),
    recipe=RECIPE,
    results=lambda model, fitted: {**asdict(fitted), "seen": 4},
    folders={"tokenizer": lambda path: (path / "tokens.txt").write_text("0 to 10")},
)


def run(path, **changes):
    folder = RunFolder(path, {"steps": 2})
    return train_run(folder, LIKE, RECIPE, lambda: replace(WORK, **changes))


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    path = tmp_path_factory.mktemp("run")
    return path, run(path)


def test_the_folder_holds_all_that_a_run_leaves_behind(done):
    path, metrics = done
    names = ["config.json", "data.json", "curve.png", "model/config.json", "tokenizer/tokens.txt"]
    assert all((path / name).is_file() for name in names)
    assert json.loads((path / "metrics.json").read_text()) == metrics
    assert list(metrics)[-1] == "history" and metrics["seen"] == 4


def test_a_run_that_is_done_is_told_and_no_model_is_made(done):
    path, metrics = done
    assert run(path, build=lambda: pytest.fail("made again")) == metrics


def test_other_data_is_refused_even_of_a_run_that_is_done(done):
    with pytest.raises(FileError, match="has changed since it began"):
        run(done[0], digests={"rows": "5"})


def test_the_weights_depend_on_the_seed_alone(done, tmp_path):
    torch.rand(3)
    again = run(tmp_path)
    assert again["best_loss"] == done[1]["best_loss"]


def test_nothing_is_written_of_a_model_that_cannot_be_made(tmp_path):
    def refuse():
        raise ConfigError("no such model")

    with pytest.raises(ConfigError):
        run(tmp_path / "new", build=refuse)
    assert not (tmp_path / "new").exists()
