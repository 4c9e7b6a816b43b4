"""Promises of importance: every method for every model, and contributions that add up."""

import pytest
import torch
from torch.testing import assert_close
from transformers import GPT2Config, GPT2LMHeadModel

from leap.errors import ConfigError
from leap.explain.importance import (
    METHODS,
    contributions,
    held,
    importance,
    log_probabilities,
    predicted_logits,
    with_random_parameters,
)
from leap.models import (
    LeapConfig,
    LeapForCausalLM,
    LeapformerConfig,
    LeapformerForCausalLM,
    LeapformerForSequenceClassification,
)

SMALL = {"vocab_size": 31, "hidden_size": 16, "n_head": 2, "n_positions": 32, "n_layer": 2}
OPTIONS = {
    "travelled": {"proportion": "travelled", "gate": "head", "output_gate": True},
    "paper": {"proportion": "learned", "convolution": 3},
    "selective": {"position_embedding": "selective"},
    "softmax": {"attention": "softmax"},
    "linear": {"attention": "linear"},
}
MODELS = {
    "leap": lambda: LeapForCausalLM(LeapConfig(**SMALL)),
    "classifier": lambda: LeapformerForSequenceClassification(
        LeapformerConfig(**SMALL, attention="leap", num_labels=3)
    ),
    **{
        name: lambda options=options: LeapformerForCausalLM(LeapformerConfig(**SMALL, **options))
        for name, options in OPTIONS.items()
    },
}


@pytest.fixture(params=MODELS)
def model(request):
    torch.manual_seed(0)
    model = MODELS[request.param]().double().eval()
    with torch.no_grad():  # From where fresh models begin, they hardly differ.
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def make_ids(t=9):
    return torch.randint(1, 31, (1, t), generator=torch.Generator().manual_seed(1))


def test_contributions_of_tokens_and_biases_add_up_to_the_logit(model):
    ids, frozen = make_ids(), held(model)
    embedded = model.get_input_embeddings()(ids).detach().requires_grad_()
    logit = predicted_logits(frozen, inputs_embeds=embedded)[0, 2]
    assert_close(logit, predicted_logits(model, input_ids=ids)[0, 2])
    biases = [
        p for name, p in frozen.named_parameters() if name.endswith("bias") or "positions" in name
    ]
    gradients = torch.autograd.grad(logit, biases, allow_unused=True)
    of_biases = sum((p * g).sum() for p, g in zip(biases, gradients, strict=True) if g is not None)
    assert_close(contributions(model, ids, 2).sum() + of_biases, logit)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_tells_of_every_token(model, method):
    if method == "integrated-gradients":
        pytest.importorskip("captum")
    found = importance(model, make_ids(), 2, method)
    assert found.shape == (9,) and found.isfinite().all() and found.std() > 0
    assert torch.equal(found, importance(model, make_ids(), 2, method))


@pytest.mark.parametrize("method", ["weights", "roll-out", "gradient"])
def test_models_of_others_can_be_asked_too(method):
    config = GPT2Config(vocab_size=31, n_embd=16, n_layer=2, n_head=2, n_positions=32)
    assert importance(GPT2LMHeadModel(config).eval(), make_ids(), 2, method).shape == (9,)


def test_tokens_that_the_mask_leaves_out_were_never_there(model):
    ids = make_ids()
    mask = torch.ones_like(ids)
    mask[0, [1, 4]] = 0
    assert_close(
        log_probabilities(model, input_ids=ids, attention_mask=mask),
        log_probabilities(model, input_ids=ids[:, mask[0].bool()]),
    )


def test_the_model_is_left_as_it_was(model):
    before = log_probabilities(model, input_ids=make_ids())
    for method in ("logit", "roll-up"):
        importance(model, make_ids(), 2, method)
    assert not any(p.grad is not None for p in model.parameters())
    assert torch.equal(log_probabilities(model, input_ids=make_ids()), before)


def test_random_parameters_are_others_and_the_same_each_time():
    model = MODELS["leap"]()
    expected = torch.get_rng_state()
    first, second = with_random_parameters(model), with_random_parameters(model)
    assert torch.equal(torch.get_rng_state(), expected)
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(first.lm_head.weight, model.lm_head.weight)


def test_an_unknown_method_is_named():
    with pytest.raises(ConfigError, match="method='x' is not known; there are weights, "):
        importance(MODELS["leap"](), make_ids(), 2, "x")
