"""Promises of the demonstration, at a size that takes seconds."""

from dataclasses import replace

import pytest
import torch

from leap.tasks.lm import demo as demonstrating
from leap.tasks.lm.demo import DemoConfig, demo, focus_of


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
    assert len(written.tokens) > 0


def test_focus_is_a_share_of_what_the_last_token_sees(small, shapes_unchecked):
    demo(small)
    model, tokenizer = demonstrating.load_model(
        demonstrating.run_configs(demonstrating._comparison(small))[demonstrating.LEAP].output
    )
    focus = focus_of(model, tokenizer, "def number_3(x):\n    return x + 3\n" * 3)
    assert "".join(focus.pieces) == "def number_3(x):\n    return x + 3\n" * 3
    assert len(focus.weights) == 2
    for weights in focus.weights:
        assert sum(weights) == pytest.approx(1, abs=1e-5)
    windowed = torch.tensor(focus.weights[0])
    assert (windowed[:-4] == 0).all()
