import pytest
import torch
from torch.testing import assert_close

from leap.errors import InputError
from leap.ops import block_sparse
from leap.ops.block_sparse import block_sparse_attention, block_sparse_attention_reference
from leap.ops.tolerance import TOLERANCES, relative_error


def make(n_block=5, size=3, seen=2, *, dtype=torch.double):
    qkv = [torch.randn(2, 3, n_block * size, w, dtype=dtype).requires_grad_() for w in (4, 4, 6)]
    blocks = torch.rand(2, 3, n_block, n_block).argsort(dim=-1)[..., :seen]
    return qkv, blocks


MASKS = {
    "whole": None,
    "padded": torch.arange(15) < torch.tensor([[15], [7]]),
    "nothing": torch.zeros(2, 15, dtype=torch.bool),
}


@pytest.fixture(params=[1, 4 * 18, None], ids=["1-block", "4-blocks", "all-blocks"])
def at_once(request, monkeypatch):
    if request.param is not None:
        monkeypatch.setitem(block_sparse.SCORES_AT_ONCE, "cpu", request.param)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("seen", [1, 2, 5])
@pytest.mark.usefixtures("at_once")
def test_agrees_with_the_definition(seen, recompute, mask):
    qkv, blocks = make(seen=seen)
    expected = block_sparse_attention_reference(*qkv, blocks, key_mask=MASKS[mask])
    actual = block_sparse_attention(*qkv, blocks, key_mask=MASKS[mask], recompute=recompute)
    assert_close(actual, expected)
    upstream = torch.randn_like(expected)
    assert_close(
        torch.autograd.grad(actual, qkv, upstream), torch.autograd.grad(expected, qkv, upstream)
    )


def test_all_blocks_are_softmax_attention():
    qkv, blocks = make(seen=5)
    expected = torch.nn.functional.scaled_dot_product_attention(*qkv)
    assert_close(block_sparse_attention(*qkv, blocks), expected)


@pytest.mark.parametrize("dtype", [torch.float, torch.bfloat16, torch.half], ids=str)
def test_low_precision_stays_within_the_table(dtype):
    qkv, blocks = make(dtype=dtype)
    exact = [x.detach().double().requires_grad_() for x in qkv]
    actual = block_sparse_attention(*qkv, blocks)
    expected = block_sparse_attention_reference(*exact, blocks)
    assert actual.dtype == dtype
    assert relative_error(actual, expected) < TOLERANCES[dtype].output
    upstream = torch.randn_like(actual)
    for x, y in zip(
        torch.autograd.grad(actual, qkv, upstream),
        torch.autograd.grad(expected, exact, upstream.double()),
        strict=True,
    ):
        assert relative_error(x, y) < TOLERANCES[dtype].gradient


def test_large_scores_neither_overflow_nor_vanish():
    (q, k, v), blocks = make()
    y = block_sparse_attention(1e4 * q, 1e4 * k, v, blocks)
    assert_close(y, block_sparse_attention_reference(1e4 * q, 1e4 * k, v, blocks))


def test_nothing_of_the_size_of_the_scores_is_kept():
    (q, k, v), blocks = make(n_block=20, seen=10)
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: sizes.append(x.numel()) or x, lambda x: x
    ):
        block_sparse_attention(q, k, v, blocks)
    assert max(sizes) <= v.numel()


def test_tokens_that_do_not_divide_are_an_error():
    (q, k, v), blocks = make()
    with pytest.raises(InputError, match="does not divide into the 5 blocks"):
        block_sparse_attention(q[:, :, :-1], k[:, :, :-1], v[:, :, :-1], blocks)
