import pytest
import torch
from torch.testing import assert_close

from leap.errors import InputError
from leap.layers.efficient import LinformerAttention

LENGTH = 9


def test_with_a_mixture_of_each_token_alone_it_is_softmax(make_tokens, softmax_definition):
    layer = LinformerAttention(12, 3, length=LENGTH, n_mixture=LENGTH).double()
    with torch.no_grad():
        layer.mixtures.copy_(torch.eye(LENGTH))
    x = make_tokens(LENGTH)
    y, expected = layer(x)[0], softmax_definition(layer, x)
    assert_close(y, expected)
    inputs = [x, *(p for name, p in layer.named_parameters() if name != "mixtures")]
    assert_close(
        torch.autograd.grad(y.square().sum(), inputs),
        torch.autograd.grad(expected.square().sum(), inputs),
    )


def test_it_is_the_formula(make_tokens, assert_same):
    layer, x = LinformerAttention(12, 3, length=20, n_mixture=4).double(), make_tokens(LENGTH)
    q, k, v = (layer.split(proj(x)) for proj in (layer.q_proj, layer.k_proj, layer.v_proj))
    e = layer.mixtures[..., :LENGTH]
    o = (q @ (e @ k).mT / 2).softmax(-1) @ (e @ v)
    assert_same(layer(x)[0], layer.o_proj(layer.join(o)), layer, x)


def test_the_mixtures_are_learned():
    assert "mixtures" in dict(LinformerAttention(12, 3, length=LENGTH).named_parameters())


def test_too_long_a_sequence_is_an_error_that_names_the_length(make_tokens):
    layer = LinformerAttention(12, 3, length=LENGTH).double()
    with pytest.raises(InputError, match="10 tokens is longer than the length=9"):
        layer(make_tokens(10))
