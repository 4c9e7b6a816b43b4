import torch
from torch.testing import assert_close

from leap.layers.efficient import KernelizedAttention
from leap.layers.efficient.gaussian import gaussian

LENGTH = 9


def test_it_is_the_formula(make_tokens, assert_same):
    layer, x = KernelizedAttention(12, 3).double(), make_tokens(LENGTH)
    q, k, v = (layer.split(proj(x)) for proj in (layer.q_proj, layer.k_proj, layer.v_proj))
    weights = (-(q.unsqueeze(3) - k.unsqueeze(2)).square().sum(-1) / (2 * 2)).exp()
    assert_same(layer(x)[0], layer.o_proj(layer.join(weights @ v)), layer, x)


def test_the_kernel_is_never_above_one():
    x = 1e6 + torch.randn(1, 1, 50, 4)
    assert (gaussian(x, x) <= 1).all()
    assert_close(
        gaussian(x.double(), x.double()).diagonal(dim1=-2, dim2=-1), torch.ones(1, 1, 50).double()
    )
