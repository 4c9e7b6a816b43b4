"""Small tasks that can be learnt, and small settings to learn them with."""

from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from leap.tasks.lra import cache
from leap.tasks.lra.cache import Examples, Sequences
from leap.tasks.lra.data import TASKS
from leap.tasks.lra.train import TrainConfig

SIZES = {"train": 64, "valid": 20, "test": 14}
LENGTH = 12


def make_examples(info, n, seed):
    """A text of one letter, of a length of its own, the letter being its class; or a pair."""
    chance = np.random.default_rng(seed)
    labels = (np.arange(n) * info.n_classes // n).astype(np.uint8)  # Sorted, as files may be.

    def texts(letters):
        lengths = chance.integers(3, LENGTH + 1, size=n)
        rows = zip(letters, lengths, strict=True)
        return Sequences.join([bytes([letter]) * length for letter, length in rows])

    if info.pad_id is None:
        return Examples(Sequences.rows(np.repeat(labels[:, None], LENGTH, axis=1)), labels)
    if info.two_inputs:
        first = chance.integers(0, 2, size=n)
        return Examples(texts(first), labels, texts((first + labels) % 2))
    return Examples(texts(labels), labels)


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory) -> Path:
    """A folder of tasks that one letter gives away."""
    folder = tmp_path_factory.mktemp("data")
    for name in ("listops", "text", "retrieval-standin", "image"):
        info = replace(TASKS[name], max_length=LENGTH)
        splits = {split: make_examples(info, n, i) for i, (split, n) in enumerate(SIZES.items())}
        cache.write(folder / name, splits, {"task": asdict(info)})
    return folder


@pytest.fixture(scope="session")
def tiny(tiny_data):
    """Makes the config of a short run."""
    common = {
        "task": "text",
        "steps": 6,
        "batch": 8,
        "learning_rate": 3e-3,
        "evaluate_every": 3,
        "data": tiny_data,
    }
    return lambda **settings: TrainConfig(**common | settings)


@pytest.fixture(scope="session")
def trained(tiny, tmp_path_factory) -> Path:
    """The folder of finished runs: two attentions with two seeds, and one on another task."""
    from leap.tasks.lra.train import train

    folder = tmp_path_factory.mktemp("runs")

    def count(call, device):
        call()
        return 2**20

    train(tiny(attention=("softmax", "leapformer"), seeds=(0, 1), output=folder), peak_bytes=count)
    train(tiny(task="image", attention=("leapformer",), output=folder), peak_bytes=count)
    return folder
