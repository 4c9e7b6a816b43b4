"""Promises of the list of mechanisms."""

import pytest
import torch

from leap.errors import ConfigError
from leap.models import (
    ATTENTIONS,
    LeapformerConfig,
    LeapformerForCausalLM,
    LeapformerSeq2SeqConfig,
    usable_as,
)
from leap.models.mechanisms import ALL_FORMS

SMALL = {"hidden_size": 8, "n_head": 2, "n_layer": 1, "vocab_size": 11, "n_positions": 16}


@pytest.mark.parametrize("name", ATTENTIONS)
@pytest.mark.parametrize("form", ALL_FORMS)
def test_a_mechanism_builds_in_its_forms_and_says_so_of_others(name, form):
    config = LeapformerConfig(attention=name, **SMALL)
    if form in ATTENTIONS[name].forms:
        attention = config.build_attention(0, form)
        source = {"source": torch.randn(2, 7, 8)} if form == "cross" else {}
        y, _ = attention(torch.randn(2, 5, 8), **source)
        assert y.shape == (2, 5, 8)
    else:
        with pytest.raises(ConfigError, match=f"{name}.* as {form} attention; those that can"):
            config.build_attention(0, form)


def test_an_encoders_mechanism_makes_no_decoder():
    with pytest.raises(ConfigError, match="'fastformer' cannot be used as causal attention"):
        LeapformerForCausalLM(LeapformerConfig(attention="fastformer", **SMALL))
    assert "fastformer" in usable_as("bidirectional")
    assert "fastformer" not in usable_as("causal")


def test_options_reach_the_layer_they_are_named_for():
    options = {"leapformer": {"proportion_input": "projections"}}
    config = LeapformerConfig(attention="leapformer", attention_options=options, **SMALL)
    assert config.build_attention(0).proportion_input == "projections"
    assert LeapformerConfig.from_dict(config.to_dict()).attention_options == options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"leapfrog": {}}, "attention_options='leapfrog' is not known"),
        ({"softmax": {"hops": 2}}, r"attention_options\['softmax'\]={'hops': 2}: .*'hops'"),
    ],
)
def test_options_that_fit_nothing_are_errors(options, message):
    with pytest.raises(ConfigError, match=message):
        LeapformerConfig(attention="softmax", attention_options=options, **SMALL).build_attention(0)


def test_cosformers_encoder_goes_by_the_length_of_each_text():
    attention = LeapformerConfig(attention="cosformer", **SMALL).build_attention(0, "bidirectional")
    x = torch.randn(1, 5, 8)
    padded = torch.cat([x, torch.randn(1, 3, 8)], dim=1)
    mask = torch.tensor([[True] * 5 + [False] * 3])
    torch.testing.assert_close(attention(padded, key_mask=mask)[0][:, :5], attention(x)[0])


@pytest.mark.parametrize("part", ["attention", "encoder_attention", "cross_attention"])
def test_an_unknown_mechanism_of_a_translation_model_names_those_that_fit_alone(part):
    with pytest.raises(ConfigError, match=r"transformer cannot be .* those that can are leap") as e:
        LeapformerSeq2SeqConfig(**SMALL, **{part: "transformer"})
    assert "bigbird" not in str(e.value)
