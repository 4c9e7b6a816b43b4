"""Sizes that this machine has no room for are refused before anything is made."""

import pytest

from leap.errors import ConfigError
from leap.models import LeapformerConfig, LeapformerForCausalLM
from leap.training import check_size
from leap.training import size as sizes

CONFIG = LeapformerConfig(vocab_size=10, hidden_size=8, n_layer=2, n_head=2)


def build():
    return LeapformerForCausalLM(CONFIG)


def test_a_model_that_fits_is_let_pass():
    check_size(build)


def test_a_model_that_does_not_fit_is_refused_with_what_it_takes(monkeypatch):
    n = build().num_parameters()
    monkeypatch.setattr(sizes, "memory", lambda device: 16 * n)
    check_size(build)
    monkeypatch.setattr(sizes, "memory", lambda device: 16 * n - 1)
    with pytest.raises(ConfigError, match=rf"{n:,} parameters, which take 0 GiB.* smaller hidden"):
        check_size(build)


def test_no_weights_are_made(monkeypatch):
    seen = []
    check_size(lambda: seen.append(build()) or seen[0])
    assert {parameter.device.type for parameter in seen[0].parameters()} == {"meta"}
