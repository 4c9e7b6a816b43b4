import math

import torch
from torch.testing import assert_close

from leap.layers.efficient import PerformerAttention
from leap.layers.efficient.performer import orthogonal_normal

LENGTH = 9


def test_it_is_linear_attention_under_its_features(make_tokens, assert_same):
    layer, x = PerformerAttention(12, 3, n_feature=7).double(), make_tokens(LENGTH)

    def phi(y):
        y = layer.split(y) / 4**0.25
        return (y @ layer.omega.mT - y.square().sum(-1, keepdim=True) / 2).exp() / math.sqrt(7)

    scores = phi(layer.q_proj(x)) @ phi(layer.k_proj(x)).mT
    o = scores / scores.sum(-1, keepdim=True) @ layer.split(layer.v_proj(x))
    assert_same(layer(x)[0], layer.o_proj(layer.join(o)), layer, x)


def test_it_approaches_softmax_as_features_grow(make_tokens, softmax_definition):
    x = make_tokens(LENGTH)

    def error(n_feature):
        layer = PerformerAttention(12, 3, n_feature=n_feature).double()
        expected = softmax_definition(layer, x)
        return ((layer(x)[0] - expected).norm() / expected.norm()).item()

    errors = [sum(error(n) for _ in range(5)) / 5 for n in (4, 256, 16384)]
    assert errors[1] < errors[0] / 2 and errors[2] < errors[1] / 2
    assert errors[2] < 0.03


def test_features_are_normal_and_orthogonal_by_the_width():
    omega = orthogonal_normal(4000, 8)
    assert_close(omega.mean(), torch.tensor(0.0), atol=0.02, rtol=0)
    assert_close(omega.var(), torch.tensor(1.0), atol=0.03, rtol=0)
    assert_close(omega.pow(4).mean(), torch.tensor(3.0), atol=0.15, rtol=0)
    products = omega[:8] @ omega[:8].mT
    assert_close(products, products.diag().diag(), atol=1e-5, rtol=0)
    assert orthogonal_normal(3, 8).shape == (3, 8)


def test_no_query_is_lost_however_far_from_all_keys(make_tokens):
    layer, x = PerformerAttention(12, 3).double(), make_tokens(LENGTH)
    for proj in (layer.q_proj, layer.k_proj):
        torch.nn.init.normal_(proj.weight, std=30)
    torch.nn.init.zeros_(layer.v_proj.weight)  # The same values everywhere: their mean is they.
    y = layer(x)[0]
    assert_close(y, layer.o_proj(layer.v_proj.bias).expand_as(y))
