"""From a prepared corpus to a run folder."""

import json

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from leap.errors import ConfigError, FileError
from leap.tasks.simul.model import load_run
from leap.tasks.simul.prepare import PrepareConfig, prepare
from leap.tasks.simul.train import TrainConfig, train

SMALL = {
    "hidden_size": 16,
    "feed_forward_size": 16,
    "n_layer": 1,
    "encoder_layers": 1,
    "n_head": 2,
    "tokens": 256,
    "steps": 6,
    "evaluate_every": 3,
    "log_every": 1,
    "average": 2,
}


@pytest.fixture(scope="module")
def numbers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "numbers"
    prepare(PrepareConfig(limit=60, vocabulary=120, output=folder))
    return folder


@pytest.fixture(scope="module")
def trained(numbers, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "numbers"
    train(TrainConfig(**SMALL, data=numbers, output=folder))
    return folder


def test_a_run_leaves_a_model_that_can_be_read(trained):
    metrics = json.loads((trained / "metrics.json").read_text())
    assert metrics["steps"] == 6
    model, vocabulary = load_run(trained)
    assert len(vocabulary) == model.config.vocab_size == metrics["pieces"]
    assert not model.training
    same = AutoModelForSeq2SeqLM.from_pretrained(trained / "model")
    tokens = AutoTokenizer.from_pretrained(trained / "model")("seven", return_tensors="pt")
    written = model.generate(**tokens, max_new_tokens=5)
    assert torch.equal(written, same.generate(**tokens, max_new_tokens=5))
    assert (trained / "curve.png").stat().st_size > 1000


def test_a_run_that_was_stopped_goes_on_to_the_same_end(numbers, trained, tmp_path):
    class Stop(Exception):
        pass

    def stop(status):
        if status.step == 5:
            raise Stop

    config = TrainConfig(**SMALL, data=numbers, output=tmp_path / "run")
    with pytest.raises(Stop):
        train(config, stop)
    metrics = train(config)
    whole = json.loads((trained / "metrics.json").read_text())
    losses, expected = (
        [row["loss"] for row in found["history"] if "loss" in row] for found in (metrics, whole)
    )
    assert losses == expected
    assert metrics["best_loss"] == whole["best_loss"]


def test_epochs_are_passes_over_the_batches(numbers, tmp_path):
    settings = SMALL | {"steps": None, "epochs": 1.0, "evaluate_every": 100}
    metrics = train(TrainConfig(**settings, data=numbers, output=tmp_path / "run"))
    seen = sum(1 for row in metrics["history"] if "loss" in row)
    assert metrics["steps"] == seen == 5


def test_each_attention_can_be_another(numbers, tmp_path):
    parts = {"encoder_attention": "softmax", "decoder_attention": "leap"}
    settings = SMALL | {"steps": 3, "n_layer": 2, "cross_attention": "leapformer,elu-linear"}
    train(TrainConfig(**settings, **parts, data=numbers, output=tmp_path / "run"))
    config = load_run(tmp_path / "run")[0].config
    assert config.encoder_attention == "softmax"
    assert config.cross_attention == ["leapformer", "elu-linear"]
    settings = SMALL | {"cross_attention": "leapformer,elu-linear", "output": tmp_path / "other"}
    with pytest.raises(ConfigError, match="2 names for 1 layers"):
        train(TrainConfig(**settings, data=numbers))


def test_what_cannot_be_read_is_an_error_that_says_so(trained, tmp_path):
    with pytest.raises(FileError, match="leap simul prepare"):
        train(TrainConfig(**SMALL, data=tmp_path, output=tmp_path / "run"))
    with pytest.raises(FileError, match="leap simul train"):
        load_run(tmp_path)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "config.json").write_text("{}")  # the run's settings, not a model's
    with pytest.raises(FileError, match="is not finished; give its leap simul train again"):
        load_run(tmp_path)
    with pytest.raises(ConfigError, match="tokens=0"):
        TrainConfig(tokens=0)
