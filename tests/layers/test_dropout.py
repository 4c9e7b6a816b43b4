import pytest
import torch
from torch.func import grad, vmap
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from leap.layers import Dropout


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_share_is_dropped_and_the_rest_scaled(p, dtype):
    x = torch.ones(1001, 103, dtype=dtype)
    y = Dropout(p)(x)
    assert y.dtype == dtype
    kept = y != 0
    n = x.numel()
    assert abs(kept.sum().item() - (1 - p) * n) < 5 * (n * p * (1 - p)) ** 0.5
    cut = round(p * 65536) / 65536
    assert_close(y[kept], torch.full_like(y[kept], 1 / (1 - cut)))


def test_neighbours_are_dropped_independently():
    kept = (Dropout(0.5)(torch.ones(2**18)) != 0).double()
    assert not torch.equal(kept[::4], kept[1::4])
    for lag in (1, 2, 3, 4, 64):
        together = (kept[lag:] * kept[:-lag]).mean().item()
        assert abs(together - 0.25) < 5 * 0.5 / 2**9


def test_the_gradient_is_dropped_alike():
    x = torch.randn(7, 50, requires_grad=True)
    y = Dropout(0.3)(x)
    y.backward(torch.ones_like(y))
    assert_close(x.grad * x.detach(), y.detach())


def test_the_gradient_has_a_gradient():
    x = torch.randn(6, 5, dtype=torch.float64, requires_grad=True)

    def drop(x):
        torch.manual_seed(0)
        return Dropout(0.3)(x).square()

    assert torch.autograd.gradcheck(drop, x) and torch.autograd.gradgradcheck(drop, x)


def test_a_byte_is_kept_of_each_element():
    x, kept = torch.randn(100, 7, requires_grad=True), []
    with torch.autograd.graph.saved_tensors_hooks(lambda y: kept.append(y) or y, lambda y: y):
        Dropout(0.3)(x)
    assert [(y.dtype, y.numel()) for y in kept] == [(torch.int8, 700)]


def test_a_seed_repeats_it_and_the_next_call_does_not():
    drop, x = Dropout(0.5), torch.ones(1000)
    torch.manual_seed(3)
    first, second = drop(x), drop(x)
    torch.manual_seed(3)
    assert torch.equal(drop(x), first)
    assert not torch.equal(first, second)


def test_checkpointing_drops_the_same_twice():
    drop = Dropout(0.5)
    x = torch.randn(1000, requires_grad=True)
    y = checkpoint(lambda x: drop(x).square().sum(), x, use_reentrant=False)
    y.backward()
    assert_close((x.grad * x.detach()).sum() / 2, y.detach())


@pytest.mark.parametrize("shape", [(0,), (), (3, 1), (5, 7, 3)])
def test_any_shape(shape):
    assert Dropout(0.5)(torch.ones(shape)).shape == shape


def test_nothing_and_everything_can_be_dropped():
    x = torch.randn(50)
    assert torch.equal(Dropout(0.0)(x), x)
    assert torch.equal(Dropout(0.5).eval()(x), x)
    assert torch.equal(Dropout(1.0)(x), torch.zeros_like(x))


def test_compiled_code_drops_too(shapes_unchecked):
    drop = torch.compile(Dropout(0.5), backend="aot_eager", fullgraph=True)
    y = drop(torch.ones(1000))
    assert 350 < (y == 0).sum() < 650


def test_torch_func_drops_and_differentiates():
    dropout, x = Dropout(0.5), torch.ones(3, 50)
    alone = vmap(grad(lambda row: dropout(row).sum()), randomness="different")(x)
    assert set(alone.unique().tolist()) == {0.0, 2.0}
