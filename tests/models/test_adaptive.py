"""Promises of the adaptive embedding and softmax."""

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from leap.errors import ConfigError, InputError
from leap.models.adaptive import AdaptiveEmbedding


def make_embedding():
    return AdaptiveEmbedding(30, 16, cutoffs=[10, 20], factor=4).double()


def test_each_band_is_embedded_through_its_own_projection():
    embedding = make_embedding()
    ids = torch.tensor([[0, 9, 10], [19, 20, 29]])
    expected = torch.stack(
        [
            embedding.projections[b](embedding.bands[b].weight[i - 10 * b])
            for b, i in ((0, 0), (0, 9), (1, 10), (1, 19), (2, 20), (2, 29))
        ]
    )
    assert_close(embedding(ids).flatten(0, 1), expected)


@pytest.mark.parametrize("token", [-5, 30, 99])
def test_a_token_outside_the_vocabulary_is_named(token):
    with pytest.raises(InputError, match=rf"token {token} is not among the 30 of the vocabulary"):
        make_embedding()(torch.tensor([[3, token]]))


def test_no_tokens_are_embedded_as_none():
    assert make_embedding()(torch.zeros(2, 0, dtype=torch.long)).shape == (2, 0, 16)


def test_probabilities_sum_to_one_and_make_the_loss():
    embedding = make_embedding()
    x = torch.randn(50, 16, dtype=torch.double, requires_grad=True)
    labels = torch.randint(0, 30, (50,))
    labels[::7] = -100
    log_p = embedding.log_probabilities(x)
    assert_close(log_p.exp().sum(-1), torch.ones(50, dtype=torch.double))
    expected = F.nll_loss(log_p, labels, reduction="sum", ignore_index=-100)
    actual = embedding.cross_entropy(x, labels)
    assert_close(actual, expected)
    inputs = (x, *embedding.parameters())
    assert_close(torch.autograd.grad(actual, inputs), torch.autograd.grad(expected, inputs))


def test_a_band_that_no_label_is_in_costs_nothing():
    embedding = make_embedding()
    x = torch.randn(5, 16, dtype=torch.double)
    labels = torch.tensor([0, 3, 9, 1, -100])
    expected = F.nll_loss(
        embedding.log_probabilities(x), labels, reduction="sum", ignore_index=-100
    )
    assert_close(embedding.cross_entropy(x, labels), expected)


@pytest.mark.parametrize(
    ("cutoffs", "factor", "message"),
    [([20, 10], 4, "must rise"), ([10, 30], 4, "must rise"), ([10, 20], 5, "cannot be divided")],
)
def test_bands_that_do_not_fit_are_named(cutoffs, factor, message):
    with pytest.raises(ConfigError, match=message):
        AdaptiveEmbedding(30, 16, cutoffs, factor)
