"""Promises of the demonstration, at a size that takes seconds."""

from dataclasses import replace

import pytest

from leap.bench.decode import measure_models
from leap.errors import ConfigError
from leap.tasks.lm import demo as demonstrating
from leap.tasks.lm.compare import Row
from leap.tasks.lm.demo import DemoConfig, Learner, conclusion, cost_table, demo


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
    asked = []

    def measure(models, contexts):
        asked.append((list(models), contexts))
        return measure_models(models, contexts)

    learners, written = demo(small, measure)
    # Both in one run, as the benches do.
    assert asked == [(["leap:windowed:none", "softmax:rotary"], (8, 64))]
    assert [learner.row.model for learner in learners] == ["leap:windowed:none", "softmax:rotary"]
    for learner in learners:
        assert learner.outcome.perplexity < learner.before
        assert set(learner.milliseconds) == {8, 64}
    leap, softmax = learners
    assert leap.state_bytes[8] == leap.state_bytes[64]
    assert softmax.state_bytes[8] < softmax.state_bytes[64]
    page = (small.output / "report.html").read_text()
    assert "<script" not in page
    assert "http" not in page
    assert f"{leap.outcome.perplexity:.2f}" in page
    assert "layer 0: leap, window of 4" in page
    for column in ("tokens read", "leap, ms", "softmax / leap", "softmax, bytes kept"):
        assert f"<th>{column}" in page
    assert conclusion(learners) in page
    assert len(written.tokens) > 0


def learner(model, milliseconds, state_bytes):
    row = Row(model, 1, None, ())
    return Learner(row, 1.0, milliseconds, state_bytes)


def test_costs_are_told_as_ratios_of_one_run():
    leap = learner("leap:windowed:none", {8: 2.0, 64: 2.0}, {8: 1000, 64: 1000})
    softmax = learner("softmax:rotary", {8: 1.0, 64: 18.0}, {8: 64, 64: 4096})
    costs = cost_table([leap, softmax])
    columns, rows = costs.columns, costs.rows
    assert columns[3] == "softmax / leap"
    assert rows == [
        ["8", "2.00", "1.00", "0.50", "1,000", "64"],
        ["64", "2.00", "18.00", "9.00", "1,000", "4,096"],
    ]
    assert conclusion([leap, softmax]) == (
        "After 64 tokens, one more takes softmax 9.0 times the time that it takes LEAP, and "
        "softmax keeps 4 times as much."
    )


def test_the_longest_text_shows_what_a_state_is_good_for():
    assert max(DemoConfig().contexts) >= 32768


@pytest.mark.parametrize(("setting", "value"), [("steps", 0), ("contexts", ()), ("contexts", (0,))])
def test_settings_that_do_not_fit_are_named(setting, value):
    with pytest.raises(ConfigError, match=f"{setting}="):
        DemoConfig(**{setting: value})
