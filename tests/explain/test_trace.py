"""Promises of a trace: what `explain` finds in O(t^2), for one token and in linear time."""

import pytest
import torch
from torch.testing import assert_close
from transformers import GPT2Config, GPT2LMHeadModel

from leap.errors import InputError
from leap.explain import explain, trace
from leap.models import (
    LeapConfig,
    LeapForCausalLM,
    LeapformerConfig,
    LeapformerForCausalLM,
    LeapformerForSequenceClassification,
)

SMALL = {"vocab_size": 61, "hidden_size": 16, "n_head": 2, "n_positions": 64}
SMALL |= {"feature": "elu_plus_one"}
MODELS = {
    "leap": lambda: LeapForCausalLM(LeapConfig(**SMALL, n_layer=3)),
    "travelled": lambda: LeapformerForCausalLM(
        LeapformerConfig(**SMALL, n_layer=2, proportion="travelled", gate="head", convolution=3)
    ),
    "signed": lambda: LeapformerForCausalLM(
        LeapformerConfig(**SMALL, n_layer=2, position_embedding="rotary")
    ),
    "gated-delta": lambda: LeapformerForCausalLM(
        LeapformerConfig(**SMALL, n_layer=2, attention="gated-delta")
    ),
    "hybrid": lambda: LeapformerForCausalLM(
        LeapformerConfig(**SMALL, n_layer=3, attention=["leap", "leapformer", "softmax"])
    ),
    "classifier": lambda: LeapformerForSequenceClassification(
        LeapformerConfig(**SMALL, n_layer=2, attention="leap", num_labels=2)
    ),
}
NORMED = ("gated-delta",)
"""Whose weights `explain` brings to one scale."""


def make_ids(*shape):
    return torch.randint(1, 61, shape, generator=torch.Generator().manual_seed(0))


@pytest.fixture(params=MODELS)
def name(request):
    return request.param


@pytest.fixture
def model(name):
    torch.manual_seed(0)
    return MODELS[name]().double().eval()


def test_rows_are_those_of_the_weights(name, model):
    ids = make_ids(2, 9)
    found, weights = trace(model, ids), explain(model, ids).weights
    for at in (4, -1):
        row = found.rows(at)
        if name in NORMED:
            row = row / row.abs().sum(-1, keepdim=True)
        assert_close(row, weights[..., at, :])
    if name not in NORMED:
        assert_close(found.rows(None), weights.mean(-2))


def test_the_roll_out_is_that_of_the_weights(model):
    ids = make_ids(2, 9)
    found, explained = trace(model, ids), explain(model, ids)
    for at in (5, -1):
        assert_close(found.through_layers(at), explained.through_layers(at).float())


def test_contributions_add_up_to_what_each_layer_adds_to_the_residual_stream(model):
    given = []
    body = model.model
    for layer in body.layers:
        layer.block.attention.register_forward_hook(lambda m, i, o: given.append((m, o[0])))
    found = trace(model, make_ids(2, 9)).contributions(6)
    assert found.shape == (2, len(body.layers), 9, 16)
    for i, (layer, y) in enumerate(given[: len(body.layers)]):
        bias = 0 if layer.o_proj.bias is None else layer.o_proj.bias
        assert_close(found[:, i].sum(1) + bias, y[:, 6])


def test_norms_weigh_by_what_values_add(model):
    found = trace(model, make_ids(1, 9))
    layer, given = found.layers[0], found.given[0]
    lengths = layer.added(**given).norm(dim=-1)
    assert_close(found.norms(3)[:, 0], (found.rows(3)[:, 0].abs() * lengths).sum(1))


def test_pads_count_for_nothing(model):
    ids = make_ids(1, 9)
    padded = torch.cat([torch.zeros(1, 3, dtype=torch.long), ids], dim=1)
    mask = torch.cat([torch.zeros(1, 3), torch.ones(1, 9)], dim=1).long()
    found, alone = trace(model, padded, attention_mask=mask), trace(model, ids)
    for at in (-1, None):
        assert_close(found.rows(at)[..., 3:], alone.rows(at))
        assert_close(found.through_layers(at)[..., 3:], alone.through_layers(at))
        assert not found.rows(at)[..., :3].any()


def test_the_table_has_a_row_per_token_layer_and_head():
    pytest.importorskip("pandas")
    model = MODELS["leap"]()
    found = trace(model, make_ids(1, 4))
    table = found.table(["a", "b", "c", "d"], at=2)
    assert list(table.columns) == ["layer", "head", "token", "text", "weight"]
    assert len(table) == 3 * 2 * 4
    row = table[(table.layer == 1) & (table["head"] == 1) & (table.token == 2)].iloc[0]
    assert row.text == "c" and row.weight == pytest.approx(float(found.rows(2)[0, 1, 1, 2]))
    with pytest.raises(InputError, match="1 pieces are not the 4 tokens"):
        found.table(["a"])


def test_of_a_classifier_with_a_token_of_its_own_only_the_text_is_told():
    config = LeapformerConfig(**SMALL, n_layer=1, pooling="cls", num_labels=2)
    found = trace(LeapformerForSequenceClassification(config).eval(), make_ids(1, 9))
    assert found.rows(None).shape[-1] == found.through_layers(None).shape[-1] == 9


def test_a_long_text_is_read_in_linear_memory():
    """Weights of 20,000 tokens would take 3 GB for each of the layers and heads."""
    model = LeapForCausalLM(LeapConfig(**SMALL, n_layer=2, position_embedding="none"))
    found = trace(model, make_ids(1, 20_000))
    assert_close(found.rows()[0, -1].sum(-1), torch.ones(2))
    assert_close(found.through_layers().sum(), torch.tensor(1.0))


def test_bad_input_is_named():
    found = trace(MODELS["leap"](), make_ids(1, 4))
    with pytest.raises(InputError, match="token 4 is not among the 4 of this text; give -4 to 3"):
        found.rows(4)
    config = GPT2Config(vocab_size=61, n_embd=16, n_layer=1, n_head=2, n_positions=64)
    with pytest.raises(InputError, match=r"this model \(gpt2\) has no attention of leap"):
        trace(GPT2LMHeadModel(config), make_ids(1, 4))
