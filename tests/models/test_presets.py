"""Promises of the presets."""

import pytest
import torch

from leap.errors import ConfigError
from leap.models import LeapConfig, LeapformerForCausalLM
from leap.models.presets import PRESETS, preset


@pytest.mark.parametrize(
    ("name", "millions"), [("small", 5.4), ("140m", 146.2), ("247m", 247.1), ("350m", 354.9)]
)
def test_sizes_are_what_the_names_say(name, millions):
    with torch.device("meta"):
        model = LeapformerForCausalLM(preset(name))
    assert round(model.num_parameters() / 1e6, 1) == millions


def test_learned_proportions_add_what_the_paper_adds():
    """8,322 a layer at width 1024 with 8 heads and a step-down of 4."""
    with torch.device("meta"):
        learned, plain = (
            LeapformerForCausalLM(preset("247m", attention=name)).num_parameters()
            for name in ("leapformer", "linear")
        )
    assert learned - plain == 16 * 8322


def test_every_preset_makes_leap_too():
    for name in PRESETS:
        assert isinstance(preset(name, attention="leap"), LeapConfig)


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("attention", ["leapformer", "leap"])
def test_the_state_is_of_a_few_mebibytes_at_most_and_begins_small(name, attention):
    config = preset(name, attention=attention)
    layers = {window: config.build_attention(i) for i, window in enumerate(config.windows)}

    def n_bytes(n_tokens):
        kept = {
            window: layer(torch.zeros(1, n_tokens, config.hidden_size))[1].n_bytes
            for window, layer in layers.items()
        }
        return sum(kept[window] for window in config.windows)

    one, hundred, full = map(n_bytes, (1, 100, max(filter(None, [*layers, 1]))))
    assert one <= hundred <= full < 40 * 2**20
    if attention == "leapformer":
        assert one == full
    else:  # Two values a feature, in float32, of each token that a window sees; a few sums beside.
        per_token = 2 * config.hidden_size * 4 + 4 * config.n_head
        totals = config.n_layer * (per_token * 2 + 100 * config.n_head)
        for n, found in ((1, one), (100, hundred)):
            seen = sum(min(n, window - 1) for window in config.windows if window is not None)
            assert found <= totals + per_token * seen


def test_presets_have_what_learned_best_but_for_the_papers_own_models():
    found = {name: (preset(name).proportion, preset(name).position_embedding) for name in PRESETS}
    paper = dict.fromkeys(("140m", "247m"), ("learned", "sinusoidal"))
    assert found == dict.fromkeys(PRESETS, ("travelled", "none")) | paper


def test_an_unknown_preset_is_named():
    with pytest.raises(ConfigError, match="no preset is called 'huge'; there are tiny, small"):
        preset("huge")
