"""What a convolution adds to causal layers; that it fits in with all else is in test_attention."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from leap.errors import ConfigError, InputError
from leap.layers import (
    FORMULATIONS,
    ConvolvedState,
    LeapAttention,
    LeapformerAttention,
    ShortConvolution,
    SoftmaxAttention,
)
from leap.models import LeapformerConfig, LeapformerForCausalLM, LeapformerForSequenceClassification
from leap.ops.convolution import causal_convolution_reference
from leap.ops.state import load_state

LENGTH = 9
LAYERS = {
    "leapformer": (LeapformerAttention, {"gate": "head"}),
    "linear": (LeapformerAttention, {"proportion": "none"}),
    "softmax": (SoftmaxAttention, {"rotary": True}),
    "softmax-gate": (SoftmaxAttention, {"gate": "head", "value_width": 5}),
    "leap": (LeapAttention, {}),
    "leap-window": (LeapAttention, {"window": 3}),
    "fastformer": (LeapAttention, {"formulation": "fastformer"}),
}


def build(kind, options, taps=4):
    return kind(12, 3, convolution=taps, **options).double()


@pytest.fixture(params=LAYERS)
def layer(request):
    return build(*LAYERS[request.param])


def convolved(layer, x, projections):
    """SiLU of the convolution of each projection, with its share of the weights."""
    found, start = [], 0
    for proj in projections:
        y = proj(x)
        weight = layer.convolution.weight[start : start + y.shape[-1]]
        start += y.shape[-1]
        found.append(layer.split(F.silu(causal_convolution_reference(y, weight))))
    assert start == len(layer.convolution.weight)
    return found


def test_softmax_attention_is_that_of_convolved_projections(make_tokens, assert_same):
    layer, x = build(SoftmaxAttention, {"value_width": 5}), make_tokens(LENGTH)
    q, k, v = convolved(layer, x, (layer.q_proj, layer.k_proj, layer.v_proj))
    hidden = torch.ones(LENGTH, LENGTH).tril() == 0
    weights = (q @ k.mT / math.sqrt(4)).masked_fill(hidden, -math.inf).softmax(-1)
    assert_same(layer(x)[0], layer.o_proj(layer.join(weights @ v)), layer, x)
    assert_close(layer.weights(x), weights)


def test_linear_attention_is_that_of_convolved_projections(make_tokens, assert_same):
    layer, x = build(LeapformerAttention, {}), make_tokens(LENGTH)
    q, k, v = convolved(layer, x, (layer.q_proj, layer.k_proj, layer.v_proj))
    q, k = q.relu(), k.relu()
    p, s = layer.q_proportion(q), layer.k_proportion(k)
    scores = (q @ k.mT * torch.cos(math.pi / 2 * (p.unsqueeze(-1) - s.unsqueeze(-2)))).tril()
    weights = scores / scores.sum(-1, keepdim=True).clamp_min(layer.eps)
    assert_same(layer(x)[0], layer.o_proj(layer.join(weights @ v)), layer, x)
    assert_close(layer.weights(x), weights)
    assert_close(layer.proportions(x), (p, s))


@pytest.mark.parametrize("formulation", FORMULATIONS)
def test_leap_is_that_of_convolved_projections(formulation, make_tokens, assert_same):
    layer, x = build(LeapAttention, {"formulation": formulation}), make_tokens(LENGTH)
    names = layer.formulation.projections
    heads = convolved(layer, x, [layer.get_submodule(f"{name}_proj") for name in names])
    plain = LeapAttention(12, 3, formulation=formulation).double()
    plain.o_proj = layer.o_proj
    for name in layer.formulation.vectors:
        plain.register_parameter(name, layer.get_parameter(name))
    for name, y in zip(names, heads, strict=True):
        plain.get_submodule(f"{name}_proj").register_forward_hook(lambda *_, y=y: plain.join(y))
    assert_same(layer(x)[0], plain(x)[0], layer, x)
    assert_close(layer.focus(x).logits, plain.focus(x).logits)


@pytest.mark.parametrize("cut", range(LENGTH + 1))
def test_a_padded_sequence_can_be_cut_anywhere(layer, cut, make_tokens, assert_same):
    x = make_tokens(LENGTH)
    mask = torch.tensor([[0, 1, 0, 1, 1, 1, 0, 0, 1], [1, 1, 1, 0, 0, 0, 0, 1, 0]]).bool()
    whole, final = layer(x, key_mask=mask)
    head, state = layer(x[:, :cut], key_mask=mask[:, :cut])
    tail, resumed = layer(x[:, cut:], state, key_mask=mask[:, cut:])
    assert_same(torch.cat([head, tail], dim=1)[mask], whole[mask], layer, x)
    assert resumed.length.tolist() == final.length.tolist() == [5, 4]


def test_drafts_are_taken_back(layer, make_tokens):
    x, drafts = make_tokens(LENGTH), make_tokens(6, seed=1)
    _, state = layer(x)
    expected, _ = layer(drafts, state)
    state = state.record(8)
    for n in (6, 2, 5):
        _, longer = layer(drafts, state)
        back = longer.rollback(n)
        assert back.length.tolist() == [LENGTH + 6 - n] * 2
        again, _ = layer(drafts[:, 6 - n :], back)
        assert_close(again, expected[:, 6 - n :])


def test_a_state_is_saved_picked_and_not_merged(layer, make_tokens, tmp_path):
    x = make_tokens(LENGTH)
    _, state = layer(x)
    state.save(tmp_path / "state")
    loaded = load_state(tmp_path / "state")
    assert isinstance(loaded, ConvolvedState)
    assert_close(layer(x, loaded)[0], layer(x, state)[0])
    one = state.select(torch.tensor([1]))
    assert_close(layer(x[1:], one)[0], layer(x, state)[0][1:])
    with pytest.raises(InputError, match=r"cannot be merged.*read B from the state after A"):
        state.merge(state)


def test_a_state_of_a_layer_without_a_convolution_is_named(layer, make_tokens):
    x = make_tokens(LENGTH)
    _, state = layer(x)
    with pytest.raises(InputError, match="goes on from a ConvolvedState"):
        layer(x, state.inner)


@pytest.mark.parametrize(
    ("kind", "form"),
    [
        (SoftmaxAttention, "bidirectional"),
        (SoftmaxAttention, "cross"),
        (LeapformerAttention, "bidirectional"),
        (LeapformerAttention, "cross"),
        (LeapAttention, "bidirectional"),
    ],
)
def test_a_convolution_is_for_the_causal_form(kind, form):
    with pytest.raises(ConfigError, match=r"convolution=4.*use it with form='causal'"):
        kind(12, 3, form=form, convolution=4)


@pytest.mark.parametrize("kind", [SoftmaxAttention, LeapformerAttention, LeapAttention])
def test_one_tap_is_no_convolution(kind):
    with pytest.raises(ConfigError, match="convolution=1 would meet no other token"):
        kind(12, 3, convolution=1)


def make_model(attention, **options):
    torch.manual_seed(0)
    config = LeapformerConfig(
        vocab_size=61,
        hidden_size=16,
        n_positions=64,
        n_layer=2,
        n_head=2,
        attention=attention,
        convolution=4,
        pad_token_id=0,
        **options,
    )
    model = LeapformerForCausalLM(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(8)  # Large enough to have opinions.
    return model


@pytest.mark.parametrize("attention", ["leapformer", "softmax", "leap"])
@pytest.mark.usefixtures("shapes_unchecked")
def test_a_model_writes_with_pads_as_without(attention):
    model = make_model(attention, gate="head")
    ids = torch.randint(1, 61, (1, 7), generator=torch.Generator().manual_seed(1))
    padded = torch.cat([torch.zeros(1, 4, dtype=torch.long), ids], dim=1)
    both = torch.cat([padded, torch.randint(1, 61, (1, 11))])
    mask = (both != 0).long()
    options = {"max_new_tokens": 12, "do_sample": False}
    alone = model.generate(ids, **options)[:, 7:]
    beside = model.generate(both, attention_mask=mask, **options)[:1, 11:]
    assert torch.equal(alone, beside)
    drafted = model.generate(ids, prompt_lookup_num_tokens=3, **options)[:, 7:]
    assert torch.equal(alone, drafted)
    uncached = model.generate(ids, use_cache=False, **options)[:, 7:]
    assert torch.equal(alone, uncached)


@pytest.mark.parametrize("attention", ["linear", "cosformer", "softmax", "leap"])
def test_a_model_keeps_the_beginning_of_its_convolutions(attention):
    config = LeapformerConfig(
        vocab_size=9, hidden_size=64, n_layer=1, n_head=2, attention=attention, convolution=4
    )
    found = [m for m in LeapformerForCausalLM(config).modules() if isinstance(m, ShortConvolution)]
    assert len(found) == 1
    assert found[0].weight.abs().max() <= 0.5
    assert found[0].weight.std().item() == pytest.approx(0.5 / math.sqrt(3), rel=0.1)


def test_encoders_and_configs_refuse_what_they_would_not_follow():
    with pytest.raises(ConfigError, match="convolution=1 would meet no other token"):
        LeapformerConfig(convolution=1)
    config = LeapformerConfig(vocab_size=9, hidden_size=8, n_layer=1, n_head=2, convolution=4)
    with pytest.raises(ConfigError, match="use it with form='causal'"):
        LeapformerForSequenceClassification(config)
