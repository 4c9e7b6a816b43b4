"""Promises of the presets."""

import pytest
import torch

from leap.errors import ConfigError
from leap.models import LeapConfig, LeapformerForCausalLM
from leap.models.presets import PRESETS, preset


@pytest.mark.parametrize(
    ("name", "millions"), [("small", 5.6), ("140m", 146.2), ("247m", 247.1), ("350m", 353.8)]
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


def test_an_unknown_preset_is_named():
    with pytest.raises(ConfigError, match="no preset is called 'huge'; there are tiny, small"):
        preset("huge")
