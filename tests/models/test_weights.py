"""Promises of output_attentions."""

import pytest
import torch
from torch.testing import assert_close

from leap.errors import ConfigError, InputError
from leap.models import (
    LeapformerConfig,
    LeapformerForSeq2SeqLM,
    LeapformerForSequenceClassification,
    LeapformerSeq2SeqConfig,
)

SIZES = {"vocab_size": 61, "hidden_size": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}


def make_ids(*shape, seed=0):
    return torch.randint(1, 61, shape, generator=torch.Generator().manual_seed(seed))


def assert_weights(found, *shape):
    assert all(weights.shape == shape for weights in found)
    assert_close(found[0].sum(-1), torch.ones_like(found[0][..., 0]), rtol=0, atol=1e-4)


def test_a_language_model_gives_the_weights_that_it_is_asked_for(model):
    ids = make_ids(2, 9)
    assert model(ids).attentions is None
    found = model(ids, output_attentions=True).attentions
    assert len(found) == model.config.n_layer
    for weights in found:
        assert weights.shape == (2, 2, 9, 9)
        assert torch.equal(weights, weights.tril())
    model.config.output_attentions = True
    assert_close(model(ids).attentions, found)


@pytest.mark.parametrize("kind", ["leapformer", "leap", "softmax"])
def test_pads_have_no_weight(kind, make_model):
    ids, mask = make_ids(1, 9), torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1]])
    model = make_model(kind)
    padded = model(ids, attention_mask=mask, output_attentions=True).attentions
    alone = model(ids[:, 2:], output_attentions=True).attentions
    assert_close([weights[..., 2:, 2:] for weights in padded], list(alone))


def test_weights_take_part_in_training_with_gradient_checkpointing_too(make_model):
    model = make_model("leapformer").train()
    ids, gradients = make_ids(2, 9), []
    for checkpoints in (False, True):
        if checkpoints:
            model.gradient_checkpointing_enable()
        model.zero_grad()
        out = model(ids, labels=ids, output_attentions=True, use_cache=False)
        (out.loss + out.attentions[1].square().sum()).backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    assert_close(*gradients)


def test_weights_of_what_a_state_has_read_are_refused(make_model, shapes_unchecked):
    model, ids = make_model("leapformer"), make_ids(1, 9)
    cache = model(ids[:, :5], use_cache=True, output_attentions=True).past_key_values
    with pytest.raises(InputError, match=r"a state does not keep the tokens.*use_cache=False"):
        model(ids[:, 5:], past_key_values=cache, output_attentions=True)
    with pytest.raises(InputError, match="no weights under cu_seqlens; give rows with pads"):
        model(ids, cu_seq_lens_q=torch.tensor([0, 4, 9]), output_attentions=True)
    options = {"max_new_tokens": 3, "output_attentions": True, "return_dict_in_generate": True}
    steps = model.generate(ids, use_cache=False, **options).attentions
    assert [step[0].shape[-1] for step in steps] == [9, 10, 11]


def test_a_classifier_gives_weights_or_says_that_it_cannot():
    ids = make_ids(2, 9)
    model = LeapformerForSequenceClassification(LeapformerConfig(**SIZES, pooling="cls")).eval()
    assert_weights(model(ids, output_attentions=True).attentions, 2, 2, 10, 10)
    config = LeapformerConfig(**SIZES, attention="performer", pooling="cls")
    with pytest.raises(ConfigError, match="cannot tell how much of each token it takes"):
        LeapformerForSequenceClassification(config)(ids, output_attentions=True)


@pytest.mark.parametrize("attention", ["leapformer", "softmax"])
def test_a_translation_model_gives_those_of_all_parts(attention):
    config = LeapformerSeq2SeqConfig(**SIZES, attention=attention, encoder_layers=3)
    model = LeapformerForSeq2SeqLM(config).eval()
    source, target = make_ids(2, 9), make_ids(2, 5, seed=1)
    out = model(source, decoder_input_ids=target, output_attentions=True)
    assert [len(out.encoder_attentions), len(out.decoder_attentions)] == [3, 2]
    assert_weights(out.encoder_attentions, 2, 2, 9, 9)
    assert_weights(out.decoder_attentions, 2, 2, 5, 5)
    assert_weights(out.cross_attentions, 2, 2, 5, 9)
    with pytest.raises(InputError, match="no weights under visible; give no schedule"):
        model(source, decoder_input_ids=target, chunk_size=2, output_attentions=True)
