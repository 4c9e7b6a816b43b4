"""Promises of the equaliser: a learned part at its mean, within a context."""

import pytest
import torch
from torch.testing import assert_close

from leap.errors import ConfigError
from leap.layers.equalise import Learned
from leap.models import LeapformerConfig, LeapformerForCausalLM


def make_model(**options):
    torch.manual_seed(0)
    config = LeapformerConfig(
        vocab_size=13, hidden_size=16, n_layer=2, n_head=2, hidden_dropout_prob=0.0, **options
    )
    model = LeapformerForCausalLM(config).double().eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.mul_(10)
    return model


@pytest.mark.parametrize("proportion", ["travelled", "learned"])
@pytest.mark.parametrize("part", ["proportions", "gates"])
def test_a_part_is_held_at_its_mean_and_let_go_again(proportion, part):
    model = make_model(proportion=proportion, gate="head")
    ids = torch.randint(13, (2, 20))
    before = model(ids).logits
    modules = [m for m in model.modules() if isinstance(m, Learned) and m.part == part]
    seen = []
    hooks = [m.register_forward_hook(lambda m, args, out: seen.append(out)) for m in modules]
    with model.equalise(part, ids):
        seen.clear()
        held = model(ids).logits
        for value in seen:  # Alike for all tokens of a head.
            assert_close(value, value[:, :, :1].expand_as(value))
        seen.clear()
        model(ids[:, :1])  # The same mean, whatever is read.
        assert seen[0].shape[2] == 1
    for hook in hooks:
        hook.remove()
    assert not torch.allclose(held, before)
    assert_close(model(ids).logits, before, rtol=0, atol=0)


def test_the_mean_is_that_of_all_texts_read():
    model = make_model(proportion="travelled")
    ids = torch.randint(13, (3, 20))
    steps = model.model.layers[0].block.attention.steps
    found = []
    hook = steps.register_forward_hook(lambda m, args, out: found.append(m.lengths(args[0])))
    model(ids)
    hook.remove()
    with model.equalise("proportions", ids):
        held = steps.lengths(torch.randn(1, 4, 16).double())
    assert_close(held[0, :, 0], found[0].mean((0, 2)))


def test_a_part_that_is_not_there_is_named():
    model = make_model(attention="linear")
    nothing = torch.zeros(1, 2, dtype=torch.long)
    missing = pytest.raises(ConfigError, match="no such learned part; it has none at all")
    with missing, model.equalise("gates", nothing):
        pass
    model = make_model(proportion="learned")
    with pytest.raises(ConfigError, match="it has proportions"), model.equalise("gates", nothing):
        pass
