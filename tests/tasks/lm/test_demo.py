"""Promises of the demonstration, at a size that takes seconds."""

from dataclasses import replace

import pytest

from leap.tasks.lm import demo as demonstrating
from leap.tasks.lm.demo import DemoConfig, demo


@pytest.fixture
def small(monkeypatch, tmp_path):
    """The same comparison with a tiny text, models and windows."""
    text = tmp_path / "text"
    text.mkdir()
    for i in range(40):
        (text / f"{i}.txt").write_text(f"def number_{i}(x):\n    return x + {i}\n" * 20)
    whole = demonstrating._comparison

    def comparison(config):
        changes = {
            "data": str(text),
            "train_tokenizer": 300,
            "length": 32,
            "hidden_size": 16,
            "n_layer": 2,
            "n_head": 2,
            "batch": 4,
            "valid_tokens": 256,
        }
        return replace(whole(config), **changes)

    monkeypatch.setattr(demonstrating, "_comparison", comparison)
    return DemoConfig(output=tmp_path / "demo", steps=20, contexts=(8, 64))


def test_both_models_learn_and_the_report_shows_it(small, shapes_unchecked):
    learners, written = demo(small)
    assert [learner.row.model for learner in learners] == ["leap:windowed:none", "softmax:rotary"]
    for learner in learners:
        assert learner.row.perplexity < learner.before
        assert set(learner.milliseconds) == {8, 64}
    leap, softmax = learners
    assert leap.state_bytes[8] == leap.state_bytes[64]
    assert softmax.state_bytes[8] < softmax.state_bytes[64]
    page = (small.output / "report.html").read_text()
    assert "<script" not in page
    assert "http" not in page
    assert f"{leap.row.perplexity:.2f}" in page
    assert "layer 0: leap, window of 4" in page
    assert len(written.tokens) > 0
