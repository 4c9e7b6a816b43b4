"""Promises of `take`, `taken` and `contributions`: exact parts of what a layer gives."""

import pytest
import torch
from torch.testing import assert_close

from leap.errors import ConfigError, InputError
from leap.layers import (
    FastformerAttention,
    GatedDeltaAttention,
    LeapAttention,
    LeapformerAttention,
    SoftmaxAttention,
)
from leap.layers.additive import FORMULATIONS
from leap.layers.efficient import EFFICIENT

PADS = torch.arange(9) % 4 != torch.tensor([[2], [0]])
CAUSAL = {
    "paper": (LeapformerAttention, {}),
    "fixed": (LeapformerAttention, {"proportion": "fixed", "length": 20}),
    "linear": (LeapformerAttention, {"proportion": "none"}),
    "travelled": (LeapformerAttention, {"proportion": "travelled", "clocks": 2}),
    "gate": (LeapformerAttention, {"gate": "head", "proportion": "travelled"}),
    "gate-channel": (LeapformerAttention, {"gate": "channel"}),
    "convolution": (LeapformerAttention, {"convolution": 3}),
    "output-gate": (LeapformerAttention, {"output_gate": True}),
    "norm": (LeapformerAttention, {"normaliser": "norm"}),
    "rotary": (LeapformerAttention, {"rotary": True}),
    "selective": (LeapformerAttention, {"rotary": "selective", "convolution": 2}),
    "alibi": (LeapformerAttention, {"alibi": True, "value_width": 5}),
    "signed": (LeapformerAttention, {"feature": "cubic"}),
    "softmax": (SoftmaxAttention, {"rotary": True, "gate": "head", "output_gate": True}),
    "delta": (GatedDeltaAttention, {"convolution": 3}),
    "leap-window": (LeapAttention, {"window": 4, "convolution": 3}),
    "leap-alibi": (LeapAttention, {"alibi": True, "bias": True}),
    **{name: (LeapAttention, {"formulation": name}) for name in FORMULATIONS},
}
WHOLE = {
    "paper": (LeapformerAttention, {}),
    "divided": (LeapformerAttention, {"proportion": "travelled", "places": "divided"}),
    "gate": (LeapformerAttention, {"gate": "head"}),
    "softmax": (SoftmaxAttention, {}),
    "leap": (LeapAttention, {"window": 3}),
}


def make_layer(kind, **options):
    return kind(12, 3, **options).double()


def bias(layer):
    projection = getattr(layer, "o_proj", None)
    return 0 if projection is None or projection.bias is None else projection.bias


@pytest.mark.parametrize("key_mask", [None, PADS], ids=["whole", "padded"])
@pytest.mark.parametrize("kind, options", CAUSAL.values(), ids=CAUSAL)
def test_contributions_add_up_to_what_the_layer_gives(make_tokens, kind, options, key_mask):
    layer, x = make_layer(kind, **options), make_tokens(9)
    expected, _ = layer(x, key_mask=key_mask)
    for at in (5, 8):
        parts = layer.contributions(x, at, key_mask=key_mask)
        actual = parts.sum(1) + bias(layer)
        real = torch.ones(2, dtype=torch.bool) if key_mask is None else key_mask[:, at]
        assert_close(actual[real], expected[:, at][real])
        assert not parts[:, at + 1 :].any()
        if key_mask is not None:
            assert not parts[~key_mask].any()


@pytest.mark.parametrize("kind, options", WHOLE.values(), ids=WHOLE)
def test_so_they_do_where_all_is_seen(make_tokens, kind, options):
    layer, x = make_layer(kind, form="bidirectional", **options), make_tokens(9)
    expected, _ = layer(x, key_mask=PADS)
    actual = layer.contributions(x, 3, key_mask=PADS).sum(1) + bias(layer)
    assert_close(actual, expected[:, 3])


@pytest.mark.parametrize("kind", [LeapformerAttention, SoftmaxAttention])
def test_so_they_do_of_a_source(make_tokens, kind):
    layer = make_layer(kind, form="cross")
    x, source = make_tokens(4), make_tokens(9, seed=1)
    expected, _ = layer(x, source=source, key_mask=PADS)
    actual = layer.contributions(x, 2, source=source, key_mask=PADS).sum(1) + bias(layer)
    assert_close(actual, expected[:, 2])


@pytest.mark.parametrize("kind, options", CAUSAL.values(), ids=CAUSAL)
def test_a_row_is_one_of_the_weights(make_tokens, kind, options):
    layer, x = make_layer(kind, **options), make_tokens(9)
    weights = layer.take(x, torch.eye(9, dtype=torch.double).expand(2, 3, 9, 9))[0]
    assert_close(layer.one_row(x, 6, key_mask=None), weights[:, :, 6])
    by = torch.rand(2, 1, 9, dtype=torch.double)
    assert_close(layer.taken(x, by), (by.unsqueeze(-2) @ weights).squeeze(-2))


@pytest.mark.parametrize("cut", [1, 5])
@pytest.mark.parametrize("kind, options", CAUSAL.values(), ids=CAUSAL)
def test_values_are_taken_however_a_sequence_is_cut(make_tokens, kind, options, cut):
    layer, x = make_layer(kind, **options), make_tokens(9)
    values = torch.rand(2, 3, 9, 2, dtype=torch.double)
    whole, _ = layer.take(x, values)
    if options.get("formulation") == "fastformer":
        with pytest.raises(InputError, match="whole sequences; give no state"):
            layer.take(x, values, layer(x)[1])
        return
    head, state = layer.take(x[:, :cut], values[:, :, :cut])
    tail, _ = layer.take(x[:, cut:], values[:, :, cut:], state)
    assert_close(torch.cat([head, tail], dim=2), whole)


def test_fastformer_takes_one_mean_for_all(make_tokens):
    layer, x = make_layer(FastformerAttention), make_tokens(9)
    assert_close(layer.one_row(x, 2), layer.weights(x)[:, :, 5])


def test_a_layer_that_cannot_tell_says_so(make_tokens):
    layer = make_layer(EFFICIENT["linformer"], length=9)
    with pytest.raises(ConfigError, match="cannot tell how much of each token it takes"):
        layer.weights(make_tokens(9))
    with pytest.raises(ConfigError, match="cannot tell what each token contributes"):
        layer.contributions(make_tokens(9), 2)
