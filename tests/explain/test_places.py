"""Promises of places: what layers read off tokens, and the map by which scores are weighed."""

import math

import pytest
import torch
from torch.testing import assert_close

from leap.errors import InputError
from leap.explain.places import places, places_table, where
from leap.models import (
    LeapConfig,
    LeapForCausalLM,
    LeapformerConfig,
    LeapformerForCausalLM,
    LeapformerForSeq2SeqLM,
    LeapformerForSequenceClassification,
    LeapformerSeq2SeqConfig,
)

SMALL = {"vocab_size": 61, "hidden_size": 16, "n_head": 2, "n_positions": 64, "n_layer": 2}
OPTIONS = {
    "travelled": {"proportion": "travelled", "clocks": 2},
    "learned": {"proportion": "learned"},
    "fixed": {"attention": "cosformer"},
}


def make_ids(*shape):
    return torch.randint(1, 61, shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("encoder", [False, True], ids=["decoder", "encoder"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_scores_times_the_concentration_are_the_weights(options, encoder):
    options = {"feature": "elu_plus_one", "position_embedding": "none", **options}
    if encoder and options.get("proportion") == "travelled":
        options["places"] = "divided"
    kind = LeapformerForSequenceClassification if encoder else LeapformerForCausalLM
    torch.manual_seed(0)
    model = kind(LeapformerConfig(**SMALL, **options)).double().eval()
    ids, given = make_ids(1, 9), []
    layer = model.model.layers[1].block.attention
    layer.register_forward_pre_hook(lambda m, a: given.append(a[0]))
    found = places(model, input_ids=ids)[1]
    model(input_ids=ids)
    x = given[0]
    q, k = (layer.split(p(x)) for p in (layer.q_proj, layer.k_proj))
    scores = layer.feature.query(q) @ layer.feature.key(k).mT * found.concentration()
    if not encoder:
        scores = scores.tril()
    assert_close(scores / scores.sum(-1, keepdim=True), layer.weights(x).double())


def test_travelled_places_are_the_sums_of_steps():
    model = LeapformerForCausalLM(LeapformerConfig(**SMALL, proportion="travelled"))
    for found in places(model, input_ids=make_ids(1, 9)):
        assert found.kind == "travelled"
        assert_close(found.key.float(), found.steps.cumsum(1))
        assert (found.follows_position() > 0.9).all() and (found.spread() > 0).all()


def test_half_lives_are_those_of_the_gates():
    config = LeapformerConfig(**SMALL, proportion="learned", gate="head")
    model = LeapformerForCausalLM(config).eval()
    gate = model.model.layers[0].block.attention.gate
    torch.nn.init.zeros_(gate.last.weight)
    torch.nn.init.zeros_(gate.last.bias)  # A gate of one half.
    first, second = places(model, input_ids=make_ids(1, 9))
    assert_close(first.half_life, torch.ones(2, 9))
    log_gate = math.log(0.5) / second.half_life
    assert (log_gate.exp() < 1).all() and (log_gate.exp() > 0).all()


def test_leap_has_a_focus_and_no_places():
    model = LeapForCausalLM(LeapConfig(**SMALL))
    found = places(model, input_ids=make_ids(1, 9))
    assert all(each.focus.shape == (2, 9) and each.key is None for each in found)
    with pytest.raises(InputError, match=r"layer 0 \(leap\) has no places that weigh scores"):
        found[0].concentration()


def test_of_a_translation_model_every_attention_is_told():
    config = LeapformerSeq2SeqConfig(
        vocab_size=61, hidden_size=16, n_head=2, n_layer=1, encoder_layers=1,
        proportion="travelled",
    )  # fmt: skip
    model = LeapformerForSeq2SeqLM(config).eval()
    found = places(model, input_ids=make_ids(1, 9), labels=make_ids(1, 5))
    assert {each.name for each in found} == {
        "encoder layer 0", "decoder layer 0", "decoder layer 0 cross"
    }  # fmt: skip
    cross = next(each for each in found if "cross" in each.name)
    assert cross.query.shape == (2, 5) and cross.key.shape == (2, 9)
    assert cross.concentration().shape == (2, 5, 9)


def test_the_table_has_a_row_for_each_number():
    pytest.importorskip("pandas")
    model = LeapformerForCausalLM(LeapformerConfig(**SMALL, proportion="travelled", gate="head"))
    found = places(model, input_ids=make_ids(1, 9))
    table = places_table(found)
    assert list(table.columns) == ["layer", "part", "head", "token", "value"]
    assert len(table) == 2 * 4 * 2 * 9
    one = table[(table.layer == "layer 1") & (table.part == "step") & (table["head"] == 1)]
    assert one.value.tolist() == pytest.approx(found[1].steps[1].tolist())


def test_layers_are_named_by_where_they_are():
    assert where("model.layers.3.block.attention") == "layer 3"
    assert where("model.decoder.layers.0.cross_attention") == "decoder layer 0 cross"
