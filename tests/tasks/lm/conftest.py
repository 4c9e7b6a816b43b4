"""A small text, small settings, and one trained model for all who only read it."""

import random
from pathlib import Path

import pytest

from leap.tasks.lm.train import TrainConfig, train

SMALL = {
    "hidden_size": 16,
    "n_layer": 2,
    "n_head": 2,
    "dropout": 0.0,
    "length": 32,
    "batch": 4,
    "steps": 6,
    "evaluate_every": 3,
    "log_every": 1,
    "learning_rate": 5e-3,
}


def make_text(n_lines=200):
    """Sentences of sixty made-up words, and Björn; now and then a blank line."""
    chance = random.Random(0)
    syllables = [a + b for a in "bdfgklmnprst" for b in "aeiou"]
    words = ["".join(chance.choices(syllables, k=chance.randint(1, 3))) for _ in range(60)]
    lines = [" ".join(["Björn", *chance.choices(words, k=4)]) + ".\n" for _ in range(n_lines)]
    return "".join(line + "\n" * (i % 10 == 9) for i, line in enumerate(lines))


@pytest.fixture(scope="session")
def play(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("text") / "play.txt"
    path.write_text(make_text(), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def small(play):
    """Makes the config of a small run."""
    return lambda **settings: TrainConfig(**SMALL | {"data": str(play)} | settings)


@pytest.fixture(scope="session")
def trained(small, tmp_path_factory) -> Path:
    """The folder of a finished run, with a model that knows no limit of length."""
    folder = tmp_path_factory.mktemp("runs") / "lm"
    train(small(output=folder, position_embedding="none", attention="leap,leapformer"))
    return folder
