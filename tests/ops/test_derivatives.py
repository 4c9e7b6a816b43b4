"""Where more than a kernel's one gradient is asked for, a plain version is differentiated."""

import torch
from torch.autograd import forward_ad
from torch.testing import assert_close

from leap.ops.derivatives import differentiable_again, gradients, transformed


def test_transforms_and_forward_mode_are_noticed():
    noticed = []

    def look(x):
        noticed.append(transformed())
        return x.sum()

    look(torch.ones(2))
    torch.func.grad(look)(torch.ones(2))
    torch.func.vmap(look)(torch.ones(2, 2))
    with forward_ad.dual_level():
        look(torch.ones(2))
    look(torch.ones(2))
    assert noticed == [False, True, True, True, False]


def test_a_backward_is_differentiable_where_a_graph_is_made_of_it():
    with torch.no_grad():
        assert not differentiable_again()
        with forward_ad.dual_level():
            assert differentiable_again()
    with torch.enable_grad():
        assert differentiable_again()


def test_gradients_are_those_of_the_plain_version_and_none_for_what_has_none():
    x = torch.randn(3, dtype=torch.double, requires_grad=True)
    y = torch.randn(3, dtype=torch.double, requires_grad=True)
    rows, upstream = torch.tensor([2, 0]), torch.randn(3, dtype=torch.double)

    def plain(x, rows, power, y):
        return x**power * y, (x[rows] * y[rows]).sum()

    found = gradients(plain, (x, rows, 3, y), (upstream, None))
    expected = torch.autograd.grad(plain(x, rows, 3, y)[0], (x, y), upstream)
    assert found[1] is None and found[2] is None
    assert_close((found[0], found[3]), expected)
