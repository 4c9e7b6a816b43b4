from dataclasses import replace

import pytest
import torch

from leap.bench.train import TrainBenchConfig, _model, _tokens, check_loss, measure, page
from leap.errors import ConfigError, LeapError

TINY = TrainBenchConfig(lengths=(40, 9), preset="tiny", repeats=2, budget=0.05)


@pytest.fixture(scope="module")
def report():
    return measure(TINY)


def test_every_model_is_measured_at_every_length(report):
    cases = [(r.length, r.model) for r in report.results]
    assert cases == [(n, name) for n in (9, 40) for name in TINY.models]
    for result in report.results:
        assert result.seconds == min(result.turns) > 0
        assert result.tokens_per_second == 2 * result.length / result.seconds
        assert result.peak_bytes > 0


def test_models_have_the_same_sizes_and_no_dropout():
    sizes, gpt2 = TINY.sizes(), _model("gpt2", TINY).config
    assert (gpt2.n_embd, gpt2.n_layer, gpt2.n_head) == (
        sizes.hidden_size,
        sizes.n_layer,
        sizes.n_head,
    )
    assert gpt2.vocab_size == sizes.vocab_size and gpt2.n_inner == sizes.intermediate_size
    assert {gpt2.resid_pdrop, gpt2.embd_pdrop, gpt2.attn_pdrop} == {0.0}
    assert sizes.hidden_dropout_prob == 0.0


def test_a_loss_that_is_not_that_of_the_logits_is_not_measured():
    model, ids = _model("leapformer", TINY), _tokens(TINY, 20)
    check_loss("leapformer", model, ids)
    loss = model._loss
    model._loss = lambda *args, **kwargs: 1.01 * loss(*args, **kwargs)
    with pytest.raises(LeapError, match=r"leapformer has a loss of .* was not measured"):
        check_loss("leapformer", model, ids)


def test_tables_give_time_speed_up_tokens_per_second_and_memory(report):
    made = page(report)
    titles = [table.title.split(",")[0] for table in made.tables]
    assert titles[0] == "milliseconds of CPU time per step"
    assert titles[1:3] == ["speed-up over GPT-2", "tokens per second"]
    assert titles[3].startswith("peak memory")
    assert [row[0] for row in made.tables[1].rows] == ["leapformer", "linear", "leap"]
    assert "2 layers of width 32" in made.description and torch.__version__ in made.description


def test_without_gpt2_there_is_no_speed_up(report):
    ours = [r for r in report.results if r.model != "gpt2"]
    titles = [table.title for table in page(replace(report, results=ours)).tables]
    assert not any("speed-up" in title for title in titles)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"models": ("nothing",)}, "no model is called 'nothing'; there are .*gpt2"),
        ({"lengths": ()}, "nothing to measure"),
        ({"batch": 0}, "batch=0 must be at least 1"),
    ],
)
def test_settings_that_cannot_be_measured_are_refused(settings, reason):
    with pytest.raises(ConfigError, match=reason):
        TrainBenchConfig(**settings)
