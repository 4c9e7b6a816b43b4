"""Promises of `weights`: what a layer gives is its values, taken by them."""

import pytest
import torch
from torch.testing import assert_close

from leap.errors import ConfigError
from leap.layers import (
    Attention,
    FastformerAttention,
    LeapAttention,
    LeapformerAttention,
    SoftmaxAttention,
)
from leap.layers.additive import FORMULATIONS
from leap.layers.attention import DotProductAttention
from leap.ops.additive import additive_attention_reference

PADS_IN_FRONT = torch.arange(9) >= torch.tensor([[2], [0]])
LINEAR = {
    "learned": {},
    "fixed": {"proportion": "fixed", "length": 20},
    "none": {"proportion": "none"},
    "rotary": {"rotary": True},
    "signed": {"feature": "cubic"},
    "gated": {"gate": "head"},
    "gated-by-channel": {"gate": "channel"},
    "floored": {"eps": 0.5},
}


def make_layer(kind, **options):
    return kind(12, 3, **options).double()


def values(layer, x):
    return layer.split(layer.v_proj(x))


@pytest.mark.parametrize("key_mask", [None, PADS_IN_FRONT], ids=["whole", "padded"])
@pytest.mark.parametrize("options", LINEAR.values(), ids=LINEAR)
def test_linear_attention_is_its_values_taken_by_the_weights(make_tokens, options, key_mask):
    layer, x = make_layer(LeapformerAttention, **options), make_tokens(9)
    weights = layer.weights(x, key_mask=key_mask)
    expected, _ = layer(x, key_mask=key_mask)
    actual = layer.o_proj(layer.join(weights @ values(layer, x)))
    real = torch.ones(2, 9, dtype=torch.bool) if key_mask is None else key_mask
    assert_close(actual[real], expected[real])
    assert not weights.triu(1).any()


@pytest.mark.parametrize("form", ["bidirectional", "cross"])
@pytest.mark.parametrize("kind", [LeapformerAttention, SoftmaxAttention])
def test_so_it_is_when_all_is_seen(make_tokens, kind, form):
    layer, x = make_layer(kind, form=form, rotary=True), make_tokens(5)
    source = make_tokens(9, seed=1) if form == "cross" else None
    mask = PADS_IN_FRONT[:, : 5 if source is None else 9]
    weights = layer.weights(x, source=source, key_mask=mask)
    read = x if source is None else source
    expected, _ = layer(x, source=source, key_mask=mask)
    assert_close(layer.o_proj(layer.join(weights @ values(layer, read))), expected)
    assert not weights[0, :, :, :2].any()


@pytest.mark.parametrize("rotary", [False, True])
def test_softmax_attention_is_its_values_taken_by_the_weights(make_tokens, rotary):
    layer, x = make_layer(SoftmaxAttention, rotary=rotary), make_tokens(9)
    weights = layer.weights(x)
    assert_close(layer.o_proj(layer.join(weights @ values(layer, x))), layer(x)[0])
    assert not weights.triu(1).any()
    assert_close(weights.sum(-1), torch.ones(2, 3, 9, dtype=torch.double))


@pytest.mark.parametrize("feature", ["elu_plus_one", "cubic"])
def test_with_a_norm_the_weights_tell_all_but_the_scale(make_tokens, feature):
    layer = make_layer(LeapformerAttention, normaliser="norm", feature=feature, eps=1e-30)
    x = make_tokens(9)
    weights = layer.weights(x)
    taken = layer.norm(weights @ values(layer, x))
    assert_close(layer.o_proj(layer.join(taken)), layer(x)[0])
    assert_close(weights.abs().sum(-1), torch.ones(2, 3, 9, dtype=torch.double))


def leap_output(layer, x, name, weights):
    """LEAP's formulations, with the weights making the mean in place of the op."""
    focus = layer.focus(x)
    v = values(layer, x)
    if name == "fastformer":
        queries = layer.norm(layer.split(layer.q_proj(x)))
        mean_query = additive_attention_reference(focus.query_logits, queries, layer.window)
        return layer.join((weights @ layer.norm(mean_query * layer.split(layer.k_proj(x)))) * v)
    taken = weights @ (layer.norm(v) if name == "leap-1.0" else v)
    if focus.gate is None:
        return layer.join(taken)
    gate = focus.gate if focus.gate.ndim == 4 else focus.gate.unsqueeze(-1)
    joined = layer.join(gate * taken)
    return layer.o_proj(joined) if name == "leap-mixed" else joined


@pytest.mark.parametrize("window", [None, 1, 4])
@pytest.mark.parametrize("name", FORMULATIONS)
def test_leap_is_its_values_taken_by_the_focus(make_tokens, name, window):
    layer = make_layer(LeapAttention, formulation=name, window=window)
    x = make_tokens(9)
    weights = layer.weights(x)
    assert_close(leap_output(layer, x, name, weights), layer(x)[0])
    assert_close(weights.sum(-1), torch.ones(2, 3, 9, dtype=torch.double))
    seen = torch.ones(9, 9).tril() - (0 if window is None else torch.ones(9, 9).tril(-window))
    assert torch.equal(weights[0, 0] > 0, seen.bool())


def test_fastformer_has_one_row_for_all(make_tokens):
    layer, x = make_layer(FastformerAttention), make_tokens(9)
    mask = PADS_IN_FRONT
    weights = layer.weights(x, key_mask=mask)
    q, k = layer.q_proj(x), layer.k_proj(x)
    query_shares = layer.focus(x, key_mask=mask).query_logits
    query_shares = query_shares.masked_fill(~mask[:, None], -torch.inf).softmax(-1)
    global_q = layer.join(query_shares.unsqueeze(2) @ layer.split(q))
    global_k = layer.join(weights @ layer.split(global_q * k))
    expected = layer.o_proj(layer.t_proj(global_k * q) + q)
    assert_close(layer(x, key_mask=mask)[0][mask], expected[mask])
    assert not weights[0, :, :, :2].any()


def test_half_precision_gives_weights_in_full(make_tokens):
    linear = LeapformerAttention(12, 3, feature="elu_plus_one")
    for layer in (linear, SoftmaxAttention(12, 3), LeapAttention(12, 3)):
        weights = layer.bfloat16().weights(make_tokens(9).bfloat16())
        assert weights.dtype == torch.float32
        assert_close(weights.sum(-1), torch.ones(2, 3, 9))


class Mute(Attention):
    """A layer that only attends."""

    def forward(self, x, state=None, **inputs):
        return x, state


def test_a_layer_that_cannot_tell_says_so(make_tokens):
    with pytest.raises(ConfigError, match="Mute cannot tell how much of each token it takes"):
        Mute(12, 3).weights(make_tokens(2))


@pytest.mark.parametrize(
    "kind, options",
    [(SoftmaxAttention, {}), *((LeapformerAttention, LINEAR[k]) for k in ("learned", "signed"))],
)
def test_shares_are_sums_of_weights(make_tokens, kind, options):
    layer = make_layer(kind, form="cross", **options)
    x, source = make_tokens(4), make_tokens(9, seed=1)
    weights, states, state = layer.weights(x, source=source), [], None
    for part in source.split([3, 2, 4], dim=1):
        states.append(state)
        _, state = layer(x[:, :0], state, source=part)
    earlier = [each.without_values() for each in states[1:]]
    actual = layer.shares(x, state, earlier)
    if "feature" not in options:  # Else weights may cancel, and shares are those of magnitudes.
        expected = torch.stack([weights[..., :3].sum(-1), weights[..., :5].sum(-1)], dim=-1)
        assert_close(actual, expected)
    assert (actual.diff(dim=-1) >= 0).all() and (actual >= 0).all() and (actual <= 1).all()


def test_a_layer_that_cannot_tell_shares_says_so(make_tokens):
    with pytest.raises(ConfigError, match="shared out"):
        DotProductAttention.shares(make_layer(SoftmaxAttention), make_tokens(2), None, [])
