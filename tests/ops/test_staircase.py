"""Promises of linear attention under a read schedule."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from leap.errors import InputError
from leap.ops import causal_linear_attention, linear_attention, staircase_linear_attention
from leap.ops.linear import Tokens, square, staircase_linear_attention_reference
from leap.ops.staircase import blocks, interleaved, sees
from leap.ops.tolerance import TOLERANCES, relative_error


def make_inputs(t, n, *, batch=2, features=5, values=3, seed=0, dtype=torch.double):
    options = {"dtype": dtype, "generator": torch.Generator().manual_seed(seed)}
    q = torch.rand(batch, 3, t, features, **options)
    k = torch.rand(batch, 3, n, features, **options)
    v = torch.randn(batch, 3, n, values, **options)
    return tuple(x.requires_grad_() for x in (q, k, v))


def random_schedule(*rows, n, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, n + 1, rows, generator=generator).sort(dim=-1).values


def wait_k(t, n, k, ratio):
    """The closed form n(i) = min(N, r (i + k)) of wait-k with fixed pre-decision."""
    return (ratio * (torch.arange(t) + k)).clamp(max=n)


def by_square(q, k, v, visible):
    return square.attend(Tokens(q, k, v), sees=sees(visible, k), normalise=False)


@pytest.mark.parametrize("rows", [(), (2,)], ids=["one-schedule", "a-schedule-a-sentence"])
@pytest.mark.parametrize(("t", "n"), [(1, 1), (7, 20), (65, 3), (150, 400), (400, 150)])
def test_agrees_with_the_definition(t, n, rows):
    qkv = make_inputs(t, n)
    visible = random_schedule(*rows, t, n=n)
    expected = staircase_linear_attention_reference(*qkv, visible)
    actual = staircase_linear_attention(*qkv, visible)
    assert_close(actual, expected)
    upstream = torch.randn_like(expected)
    assert_close(
        torch.autograd.grad(actual, qkv, upstream), torch.autograd.grad(expected, qkv, upstream)
    )


def test_sums_over_a_long_source_are_exact():
    """Tokens that are all the same, whose sums round the same way again and again."""
    visible = torch.arange(8, 2**15 + 1, 8).repeat_interleave(64)
    q = torch.full((1, 1, len(visible), 2), 0.7)
    k = torch.tensor([0.3, 0.9]).expand(1, 1, 2**15, 2)
    v = torch.tensor([0.77, 0.11, 1.0]).expand(1, 1, 2**15, 3)
    actual = blocks(q, k, v, visible)[0, 0].double()
    score = (q[0, 0, 0].double() * k[0, 0, 0].double()).sum()
    assert_close(actual, visible.unsqueeze(1) * score * v[0, 0, 0].double(), rtol=1e-6, atol=0)


@settings(max_examples=30)
@given(t=st.integers(1, 200), n=st.integers(1, 200), seed=st.integers(0, 1000))
def test_the_three_ways_agree(t, n, seed):
    q, k, v = (x.detach() for x in make_inputs(t, n, seed=seed))
    visible = random_schedule(t, n=n, seed=seed)
    expected = by_square(q, k, v, visible)
    assert_close(blocks(q, k, v, visible), expected)
    assert_close(interleaved(q, k, v, visible), expected)
    each = random_schedule(2, t, n=n, seed=seed)
    assert_close(interleaved(q, k, v, each), by_square(q, k, v, each))


@pytest.mark.parametrize("way", [by_square, blocks, interleaved])
def test_each_way_has_the_gradients_of_the_definition(way):
    q, k, v = make_inputs(130, 90)
    visible = random_schedule(130, n=90)
    expected = staircase_linear_attention_reference(q, k, v, visible, normalise=False)
    actual = way(q, k, v, visible)
    upstream = torch.randn_like(expected)
    assert_close(
        torch.autograd.grad(actual, (q, k, v), upstream),
        torch.autograd.grad(expected, (q, k, v), upstream),
    )


@pytest.mark.parametrize("k", [1, 3, 50])
@pytest.mark.parametrize("ratio", [1, 4])
def test_wait_k_sees_what_a_reader_has_read(k, ratio):
    """Write by write, as an interpreter would: read k chunks, then one more before each write."""
    t, n = 9, 21
    q, key, v = make_inputs(t, n)
    actual = staircase_linear_attention(q, key, v, wait_k(t, n, k, ratio))
    read = 0
    for i in range(t):
        read = min(n, ratio * k if i == 0 else read + ratio)
        expected = linear_attention(q[:, :, i : i + 1], key[:, :, :read], v[:, :, :read])
        assert_close(actual[:, :, i : i + 1], expected)


def test_a_step_a_token_is_causal_attention_and_seeing_all_is_bidirectional():
    qkv = make_inputs(70, 70)
    steps = torch.arange(70) + 1
    assert_close(staircase_linear_attention(*qkv, steps), causal_linear_attention(*qkv)[0])
    everything = torch.full((70,), 70)
    assert_close(staircase_linear_attention(*qkv, everything), linear_attention(*qkv))


@pytest.mark.parametrize(("t", "n"), [(5, 6), (300, 400)])
@pytest.mark.parametrize("rows", [(), (2,)])
def test_who_sees_nothing_gets_zeros(t, n, rows):
    qkv = make_inputs(t, n)
    visible = random_schedule(*rows, t, n=n)
    visible[..., :3] = 0
    o = staircase_linear_attention(*qkv, visible)
    assert torch.equal(o[:, :, :3], torch.zeros_like(o[:, :, :3]))
    assert all(x.isfinite().all() for x in torch.autograd.grad(o.sum(), qkv))


@pytest.mark.parametrize(("t", "n"), [(7, 20), (150, 400)])
def test_masked_keys_are_not_there(t, n):
    q, k, v = make_inputs(t, n)
    mask = torch.rand(2, n) < 0.6
    visible = random_schedule(t, n=n)
    zeroed = k * mask[:, None, :, None]
    expected = staircase_linear_attention_reference(q, zeroed, v, visible)
    spoilt = v.masked_fill(~mask[:, None, :, None], torch.nan)
    assert_close(staircase_linear_attention(q, k, spoilt, visible, key_mask=mask), expected)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("rows", [(), (2,)])
def test_every_dtype_keeps_within_the_published_tolerance(dtype, rows):
    rounded = tuple(x.detach().to(dtype) for x in make_inputs(150, 400))
    visible = random_schedule(*rows, 150, n=400)
    expected = staircase_linear_attention(*(x.double() for x in rounded), visible)
    actual = staircase_linear_attention(*rounded, visible)
    assert actual.dtype == dtype
    assert relative_error(actual, expected) <= TOLERANCES[dtype].output


def test_gradcheck():
    inputs = make_inputs(6, 7, batch=1, features=2, values=2)
    visible = torch.tensor([0, 2, 2, 3, 7, 7])
    assert torch.autograd.gradcheck(lambda *x: staircase_linear_attention(*x, visible), inputs)


def test_compiled_gives_the_same_numbers(shapes_unchecked):
    qkv = make_inputs(150, 400)
    visible = random_schedule(150, n=400)
    compiled = torch.compile(staircase_linear_attention, fullgraph=True, backend="aot_eager")
    assert_close(compiled(*qkv, visible), staircase_linear_attention(*qkv, visible))


@pytest.mark.parametrize(
    ("visible", "message"),
    [
        (torch.tensor([1, 3, 2]), "must not decrease"),
        (torch.tensor([[1, 2, 3], [3, 1, 3]]), "must not decrease"),
        (torch.tensor([0, 2, 8]), r"from 0 to 8; with 7 keys it must stay in 0\.\.7"),
        (torch.tensor([-1, 2, 3]), "from -1 to 3"),
        (torch.tensor([1, 2]), r"visible is \[2\].*with 3 queries it must be integers \[3\]"),
        (torch.tensor([1.0, 2.0, 3.0]), "of torch.float32"),
    ],
    ids=["falls", "falls-in-one-row", "beyond", "negative", "too-short", "not-whole"],
)
def test_a_schedule_that_cannot_be_is_named(visible, message, shapes_unchecked):
    with pytest.raises(InputError, match=message):
        staircase_linear_attention(*make_inputs(3, 7), visible)
