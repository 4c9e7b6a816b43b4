"""Promises of faithfulness: what is struck out, and that measures tell good orders from bad."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from leap.errors import ConfigError
from leap.explain.faithfulness import (
    KEPT,
    STRUCK,
    Case,
    Curves,
    curves_figure,
    interval,
    measure,
    rank_correlation,
    report_table,
    strikable,
    strike,
)
from leap.explain.importance import log_probabilities
from leap.models import (
    LeapConfig,
    LeapForCausalLM,
    LeapformerConfig,
    LeapformerForSequenceClassification,
)

SMALL = {"vocab_size": 31, "hidden_size": 16, "n_head": 2, "n_positions": 64, "n_layer": 1}


@pytest.fixture
def classifier():
    """Says 1 for a text with many of the tokens 20 to 30, whatever else is in it."""
    torch.manual_seed(0)
    config = LeapformerConfig(**SMALL, attention="leap", num_labels=2, position_embedding="none")
    model = LeapformerForSequenceClassification(config).eval()
    with torch.no_grad():
        weight = model.model.embed_tokens.weight
        weight.copy_(torch.randn_like(weight) * 0.1)
        weight[20:, 0] += 3
        for layer in model.model.layers:
            nn.init.zeros_(layer.block.feed_forward[3].weight)
            nn.init.zeros_(layer.block.attention.o_proj.weight)
        model.classifier = nn.Sequential(nn.Linear(16, 2))
        nn.init.zeros_(model.classifier[0].weight)
        model.classifier[0].weight[1, 0] = 3.0
    return model


def make_case(t=20):
    ids = torch.randint(1, 20, (1, t), generator=torch.Generator().manual_seed(0))
    ids[0, 4:8] = torch.tensor([20, 25, 29, 30])
    return Case(ids, 1)


def test_struck_tokens_are_left_out(classifier):
    case = make_case()
    order = torch.arange(20)
    most, least = strike(classifier, case, order)
    assert most.shape == least.shape == (len(STRUCK),)
    at = STRUCK.index(0.2)
    whole, without, kept = (
        log_probabilities(classifier, input_ids=ids)[0, 1]
        for ids in (case.input_ids, case.input_ids[:, 4:], case.input_ids[:, :16])
    )
    assert_close(most[at], (whole - without).detach())
    assert_close(least[at], (whole - kept).detach())
    assert most[0] == least[0] == 0 and torch.isclose(most[-1], least[-1])


def test_a_good_order_has_a_large_gap_and_one_at_random_none(classifier):
    cases = [Case(make_case().input_ids.roll(i, 1), 1) for i in range(10)]
    found = measure(classifier, cases, ["gradient", "random"])
    gaps = {name: each.measures()["gap"] for name, each in found.curves.items()}
    assert gaps["gradient"].min() > 0.1
    assert gaps["random"].mean().abs() < 0.1
    assert found.best() == "gradient" and found.n_texts == 10
    assert "random" not in found.unlearned and "gradient" in found.agreement


def test_measures_are_those_of_the_curves():
    falls = torch.tensor([STRUCK, STRUCK])
    found = Curves(falls * 2, falls).measures()
    assert_close(found["deletion"], torch.tensor([1.0, 1.0]))
    assert_close(found["insertion"], torch.tensor([0.5, 0.5]))
    assert_close(found["gap"], torch.tensor([0.5, 0.5]))
    assert_close(found["comprehensiveness"][0], 2 * torch.tensor(KEPT).mean())
    assert_close(found["sufficiency"][0], 1 - torch.tensor(KEPT).mean())


def test_an_interval_holds_the_mean_and_narrows_with_more_texts():
    few, many = torch.randn(20), torch.randn(2000)
    for values in (few, many):
        mean, low, high = interval(values)
        assert low < mean < high
    assert interval(many)[2] - interval(many)[1] < (interval(few)[2] - interval(few)[1]) / 3
    assert interval(few) == interval(few)


def test_the_token_that_predicts_is_not_struck_out():
    model = LeapForCausalLM(LeapConfig(**SMALL)).eval()
    assert strikable(model, make_case()) == 19
    found = measure(model, [make_case()], ["weights", "recency"])
    assert found.curves["weights"].most.isfinite().all()


def test_ranks_alone_are_compared():
    a = torch.rand(9)
    assert_close(rank_correlation(a, a.exp()), torch.tensor(1.0))
    assert_close(rank_correlation(a, -a), torch.tensor(-1.0))


def test_table_and_figure_have_every_method(classifier):
    found = measure(classifier, [make_case(), make_case()], ["weights", "gradient", "random"])
    table = report_table(found)
    assert table.rows[0][0] == "gradient" and {row[0] for row in table.rows} == set(found.curves)
    assert next(row for row in table.rows if row[0] == "random")[-1] == "-"
    assert len(curves_figure(found, "test").axes) == 2
    pytest.importorskip("pandas")
    assert set(found.table().columns) == {"method", "measure", "mean", "low", "high"}


def test_bad_input_is_named(classifier):
    with pytest.raises(ConfigError, match="method='x' is not known"):
        measure(classifier, [make_case()], ["x"])
    with pytest.raises(ConfigError, match="none of them twice"):
        measure(classifier, [make_case()], ["random", "random"])
    with pytest.raises(ConfigError, match="there are no texts"):
        measure(classifier, [], ["random"])
