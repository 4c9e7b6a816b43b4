"""Promises of linear attention that fades in both directions."""

import pytest
import torch
from torch.testing import assert_close

from leap.ops import linear_attention, two_way_linear_attention

pytestmark = pytest.mark.usefixtures("each_backend")


def make_inputs(length, *, seed=0):
    options = {"dtype": torch.double, "generator": torch.Generator().manual_seed(seed)}
    q, k = (torch.rand(2, 3, length, 5, **options) for _ in "qk")
    v = torch.randn(2, 3, length, 4, **options)
    gate = -torch.rand(2, 3, length, **options)
    x, y = (torch.rand(2, 3, length, 3, **options) for _ in "xy")
    return tuple(z.requires_grad_() for z in (q, k, v, gate, x, y))


def as_defined(q, k, v, gate, x, y, mask=None):
    gone = gate.cumsum(2) if mask is None else gate.masked_fill(~mask[:, None], 0).cumsum(2)
    left = (-(gone.unsqueeze(3) - gone.unsqueeze(2)).abs()).exp()
    scores = (q @ k.mT) * (x @ y.mT) * left
    if mask is not None:
        scores = scores.masked_fill(~mask[:, None, None], 0)
    return scores @ v / scores.sum(-1, keepdim=True)


@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 50, 150])
def test_agrees_with_the_definition(length):
    q, k, v, gate, x, y = inputs = make_inputs(length)
    expected = as_defined(*inputs)
    actual = two_way_linear_attention(q, k, v, log_gate=gate, reweighting=(x, y), chunk_size=8)
    assert_close(actual, expected)
    upstream = torch.randn_like(expected)
    # The first gate lies between no two tokens.
    assert_close(
        torch.autograd.grad(actual, inputs, upstream),
        torch.autograd.grad(expected, inputs, upstream),
    )


def test_pads_lie_between_no_two_tokens():
    q, k, v, gate, x, y = inputs = make_inputs(12)
    mask = torch.rand(2, 12, generator=torch.Generator().manual_seed(1)) < 0.6
    actual = two_way_linear_attention(
        q, k, v, log_gate=gate, reweighting=(x, y), key_mask=mask, chunk_size=4
    )
    expected = as_defined(*inputs, mask)
    real = mask[:, None, :, None].expand_as(expected)
    assert_close(actual[real], expected[real])


def test_a_fade_is_a_gate_that_never_changes():
    q, k, v, *_ = make_inputs(20)
    rates = (-0.5, -0.1, 0.0)
    gate = torch.tensor(rates, dtype=torch.double).view(1, 3, 1).expand(2, 3, 20)
    assert_close(
        two_way_linear_attention(q, k, v, fade=rates),
        two_way_linear_attention(q, k, v, log_gate=gate),
    )
    still = two_way_linear_attention(q, k, v, fade=(0.0,) * 3)
    assert_close(still, linear_attention(q, k, v))
