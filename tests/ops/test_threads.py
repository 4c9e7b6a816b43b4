"""Promises of ops that compute on one thread what is too small for more."""

import threading

import pytest
import torch

from leap.ops import (
    additive_attention,
    causal_delta_attention,
    causal_linear_attention,
    linear_attention,
)
from leap.ops.linear import chunked
from leap.ops.threads import on_one_thread


@pytest.fixture(autouse=True)
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def causal(q, k, v):
    return causal_linear_attention(q, k, v, backend="torch")[0]


ATTENTIONS = {
    "linear": linear_attention,
    "causal": causal,
    "chosen": lambda q, k, v: causal_linear_attention(q, k, v)[0],
    "additive": lambda q, _k, v: additive_attention(q[..., 0], v)[0],
    "delta": lambda q, k, v: causal_delta_attention(q, k, v, q[..., 0])[0],
}


@pytest.mark.parametrize("attend", ATTENTIONS.values(), ids=ATTENTIONS)
def test_results_are_the_same_for_any_number_of_threads_and_leave_it_as_it_was(attend):
    inputs = [torch.rand(4, 16, 300, 8, requires_grad=True) for _ in "qkv"]
    found = []
    for n in (1, 2):
        torch.set_num_threads(n)
        o = attend(*inputs)
        grads = torch.autograd.grad(o, inputs, torch.ones_like(o), allow_unused=True)
        found.append([o, *(x for x in grads if x is not None)])
        assert torch.get_num_threads() == n
    assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))


def test_chunks_are_computed_by_one_thread(monkeypatch):
    used, chunk = set(), chunked._Rows.chunk

    def spy(*args):
        used.add(torch.get_num_threads())
        return chunk(*args)

    monkeypatch.setattr(chunked._Rows, "chunk", spy)
    inputs = [torch.rand(4, 16, 300, 8, requires_grad=True) for _ in "qkv"]
    causal(*inputs).sum().backward()
    assert used == {1}


def test_the_number_of_threads_is_as_before_after_an_error(monkeypatch):
    monkeypatch.setattr(chunked._Rows, "chunk", None)
    with pytest.raises(TypeError):
        causal(*(torch.rand(4, 16, 300, 8) for _ in "qkv"))
    assert torch.get_num_threads() == 2


def test_several_python_threads_at_once_leave_the_number_of_threads_as_it_was():
    q, k, v = (torch.rand(4, 16, 70, 8) for _ in "qkv")
    expected, found, meet = causal(q, k, v), {}, threading.Barrier(4)

    def run(i):
        meet.wait()
        found[i] = all(torch.equal(causal(q, k, v), expected) for _ in range(5))

    threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert found == dict.fromkeys(range(4), True)
    assert torch.get_num_threads() == 2


def test_contexts_inside_each_other_put_the_number_of_threads_back_at_the_end():
    x = torch.zeros(1)
    with on_one_thread(x):
        with on_one_thread(x):
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2


def test_elsewhere_than_on_a_processor_the_number_of_threads_stays():
    with on_one_thread(torch.zeros(1, device="meta")):
        assert torch.get_num_threads() == 2
