"""Shared by the tests of layers: tokens to feed them, and comparison down to the gradients."""

import pytest
import torch
from torch.testing import assert_close


@pytest.fixture
def make_tokens():
    def make(t, *, batch=2, hidden_size=12, seed=0):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(batch, t, hidden_size, dtype=torch.double, generator=generator)
        return x.requires_grad_()

    return make


@pytest.fixture
def assert_same():
    """Outputs agree, and so do the gradients of the inputs and parameters that led to them."""

    def compare(actual, expected, layer, *inputs):
        assert_close(actual, expected)
        upstream = torch.randn_like(expected)
        wanted = [*inputs, *layer.parameters()]
        options = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
        assert_close(
            torch.autograd.grad(actual, wanted, upstream, **options),
            torch.autograd.grad(expected, wanted, upstream, **options),
        )

    return compare
