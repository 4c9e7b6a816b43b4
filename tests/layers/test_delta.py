"""Promises of Gated DeltaNet's attention beyond those of every layer."""

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from leap.errors import ConfigError, InputError
from leap.layers import GatedDeltaAttention
from leap.layers.delta import DecayGate
from leap.models import LeapformerConfig, LeapformerForCausalLM
from leap.ops.delta import causal_delta_attention_reference

LENGTH = 9


def build(**options):
    return GatedDeltaAttention(12, 3, **options).double()


def projected(layer, x):
    return (layer.split(proj(x)) for proj in (layer.q_proj, layer.k_proj, layer.v_proj))


def test_is_the_delta_rule_normed_and_gated(make_tokens, assert_same):
    layer, x = build(value_width=5), make_tokens(LENGTH)
    q, k, v = projected(layer, x)
    attended, _ = causal_delta_attention_reference(
        F.normalize(F.silu(q), dim=-1) / 4**0.5,
        F.normalize(F.silu(k), dim=-1),
        v,
        layer.beta_proj(x).sigmoid().transpose(1, 2),
        log_gate=layer.gate(x),
    )
    mean_square = attended.square().mean(-1, keepdim=True)
    normed = attended * (mean_square + 1e-5).rsqrt() * layer.norm.weight
    gated = layer.join(normed) * F.silu(layer.output_gate_proj(x))
    assert_same(layer(x)[0], layer.o_proj(gated), layer, x)


def test_the_gate_is_mamba_s(make_tokens):
    gate, x = DecayGate(12, 3).double(), make_tokens(LENGTH)
    rate, step = gate.rate_bias.exp(), F.softplus(gate.proj(x) + gate.step_bias)
    assert_close(gate(x), (-rate * step).transpose(1, 2))
    assert (gate(x) < 0).all()


def assert_fresh(gate):
    rates, steps = gate.rate_bias.exp(), F.softplus(gate.step_bias)
    assert ((rates > 0.999) & (rates < 16.001)).all() and rates.std() > 2
    assert ((steps > 0.00099) & (steps < 0.1001)).all()
    assert steps.log().std() > 0.7


def test_heads_begin_with_different_memories():
    assert_fresh(DecayGate(64, 64))


def test_a_model_keeps_these_beginnings(tmp_path):
    config = LeapformerConfig(
        attention="gated-delta", hidden_size=64, n_head=64, n_layer=1, vocab_size=11
    )
    model = LeapformerForCausalLM(config)
    gate = model.model.layers[0].block.attention.gate
    assert_fresh(gate)
    model.save_pretrained(tmp_path)
    loaded = LeapformerForCausalLM.from_pretrained(tmp_path)
    for name, parameter in loaded.model.layers[0].block.attention.gate.named_parameters():
        assert torch.equal(parameter, gate.get_parameter(name))


def test_weights_tell_all_but_the_scale(make_tokens):
    layer, x = build(eps=1e-30), make_tokens(LENGTH)
    mask = torch.arange(LENGTH) >= torch.tensor([[2], [0]])
    weights = layer.weights(x, key_mask=mask)
    *_, v = projected(layer, x)
    gated = layer.norm(weights @ v) * F.silu(layer.split(layer.output_gate_proj(x)))
    assert_close(layer.o_proj(layer.join(gated))[mask], layer(x, key_mask=mask)[0][mask])
    assert not weights.triu(1).any()
    assert not weights[0, :, :, :2].any()
    sums = weights.abs().sum(-1).transpose(1, 2)[mask]
    assert_close(sums, torch.ones_like(sums))


def test_half_precision_gives_weights_in_full(make_tokens):
    weights = build().bfloat16().weights(make_tokens(LENGTH).bfloat16())
    assert weights.dtype == torch.float32


def test_generation_with_a_cache_writes_what_it_does_without():
    config = LeapformerConfig(
        attention=["gated-delta", "softmax", "gated-delta"],
        position_embedding="none",
        hidden_size=16,
        n_head=2,
        n_layer=3,
        vocab_size=61,
        pad_token_id=0,
    )
    model = LeapformerForCausalLM(config).double().eval()
    prompt = torch.randint(1, 61, (2, 40))
    mask = torch.ones_like(prompt)
    mask[0, :7] = 0
    options = {"attention_mask": mask, "max_new_tokens": 20, "do_sample": False}
    expected = model.generate(prompt, use_cache=False, **options)
    assert torch.equal(model.generate(prompt, **options), expected)
    alone = model.generate(prompt[1:], max_new_tokens=20, do_sample=False)
    drafted = model.generate(
        prompt[1:], max_new_tokens=20, do_sample=False, prompt_lookup_num_tokens=3
    )
    assert torch.equal(drafted, alone)


def test_dropout_falls_on_attended_values_in_training_alone(make_tokens):
    layer, x = build(dropout=0.5, bias=False), make_tokens(LENGTH)
    assert not torch.equal(layer(x)[0], layer(x)[0])
    assert torch.equal(layer.eval()(x)[0], layer(x)[0])


def test_it_sees_no_source(make_tokens):
    layer, x = build(), make_tokens(LENGTH)
    with pytest.raises(InputError, match=r"a source is for form='cross'; .* form='causal'"):
        layer(x, source=x)
    with pytest.raises(ConfigError, match="form='causal' alone"):
        layer.attend_to(layer.enter(x))
