"""Promises of `explain`: the model's own weights, for every kind of model."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.testing import assert_close
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from leap.errors import InputError
from leap.explain import explain
from leap.layers import Attention, LeapAttention, LeapformerAttention, SoftmaxAttention
from leap.models import LeapConfig, LeapForCausalLM, LeapformerConfig, LeapformerForCausalLM

SMALL = {"vocab_size": 61, "hidden_size": 16, "n_head": 2, "n_positions": 64}
SMALL |= {"feature": "elu_plus_one"}  # By which every query matches every key.
MODELS = {
    "leap": lambda: LeapForCausalLM(LeapConfig(**SMALL, n_layer=3)),
    "leapformer": lambda: LeapformerForCausalLM(LeapformerConfig(**SMALL, n_layer=2)),
    "hybrid": lambda: LeapformerForCausalLM(
        LeapformerConfig(
            **SMALL,
            n_layer=4,
            attention=["leap", "leapformer", "softmax", "cosformer"],
            window_sizes=[4, None, None, None],
        )
    ),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(vocab_size=61, n_embd=16, n_layer=2, n_head=2, n_positions=64)
    ),
}


def make_ids(*shape):
    return torch.randint(1, 61, shape, generator=torch.Generator().manual_seed(0))


@pytest.fixture(params=MODELS)
def model(request):
    return MODELS[request.param]().double().eval()


def test_every_token_takes_shares_of_those_before_it(model):
    found = explain(model, make_ids(2, 9))
    n_layer = model.config.num_hidden_layers
    assert found.weights.shape == (2, n_layer, 2, 9, 9)
    assert len(found.names) == n_layer
    assert (found.weights >= 0).all() and not found.weights.triu(1).any()
    assert_close(found.weights.sum(-1), torch.ones(2, n_layer, 2, 9, dtype=torch.double))


@pytest.mark.parametrize("name", ["hybrid", "gpt2"])
def test_texts_explained_in_threads_have_what_each_has_alone(name):
    model = MODELS[name]().double()  # In training, as it is again afterwards.
    texts = [make_ids(1, n) for n in range(5, 17)]
    alone = [explain(model, text).weights for text in texts]
    with ThreadPoolExecutor(3) as threads:
        found = list(threads.map(lambda text: explain(model, text).weights, texts))
    assert_close(found, alone)
    assert model.training


@pytest.mark.parametrize("name", ["leap", "hybrid"])
def test_values_taken_by_the_weights_are_what_each_layer_gave(name):
    model, given = MODELS[name]().double().eval(), []

    def keep(layer, inputs, options, output):
        given.append((layer, inputs[0], output[0]))

    for block in model.model.layers:
        block.block.attention.register_forward_hook(keep, with_kwargs=True)
    found = explain(model, make_ids(2, 9))
    for i, (layer, x, y) in enumerate(given):
        v = layer.split(layer.v_proj(x))
        if isinstance(layer, LeapAttention):
            taken = found.weights[:, i] @ layer.norm(v)
            assert_close(layer.o_proj(layer.join(layer.focus(x).gate.unsqueeze(-1) * taken)), y)
        else:
            assert isinstance(layer, LeapformerAttention | SoftmaxAttention)
            assert_close(layer.o_proj(layer.join(found.weights[:, i] @ v)), y)
    assert len(given) == model.config.n_layer


def test_a_window_is_all_that_a_layer_sees():
    found = explain(MODELS["leap"](), make_ids(1, 12))
    assert found.names == ("leap, window of 4", "leap, window of 8", "leap")
    for layer, window in enumerate((4, 8, 12)):
        seen = found.importance()[0, layer] > 0
        assert seen[:, -window:].all() and not seen[:, :-window].any()


def test_pads_are_not_taken_from(model):
    ids = make_ids(1, 9)
    padded = torch.cat([torch.zeros(1, 3, dtype=torch.long), ids], dim=1)
    mask = torch.cat([torch.zeros(1, 3), torch.ones(1, 9)], dim=1).long()
    positions = "gpt2" in model.config.model_type  # Where GPT-2 counts pads as well.
    found, alone = explain(model, padded, attention_mask=mask), explain(model, ids)
    assert not found.weights[..., 3:, :3].any()
    if not positions:
        assert_close(found.weights[..., 3:, 3:], alone.weights)


def test_through_layers_is_all_of_one_token_and_only_its_past(model):
    found = explain(model, make_ids(2, 9))
    reached = found.through_layers(at=5)
    assert_close(reached.sum(-1), torch.ones(2, dtype=torch.double))
    assert (reached[:, :6] > 0).all() and not reached[:, 6:].any()


def test_through_one_layer_is_half_the_token_and_half_what_it_took():
    model = LeapForCausalLM(LeapConfig(**SMALL, n_layer=1)).double()
    found = explain(model, make_ids(1, 9))
    own = torch.zeros(1, 9, dtype=torch.double)
    own[:, -1] = 1
    assert_close(found.through_layers(), (own + found.importance()[:, 0].mean(1)) / 2)


def test_what_is_received_is_what_was_taken(model):
    found = explain(model, make_ids(2, 9))
    assert_close(found.received()[0, 0, 0, 4], found.weights[0, 0, 0, :, 4].sum())
    assert_close(found.received().mean(), torch.tensor(1.0, dtype=torch.double))


def test_the_model_is_left_as_it_was(model):
    implementation = model.config._attn_implementation
    model.train()
    explain(model, make_ids(1, 5))
    assert model.training
    assert model.config._attn_implementation == implementation
    ours = [module for module in model.modules() if isinstance(module, Attention)]
    assert not any(module._forward_hooks for module in ours)


def test_bad_input_is_named():
    with pytest.raises(InputError, match=r"input_ids are \[1, 0\]"):
        explain(MODELS["leap"](), make_ids(1, 0))
    found = explain(MODELS["leap"](), make_ids(1, 4))
    with pytest.raises(InputError, match="token 4 is not among the 4 of this text; give -4 to 3"):
        found.importance(4)


def test_a_model_that_does_not_tell_is_named():
    config = LlamaConfig(
        vocab_size=61, hidden_size=16, intermediate_size=16, num_hidden_layers=0,
        num_attention_heads=2,
    )  # fmt: skip
    with pytest.raises(InputError, match=r"this model \(llama\) does not tell"):
        explain(LlamaForCausalLM(config), make_ids(1, 4))
