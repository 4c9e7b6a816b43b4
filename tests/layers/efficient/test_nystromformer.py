import pytest
import torch
from torch.testing import assert_close

from leap.layers.efficient import NystromformerAttention
from leap.layers.efficient.nystromformer import pseudo_inverse, stretch_means

LENGTH = 9


def build(**options):
    layer = NystromformerAttention(12, 3, **options).double()
    for proj in (layer.q_proj, layer.k_proj):
        torch.nn.init.normal_(proj.weight, std=0.5)
    return layer


@pytest.mark.parametrize("n_landmark", [LENGTH, 128])
def test_with_every_token_a_landmark_it_is_softmax(n_landmark, make_tokens, softmax_definition):
    layer, x = build(n_landmark=n_landmark, n_iteration=30), make_tokens(LENGTH)
    assert_close(layer(x)[0], softmax_definition(layer, x), rtol=1e-6, atol=1e-8)


def test_it_is_the_formula(make_tokens, assert_same):
    layer, x = build(n_landmark=3, n_iteration=12), make_tokens(LENGTH)
    q, k, v = (layer.split(proj(x)) for proj in (layer.q_proj, layer.k_proj, layer.v_proj))
    q_mark, k_mark = (y.unflatten(2, (3, 3)).mean(dim=3) for y in (q, k))

    def s(x, y):
        return (x @ y.mT / 2).softmax(-1)

    o = s(q, k_mark) @ torch.linalg.pinv(s(q_mark, k_mark)) @ s(q_mark, k) @ v
    assert_same(layer(x)[0], layer.o_proj(layer.join(o)), layer, x)


def test_stretches_are_as_equal_as_can_be():
    x = torch.arange(7.0).view(1, 7, 1).expand(3, 7, 1)
    means = stretch_means(x, torch.tensor([7, 3, 2]), 3).squeeze(-1)
    assert means[0].tolist() == [0.5, 2.5, 5.0]
    assert means[1].tolist() == [0.0, 1.0, 2.0]
    assert means[2, :2].tolist() == [0.0, 1.0]


def test_the_iteration_finds_the_inverse():
    a = (torch.randn(2, 3, 6, 6, dtype=torch.double) + 4 * torch.eye(6)).softmax(-1)
    assert_close(pseudo_inverse(a, 20), torch.linalg.inv(a))


def test_a_convolution_of_the_values_is_added(make_tokens):
    layer, x = build(n_landmark=3, conv_kernel=3), make_tokens(LENGTH)
    y = layer(x)[0]
    kernel, layer.conv = layer.conv.weight, None
    v = torch.nn.functional.pad(layer.split(layer.v_proj(x)), (0, 0, 1, 1))
    taps = (kernel[:, :, i, :] * v[:, :, i : i + LENGTH] for i in range(3))
    more = layer.join(sum(taps)) @ layer.o_proj.weight.mT
    assert_close(y, layer(x)[0] + more)
