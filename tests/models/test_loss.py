"""Promises of the chunked loss."""

from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import jacrev
from torch.testing import assert_close

from leap.models.loss import (
    TOKENS_AT_ONCE,
    head_cross_entropy,
    is_plain,
    linear_cross_entropy,
)


@pytest.mark.parametrize("n", [1, TOKENS_AT_ONCE, TOKENS_AT_ONCE + 1, 3 * TOKENS_AT_ONCE + 7])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_equals_the_plain_form_in_value_and_gradient(n, with_bias, smoothing):
    x = torch.randn(n, 5, dtype=torch.double, requires_grad=True)
    weight = torch.randn(11, 5, dtype=torch.double, requires_grad=True)
    bias = torch.randn(11, dtype=torch.double, requires_grad=True) if with_bias else None
    labels = torch.randint(0, 11, (n,))
    labels[torch.rand(n) < 0.3] = -100
    inputs = (x, weight, bias) if with_bias else (x, weight)
    logits = F.linear(x, weight, bias)
    expected = F.cross_entropy(logits, labels, reduction="sum", label_smoothing=smoothing)
    actual = linear_cross_entropy(x, weight, labels, bias, smoothing)
    assert_close(actual, expected)
    assert_close(torch.autograd.grad(3 * actual, inputs), torch.autograd.grad(3 * expected, inputs))


def test_all_labels_ignored_is_a_loss_of_zero_with_zero_gradients():
    x = torch.randn(7, 5, requires_grad=True)
    loss = linear_cross_entropy(x, torch.randn(11, 5), torch.full((7,), -100))
    assert loss == 0
    assert torch.equal(torch.autograd.grad(loss, x)[0], torch.zeros_like(x))


def test_extreme_logits_stay_finite():
    x = torch.full((3, 2), 1e4, requires_grad=True)
    weight = torch.tensor([[1e4, 1e4], [-1e4, -1e4]], requires_grad=True)
    loss = linear_cross_entropy(x, weight, torch.tensor([1, 0, 1]))
    assert loss.isfinite()
    assert all(g.isfinite().all() for g in torch.autograd.grad(loss, (x, weight)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_summed_in_single(dtype):
    x, weight = torch.randn(2000, 8), torch.randn(11, 8)
    labels = torch.randint(0, 11, (2000,))
    rounded = x.to(dtype), weight.to(dtype)
    loss = linear_cross_entropy(*rounded, labels)
    assert loss.dtype == torch.float32
    logits = F.linear(*rounded).float()
    assert_close(loss, F.cross_entropy(logits, labels, reduction="sum"))


def hooked(head):
    head.register_forward_hook(lambda module, inputs, y: 2 * y)
    return head


def replaced(head):
    own = head.forward
    head.forward = lambda x: 2 * own(x)
    return head


@pytest.mark.parametrize(
    "change",
    [lambda head: nn.Sequential(head), hooked, replaced, nn.utils.parametrizations.weight_norm],
    ids=["another-module", "hooked", "replaced-forward", "parametrised"],
)
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_a_head_that_is_more_than_its_weights_is_called(change, smoothing):
    head = change(nn.Linear(5, 11).double())
    x = torch.randn(7, 5, dtype=torch.double, requires_grad=True)
    labels = torch.randint(0, 11, (7,))
    labels[2] = -100
    inputs = (x, *head.parameters())
    expected = F.cross_entropy(head(x), labels, reduction="sum", label_smoothing=smoothing)
    actual = head_cross_entropy(x, head, labels, smoothing)
    assert_close(actual, expected)
    assert_close(torch.autograd.grad(actual, inputs), torch.autograd.grad(expected, inputs))


def test_a_plain_head_is_never_called():
    head = nn.Linear(5, 11)
    assert is_plain(head, nn.Linear)
    x, labels = torch.randn(7, 5), torch.randint(0, 11, (7,))
    expected = F.cross_entropy(head(x), labels, reduction="sum")
    with mock.patch.object(nn.Linear, "forward", side_effect=AssertionError):
        assert_close(head_cross_entropy(x, head, labels), expected)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_second_derivatives_are_those_of_the_plain_form(smoothing):
    x, weight = torch.randn(7, 3, dtype=torch.double), torch.randn(5, 3, dtype=torch.double)
    labels = torch.tensor([0, 1, -100, 3, 4, 0, 2])

    def second(loss):
        inputs = x.clone().requires_grad_(), weight.clone().requires_grad_()
        first = torch.autograd.grad(loss(*inputs), inputs, create_graph=True)
        return torch.autograd.grad(sum(each.square().sum() for each in first), inputs)

    def plain(x, weight):
        return F.cross_entropy(x @ weight.mT, labels, reduction="sum", label_smoothing=smoothing)

    def ours(x, weight):
        return linear_cross_entropy(x, weight, labels, smoothing=smoothing)

    assert_close(second(ours), second(plain))
    of_ours, of_plain = (jacrev(jacrev(loss))(x, weight) for loss in (ours, plain))
    assert_close(of_ours, of_plain)
