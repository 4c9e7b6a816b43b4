"""Promises of the configurations."""

import json

import pytest
from transformers import AutoConfig

from leap.errors import ConfigError
from leap.models import (
    LeapConfig,
    LeapForCausalLM,
    LeapformerConfig,
    LeapformerForCausalLM,
    LeapformerForSequenceClassification,
    LeapformerSeq2SeqConfig,
    LeapformerSpeechConfig,
)
from leap.models.config import BEST, PAPER


def test_the_originals_call_works_as_written():
    config = LeapConfig(
        hidden_size=128,
        vocab_size=32100,
        n_positions=2048,
        n_layer=6,
        use_local_att=True,
        window_sizes=None,
        n_heads=4,
        initializer_range=0.02,
        hidden_dropout_prob=0.1,
    )
    assert config.window_sizes == [4, 8, 16, 32, 64, None]
    assert LeapForCausalLM(config).num_parameters() > 0


@pytest.mark.parametrize("name", ["n_heads", "n_head", "num_attention_heads"])
def test_heads_go_by_three_names(name):
    config = LeapConfig(hidden_size=64, **{name: 8})
    assert config.n_heads == config.n_head == config.num_attention_heads == 8


def test_one_setting_under_two_names_is_given_once(tmp_path):
    config = LeapConfig(hidden_size=64, n_heads=8, n_head=8)
    config.save_pretrained(tmp_path)
    assert "num_attention_heads" not in (tmp_path / "config.json").read_text()
    assert "n_heads" not in (tmp_path / "config.json").read_text()
    assert LeapConfig.from_pretrained(tmp_path, n_heads=4).n_head == 4
    path = tmp_path / "config.json"  # As it was saved while n_heads was the setting's name.
    path.write_text(path.read_text().replace('"n_head"', '"n_heads"'))
    assert LeapConfig.from_pretrained(tmp_path).n_head == 8
    with pytest.raises(ConfigError, match=r"n_head=4 and n_heads=8 are two names .* give one"):
        LeapConfig(hidden_size=64, n_heads=8, n_head=4)


def test_all_layers_see_everything_without_local_attention():
    assert LeapConfig(n_layer=3, use_local_att=False).windows == [None] * 3


def test_layer_types_make_a_hybrid():
    config = LeapformerConfig(
        n_layer=3,
        layer_types=["linear_attention", "full_attention", "sliding_attention"],
        window_sizes=[None, None, 16],
    )
    assert config.attentions == ["leapformer", "softmax", "leap"]
    config = LeapformerConfig(n_layer=2, attention=["leapformer", "softmax"])
    assert config.layer_types == ["linear_attention", "full_attention"]


def test_sliding_layers_have_windows_that_double_with_depth():
    kinds = ["sliding_attention", "linear_attention", "sliding_attention"]
    for config in (LeapformerConfig, LeapConfig):
        assert config(n_layer=3, layer_types=kinds).windows == [4, None, 16]


def test_layer_types_say_the_same_as_attention_or_nothing():
    kinds = ["linear_attention", "full_attention"]
    for attention in (["leap", "softmax"], ["leapformer", "softmax"]):
        config = LeapformerConfig(n_layer=2, attention=attention, layer_types=kinds)
        assert config.attentions == attention
    config = LeapConfig(n_layer=2, layer_types=["full_attention"] * 2)
    assert config.attentions == ["softmax"] * 2
    assert config.windows == [None] * 2


HYBRIDS = {
    "n_layer": 3,
    "layer_types": ["sliding_attention", "full_attention", "linear_attention"],
}


@pytest.mark.parametrize(
    "config",
    [
        LeapConfig(n_layer=3),
        LeapConfig(n_layer=1),
        LeapConfig(n_layer=3, use_local_att=False),
        LeapConfig(**HYBRIDS),
        LeapformerConfig(attention="softmax"),
        LeapformerConfig(attention=["leap"] * 4),
        LeapformerConfig(attention="cosformer", **HYBRIDS),
    ],
    ids=lambda config: f"{config.model_type}-{config.attention}-{config.window_sizes}",
)
def test_a_saved_config_is_the_same_again(config, tmp_path):
    config.save_pretrained(tmp_path)
    again = AutoConfig.from_pretrained(tmp_path)
    assert type(again) is type(config)
    assert again.to_diff_dict() == config.to_diff_dict()


def test_a_config_survives_its_dictionary():
    for config in (LeapConfig(n_layer=3), LeapformerConfig(attention=["leap"] * 4)):
        again = type(config).from_dict(config.to_dict())
        own = {name: value for name, value in config.to_dict().items() if name != "auto_map"}
        assert {name: again.to_dict()[name] for name in own} == own


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention": "leapfrog"}, r"attention='leapfrog' is not known; there are leapformer, "),
        ({"attention": ["leap"], "n_layer": 2}, r"attention=\['leap'\] has 1 entr"),
        ({"window_sizes": [4], "n_layer": 2}, r"window_sizes=\[4\] has 1 entries for n_layer=2"),
        ({"window_sizes": [4, -1], "n_layer": 2}, r"holds -1; give 1 or more"),
        ({"position_embedding": "sinus"}, r"'sinus' is not known; there are learned, sinusoidal"),
        ({"feature": "tanh"}, r"feature='tanh' is not known; there are relu"),
        ({"formulation": "leap-9"}, r"formulation='leap-9' is not known; there are additive"),
        ({"attention": "leap", "position_embedding": "rotary"}, r"use 'learned', 'sinusoidal' or"),
        ({"n_layer": 0}, r"n_layer=0 must be 1 or more"),
        (
            {"layer_types": ["full_atention", "linear_attention"], "n_layer": 2},
            r"layer_types='full_atention' is not known; there are linear_attention, full_attention",
        ),
        (
            {"layer_types": ["linear_attention"], "n_layer": 2},
            r"layer_types=\['linear_attention'\] has 1 entries for n_layer=2",
        ),
        (
            {"attention": ["leap", "softmax"], "layer_types": ["full_attention"] * 2, "n_layer": 2},
            r"layer 0 has attention='leap' and layer_types='full_attention'; leave one out",
        ),
        (
            {"attention": "softmax", "layer_types": ["linear_attention"], "n_layer": 1},
            r"layer 0 has attention='softmax' and layer_types='linear_attention'; leave one out",
        ),
        ({"window_sizes": [4, 8], "n_layer": 2}, r"windows of LEAP layers, and .*'leapformer' has"),
        ({"hidden_act": "relu"}, r"hidden_act='relu' is not known; there are gelu"),
        ({"hidden_dropout_prob": 1.5}, r"hidden_dropout_prob=1.5 is a share, from 0 to below 1"),
        ({"attention_dropout": -0.1}, r"attention_dropout=-0.1 is a share, from 0 to below 1"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_named(options, message):
    with pytest.raises(ConfigError, match=message):
        LeapformerConfig(**options)


def test_a_width_that_does_not_divide_is_named_when_the_model_is_made():
    with pytest.raises(ConfigError, match=r"hidden_size=100 .* n_head=8 .* 96 and 104"):
        LeapForCausalLM(LeapConfig(hidden_size=100, n_heads=8))


def test_windows_without_local_attention_are_a_contradiction():
    with pytest.raises(ConfigError, match="use_local_att=False: drop one of them"):
        LeapConfig(use_local_att=False, window_sizes=[4, 8, 16, None])
    with pytest.raises(ConfigError, match="'sliding_attention' with use_local_att=False: drop one"):
        LeapConfig(use_local_att=False, n_layer=1, layer_types=["sliding_attention"])


def test_only_learned_positions_limit_the_length():
    """By this name generate() looks for the limit it warns of."""
    assert LeapformerConfig(max_position_embeddings=64).n_positions == 64
    assert LeapConfig(n_positions=64).max_position_embeddings == 64
    for kind in ("sinusoidal", "rotary", "alibi", "none"):
        assert LeapformerConfig(position_embedding=kind).max_position_embeddings is None


@pytest.mark.parametrize(
    ("config", "positions"),
    [
        (LeapformerConfig(), "none"),
        (LeapformerConfig(proportion="learned"), "alibi"),
        (LeapformerConfig(attention="cosformer"), "alibi"),
        (LeapformerConfig(attention="softmax"), "learned"),
        (LeapformerConfig(attention=["leapformer", "softmax"] * 2), "learned"),
        (LeapformerConfig(attention="performer"), "learned"),
        (LeapConfig(), "learned"),
        (LeapformerSeq2SeqConfig(), "sinusoidal"),
        (LeapformerConfig(position_embedding="none"), "none"),
    ],
)
def test_positions_that_are_not_given_follow_from_the_attention(config, positions, tmp_path):
    assert config.position_embedding == positions
    config.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["position_embedding"] == positions
    assert type(config).from_pretrained(tmp_path).position_embedding == positions


def test_what_is_not_given_changes_with_what_it_follows_from():
    sizes = {"vocab_size": 10, "n_layer": 1, "hidden_size": 8, "n_head": 2}
    config = LeapformerConfig(**sizes)
    changed = config.to_dict() | {"attention": "softmax", "layer_types": None}
    assert LeapformerConfig(**changed).position_embedding == "learned"
    LeapformerForSequenceClassification(config)
    assert config.position_embedding == "learned"
    assert {name: getattr(config, name) for name in PAPER} == PAPER
    config.position_embedding = "alibi"
    LeapformerForSequenceClassification(config)  # Scores fade in both directions.
    softmax = LeapformerConfig(**sizes, attention="softmax", position_embedding="alibi")
    with pytest.raises(ConfigError, match="alibi is for form='causal'"):
        LeapformerForSequenceClassification(softmax)
    LeapformerForCausalLM(config)
    assert {name: getattr(config, name) for name in BEST} == BEST
    assert config.position_embedding == "alibi"


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({}, BEST),
        ({"gate": "channel"}, BEST | {"gate": "channel"}),
        ({"output_gate": False, "convolution": 3}, BEST | {"output_gate": False, "convolution": 3}),
        ({"proportion": "learned"}, PAPER),
        ({"proportion": "travelled"}, PAPER | {"proportion": "travelled"}),
        ({"attention": "linear"}, PAPER),
        ({"attention": ["leap", "leapformer"], "n_layer": 2}, PAPER),
    ],
)
def test_leapformer_is_what_learned_best_unless_proportions_are_given(given, found, tmp_path):
    config = LeapformerConfig(**given)
    assert {name: getattr(config, name) for name in found} == found
    config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert {name: saved[name] for name in found} == found
    assert "by_default" not in saved
    again = LeapformerConfig.from_pretrained(tmp_path)
    assert {name: getattr(again, name) for name in found} == found


def test_a_config_that_was_saved_before_proportions_had_names_has_the_papers(tmp_path):
    config = LeapformerConfig(proportion="learned").to_dict()
    for name in ("proportion", "gate", "convolution", "output_gate", "by_default"):
        del config[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    again = LeapformerConfig.from_pretrained(tmp_path)
    assert {name: getattr(again, name) for name in PAPER} == PAPER
    assert again.position_embedding == "alibi"


def test_windows_double_as_far_as_there_is_something_to_see():
    config = LeapConfig(n_layer=12, n_positions=64)
    assert config.windows == [4, 8, 16, 32] + [None] * 8


@pytest.mark.parametrize("config", [LeapConfig, LeapformerConfig, LeapformerSeq2SeqConfig])
def test_more_layers_than_can_be_meant_are_refused_at_once(config):
    assert config(n_layer=1000, n_positions=8).n_layer == 1000
    with pytest.raises(ConfigError, match=r"n_layer=100000 is more than the 1,000 layers"):
        config(n_layer=100_000)


def test_so_are_layers_of_an_encoder():
    with pytest.raises(ConfigError, match=r"encoder_layers=100000 is more than the 1,000 layers"):
        LeapformerSeq2SeqConfig(encoder_layers=100_000)


def test_a_state_of_speech_has_a_longest_stretch():
    assert LeapformerSpeechConfig(n_subsampling=10).frames_per_state == 1024
    with pytest.raises(ConfigError, match=r"n_subsampling=200 .* give 10 or fewer"):
        LeapformerSpeechConfig(n_subsampling=200)
