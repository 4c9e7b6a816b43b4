"""Promises of linear attention, bidirectional and causal."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from leap.errors import InputError
from leap.ops import (
    LinearState,
    causal_linear_attention,
    causal_proportional_attention,
    linear_attention,
    staircase_linear_attention,
)
from leap.ops.features import cosine, positional, proportional, widen
from leap.ops.linear import (
    causal_linear_attention_reference,
    chunked,
    linear_attention_reference,
    read_and_attend,
    staircase_linear_attention_reference,
    whole,
)
from leap.ops.tolerance import TOLERANCES, relative_error

pytestmark = pytest.mark.usefixtures("each_backend")

LENGTHS = [1, 2, 7, 8, 9, 15, 16, 17, 50]
FADE = (-1.0, -0.3, 0.0)


def make_qkv(length, *, batch=2, heads=3, features=5, values=3, seed=0, dtype=torch.double):
    options = {"dtype": dtype, "generator": torch.Generator().manual_seed(seed)}
    q, k = (torch.rand(batch, heads, length, features, **options) for _ in "qk")
    v = torch.randn(batch, heads, length, values, **options)
    return tuple(x.requires_grad_() for x in (q, k, v))


def make_proportions(length, *, batch=2, heads=3, seed=1, dtype=torch.double):
    options = {"dtype": dtype, "generator": torch.Generator().manual_seed(seed)}
    return tuple(torch.rand(batch, heads, length, **options).requires_grad_() for _ in "ps")


def make_gate(length, width, *, batch=2, heads=3, seed=2, lowest=-3.0):
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, heads, length) if width == "head" else (batch, heads, length, width)
    gate = lowest * torch.rand(shape, dtype=torch.double, generator=generator)
    return gate.requires_grad_()


def assert_same_gradients(actual, expected, inputs):
    upstream = torch.randn_like(expected)
    assert_close(
        torch.autograd.grad(actual, inputs, upstream),
        torch.autograd.grad(expected, inputs, upstream),
    )


def cut(tensors, *span):
    return tuple(x[:, :, slice(*span)] for x in tensors)


# The formula


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("length", LENGTHS, ids=lambda n: f"{n}-tokens")
def test_causal_agrees_with_the_definition(length, normalise):
    qkv = make_qkv(length)
    expected = causal_linear_attention_reference(*qkv, normalise=normalise)
    actual, _ = causal_linear_attention(*qkv, chunk_size=8, normalise=normalise)
    assert_close(actual, expected)
    assert_same_gradients(actual, expected, qkv)


@pytest.mark.parametrize("length", LENGTHS, ids=lambda n: f"{n}-tokens")
def test_proportional_is_the_plain_op_over_widened_features(length):
    (q, k, v), (p, s) = make_qkv(length), make_proportions(length)
    expected = causal_linear_attention_reference(proportional(q, p), proportional(k, s), v)
    actual, state = causal_proportional_attention(q, k, v, p, s, chunk_size=8)
    assert_close(actual, expected)
    assert_same_gradients(actual, expected, (q, k, v, p, s))

    _, widened = causal_linear_attention(proportional(q, p), proportional(k, s), v)
    assert_close(state.tensors(), widened.tensors())


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("pads", [None, "between", "behind"])
@pytest.mark.parametrize(("t", "n"), [(1, 1), (5, 9), (9, 5), (200, 300), (1400, 2050)])
def test_attention_to_a_whole_sequence_is_the_plain_op_over_widened_features(t, n, pads, normalise):
    q, (_, k, v) = make_qkv(t)[0], make_qkv(n, seed=3)
    p, s = make_proportions(t)[0], make_proportions(n)[1]
    order = torch.arange(n)
    mask = {
        None: None,
        "between": (order % 3 != 1).expand(2, n),
        "behind": order < torch.tensor([[n - n // 8], [n]]),  # Of the second row none.
    }[pads]
    inputs = (q, k, v, p, s)
    wide_q, wide_k = proportional(q, p), proportional(k, s)
    scores = wide_q @ wide_k.mT * (1 if mask is None else mask[:, None, None])
    expected = scores @ v
    if normalise:
        expected = expected / scores.sum(-1, keepdim=True).clamp_min(1e-6)
    o, state = read_and_attend(
        q, k, v, reweighting=(cosine(p), cosine(s)), key_mask=mask, normalise=normalise
    )
    assert_close(o, expected)
    kept = wide_k if mask is None else wide_k * mask[:, None, :, None]
    assert_close(state.kv, kept.mT @ v)
    assert_close(state.k, kept.sum(2))
    # Gradients through the state count as those through the output do.
    actual = torch.cat([o.flatten(), state.kv.flatten(), state.k.flatten()])
    expected = torch.cat([x.flatten() for x in (expected, kept.mT @ v, kept.sum(2))])
    assert_same_gradients(actual, expected, inputs)


def test_what_stands_at_pads_of_a_whole_sequence_does_not_matter():
    q, k, v = make_qkv(6)
    p, s = make_proportions(6)
    mask = torch.tensor([[True] * 4 + [False] * 2] * 2)
    expected, _ = read_and_attend(
        q, k[:, :, :4], v[:, :, :4], reweighting=(cosine(p), cosine(s[:, :, :4]))
    )
    broken = [x.detach().clone() for x in (k, v, cosine(s))]
    for x in broken:
        x[:, :, 4:] = torch.nan
        x.requires_grad_()
    actual, _ = read_and_attend(
        q, broken[0], broken[1], reweighting=(cosine(p), broken[2]), key_mask=mask
    )
    assert_close(actual, expected)
    for grad in torch.autograd.grad(actual.sum(), broken):
        assert grad.isfinite().all()
        assert not grad[:, :, 4:].any()


def test_proportional_scores_are_weighted_by_the_cosine_of_the_difference():
    (q, k, v), (p, s) = make_qkv(20), make_proportions(20)
    scores = (q @ k.mT) * torch.cos(math.pi / 2 * (p.unsqueeze(-1) - s.unsqueeze(-2)))
    scores = scores.tril()
    actual, _ = causal_proportional_attention(q, k, v, p, s)
    assert_close(actual, scores @ v / scores.sum(-1, keepdim=True))


def test_cosformer_and_plain_linear_attention_are_special_cases():
    q, k, v = make_qkv(20)
    fixed = (torch.arange(20, dtype=torch.double) + 1).div(20).expand(2, 3, 20)
    cosformer, _ = causal_linear_attention(positional(q, 20), positional(k, 20), v)
    assert_close(
        causal_proportional_attention(q, k, v, fixed, fixed)[0], cosformer, rtol=0, atol=1e-12
    )

    constant = torch.full_like(fixed, 0.3)
    plain, _ = causal_linear_attention(q, k, v)
    assert_close(
        causal_proportional_attention(q, k, v, constant, constant)[0], plain, rtol=0, atol=1e-12
    )


@pytest.mark.parametrize("normalise", [True, False])
def test_the_floor_of_the_normaliser_holds_in_value_and_gradient(normalise):
    """The authors' floor of 0.1 is one that real sums fall below."""
    qkv = make_qkv(20)
    scores = (qkv[0] @ qkv[1].mT).tril().sum(-1)
    eps = scores.median().item()
    expected = causal_linear_attention_reference(*qkv, eps=eps, normalise=normalise)
    actual, _ = causal_linear_attention(*qkv, eps=eps, normalise=normalise, chunk_size=8)
    assert_close(actual, expected)
    assert_same_gradients(actual, expected, qkv)


@pytest.mark.parametrize("normalise", [True, False])
def test_bidirectional_agrees_with_the_definition(normalise):
    q, _, _ = make_qkv(7)
    _, k, v = make_qkv(11, seed=3)
    expected = linear_attention_reference(q, k, v, normalise=normalise)
    actual = linear_attention(q, k, v, normalise=normalise)
    assert_close(actual, expected)
    assert_same_gradients(actual, expected, (q, k, v))


def test_the_future_is_invisible():
    qkv = make_qkv(20)
    before, _ = causal_linear_attention(*qkv, chunk_size=8)
    edited = tuple(x.detach().clone() for x in qkv)
    for x in edited:
        x[:, :, 13:] += 1
    after, _ = causal_linear_attention(*edited, chunk_size=8)
    assert torch.equal(before[:, :, :13], after[:, :, :13])
    assert not torch.equal(before[:, :, 13:], after[:, :, 13:])


# Re-weighting


def make_weights(length, rank, *, batch=2, heads=3, seed=4):
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, heads, length, rank)
    return tuple(
        torch.rand(shape, dtype=torch.double, generator=generator).requires_grad_() for _ in "xy"
    )


@pytest.mark.parametrize("gated", ["none", "head", "fade", "feature"])
@pytest.mark.parametrize("rank", [1, 2, 3, 5])
@pytest.mark.parametrize("length", [1, 2, 8, 9, 50])
def test_a_re_weighting_multiplies_scores_by_the_product_of_its_numbers(length, rank, gated):
    (q, k, v), (x, y) = make_qkv(length), make_weights(length, rank)
    weights = x @ y.mT
    sees = torch.ones(length, length).tril().bool()
    given, options = (q, k, v, x, y), {}
    if gated == "none":
        scores = (q @ k.mT) * weights
    elif gated == "fade":
        order = torch.arange(length)
        gap = (order[:, None] - order).clamp_min(0)
        scores = (q @ k.mT) * weights * torch.exp(torch.tensor(FADE)[:, None, None] * gap)
        options = {"fade": FADE}
    else:
        gate = make_gate(length, "head" if gated == "head" else 5)
        given, options = (*given, gate), {"log_gate": gate}
        total = (gate.unsqueeze(-1) if gate.ndim == 3 else gate).cumsum(2)
        left = (total.unsqueeze(3) - total.unsqueeze(2)).clamp_max(0).exp()
        scores = (q.unsqueeze(3) * k.unsqueeze(2) * left).sum(-1) * weights
    scores = scores.masked_fill(~sees, 0)
    expected = scores @ v / scores.sum(-1, keepdim=True)
    actual, state = causal_linear_attention(q, k, v, reweighting=(x, y), chunk_size=8, **options)
    assert_close(actual, expected)
    assert state.kv.shape[2] == rank * 5
    assert_same_gradients(actual, expected, given)

    split = length // 2
    parts = [x for x in options.values() if isinstance(x, torch.Tensor)]
    outputs, before = [], None
    for span in (slice(0, split), slice(split, None)):
        some = {"log_gate": parts[0][:, :, span]} if parts else options
        o, before = causal_linear_attention(
            *(z[:, :, span] for z in (q, k, v)),
            before,
            reweighting=(x[:, :, span], y[:, :, span]),
            chunk_size=8,
            **some,
        )
        outputs.append(o)
    assert_close(torch.cat(outputs, dim=2), actual)
    assert_close(before.tensors(), state.tensors())


@pytest.mark.parametrize(("t", "n"), [(3, 4), (300, 200)])
def test_a_whole_sequence_can_be_re_weighted_too(t, n):
    q, (_, k, v) = make_qkv(t)[0], make_qkv(n, seed=3)
    x, y = make_weights(t, 3)[0], make_weights(n, 3, seed=5)[1]
    expected = linear_attention_reference(widen(q, x), widen(k, y), v)
    actual = linear_attention(q, k, v, reweighting=(x, y))
    assert_close(actual, expected)
    assert_same_gradients(actual, expected, (q, k, v, x, y))
    visible = torch.arange(t).clamp_max(n)
    expected = staircase_linear_attention_reference(widen(q, x), widen(k, y), v, visible)
    actual = staircase_linear_attention(q, k, v, visible, reweighting=(x, y))
    assert_close(actual, expected)


# Gates


@pytest.mark.parametrize("width", ["head", 5])
@pytest.mark.parametrize("length", [1, 7, 8, 9, 20])
def test_gated_agrees_with_the_definition(length, width):
    qkv, gate = make_qkv(length), make_gate(length, width)
    per_feature = gate if gate.ndim == 4 else gate.unsqueeze(-1)
    expected = causal_linear_attention_reference(*qkv, log_gate=per_feature)
    actual, _ = causal_linear_attention(*qkv, log_gate=gate, chunk_size=8)
    assert_close(actual, expected)
    # The first gate fades nothing, so it has no gradient to compare.
    assert_same_gradients(actual, expected, (*qkv, gate))


@pytest.mark.parametrize("width", ["head", 5])
def test_a_gated_sequence_token_by_token_is_the_whole(width):
    qkv, gate = make_qkv(20), make_gate(20, width)
    whole, final = causal_linear_attention(*qkv, log_gate=gate, chunk_size=8)
    outputs, state = [], None
    for i in range(20):
        *token, g = cut((*qkv, gate), i, i + 1)
        o, state = causal_linear_attention(*token, state, log_gate=g)
        outputs.append(o)
    assert_close(torch.cat(outputs, dim=2), whole)
    assert_close(state.tensors(), final.tensors())


@pytest.mark.parametrize("width", ["head", 5])
def test_a_gate_of_one_changes_nothing(width):
    qkv = make_qkv(50)
    plain, _ = causal_linear_attention(*qkv)
    gate = torch.zeros_like(make_gate(50, width))
    gated, _ = causal_linear_attention(*qkv, log_gate=gate)
    assert_close(gated, plain, rtol=0, atol=1e-15)


@pytest.mark.parametrize("width", ["head", 5])
@pytest.mark.parametrize(("length", "level"), [(45, -2.0), (100, -3.0), (5, -30.0), (70, -90.0)])
def test_gates_that_forget_much_have_finite_gradients(length, level, width):
    inputs = make_qkv(length)
    gate = torch.full_like(make_gate(length, width), level).requires_grad_()
    o, state = causal_linear_attention(*inputs, log_gate=gate)
    per_feature = gate if gate.ndim == 4 else gate.unsqueeze(-1)
    expected = causal_linear_attention_reference(*inputs, log_gate=per_feature)
    assert_close(o, expected)
    assert_same_gradients(o, expected, (*inputs, gate))
    assert state.kv.isfinite().all()


def test_tokens_that_remember_are_exact_among_those_that_forget():
    """A sum of many large exponents would swallow the small ones in single precision."""
    qkv = make_qkv(200)
    gate = torch.where(torch.arange(200) % 4 == 0, -60.0, -0.01).double().expand(2, 3, 200)
    expected, _ = causal_linear_attention(*qkv, log_gate=gate)
    actual, _ = causal_linear_attention(*(x.float() for x in qkv), log_gate=gate.float())
    assert relative_error(actual, expected) < TOLERANCES[torch.float32].output


@pytest.mark.parametrize("width", ["head", 5])
@pytest.mark.parametrize("lowest", [-1e3, -math.inf])
def test_a_gate_that_forgets_everything_leaves_the_token_itself(width, lowest):
    q, k, v = (x.detach() for x in make_qkv(20))
    gate = torch.full_like(make_gate(20, width), lowest).requires_grad_()
    o, state = causal_linear_attention(q, k, v, log_gate=gate, chunk_size=8)
    assert_close(o, v)
    assert state.kv.isfinite().all()
    (gradient,) = torch.autograd.grad(o.sum(), gate)
    assert gradient.isfinite().all()


def test_a_gate_for_each_feature_fades_both_halves_of_a_proportional_one():
    (q, k, v), (p, s), gate = make_qkv(20), make_proportions(20), make_gate(20, 5)
    expected = causal_linear_attention_reference(
        proportional(q, p), proportional(k, s), v, log_gate=torch.cat([gate, gate], dim=-1)
    )
    actual, _ = causal_proportional_attention(q, k, v, p, s, log_gate=gate, chunk_size=8)
    assert_close(actual, expected)


def as_gate(fade, length):
    return torch.tensor(fade, dtype=torch.double).view(1, -1, 1).expand(2, -1, length)


@pytest.mark.parametrize("weighed", [False, True])
@pytest.mark.parametrize("length", [1, 7, 8, 9, 50])
def test_a_fade_is_a_gate_that_never_changes(length, weighed):
    inputs = make_qkv(length)
    attend = causal_linear_attention
    if weighed:
        inputs, attend = (*inputs, *make_proportions(length)), causal_proportional_attention
    expected, gated = attend(*inputs, log_gate=as_gate(FADE, length), chunk_size=8)
    actual, faded = attend(*inputs, fade=FADE, chunk_size=8)
    assert_close(actual, expected)
    assert_close(faded.tensors(), gated.tensors())
    assert_same_gradients(actual, expected, inputs)


def test_a_fade_goes_through_long_sequences_in_single_precision():
    inputs = *make_qkv(2500), *make_proportions(2500)
    expected, gated = causal_proportional_attention(*inputs, log_gate=as_gate(FADE, 2500))
    actual, faded = causal_proportional_attention(*(x.float() for x in inputs), fade=FADE)
    assert relative_error(actual, expected) < TOLERANCES[torch.float32].output
    assert relative_error(faded.kv, gated.kv) < TOLERANCES[torch.float32].output


@pytest.mark.parametrize("split", [1, 8, 13, 19])
def test_a_sequence_that_fades_can_be_cut_anywhere(check_cut, split):
    inputs = *make_qkv(20), *make_proportions(20)

    def attend(q, k, v, p, s, state=None):
        return causal_proportional_attention(q, k, v, p, s, state, fade=FADE, chunk_size=8)

    check_cut(attend, inputs, split, "kv")


def test_pads_do_not_fade():
    inputs = *make_qkv(12), *make_proportions(12)
    mask = torch.ones(2, 12, dtype=torch.bool)
    mask[:, 5:8] = False
    kept = [torch.cat([x[:, :, :5], x[:, :, 8:]], dim=2) for x in inputs]
    expected, final = causal_proportional_attention(*kept, fade=FADE)
    actual, state = causal_proportional_attention(*inputs, key_mask=mask, fade=FADE)
    assert_close(actual[:, :, mask[0]], expected)
    assert_close(state.tensors(), final.tensors())


def test_a_fade_comes_on_top_of_gates():
    qkv, gate = make_qkv(20), make_gate(20, 5)
    expected, _ = causal_linear_attention(*qkv, log_gate=gate + as_gate(FADE, 20)[..., None])
    actual, _ = causal_linear_attention(*qkv, log_gate=gate, fade=FADE)
    assert_close(actual, expected)


# The state


@pytest.mark.parametrize("split", [0, 1, 8, 13, 19, 20])
@pytest.mark.parametrize("gated", [False, True])
def test_a_sequence_can_be_cut_anywhere(check_cut, split, gated):
    inputs = (*make_qkv(20), *make_proportions(20), make_gate(20, "head"))

    def attend(q, k, v, p, s, gate, state=None):
        log_gate = gate if gated else None
        return causal_proportional_attention(q, k, v, p, s, state, log_gate=log_gate, chunk_size=8)

    check_cut(attend, inputs, split, "kv", used=inputs if gated else inputs[:-1])


def test_gradients_flow_in_and_out_of_the_state():
    q, k, v = make_qkv(9, features=2, values=2, heads=1)
    kv = torch.rand(2, 1, 2, 2, dtype=torch.double, requires_grad=True)
    k_sum = torch.rand(2, 1, 2, dtype=torch.double, requires_grad=True)

    def attend(q, k, v, kv, k_sum):
        state = LinearState(kv=kv, k=k_sum, length=torch.zeros(2, dtype=torch.long))
        o, after = causal_linear_attention(q, k, v, state, chunk_size=4)
        return o, after.kv, after.k

    assert torch.autograd.gradcheck(attend, (q, k, v, kv, k_sum))


def test_gradients_of_any_layout_come_in_through_the_state():
    q, k, v = make_qkv(9)
    upstream = torch.randn(3, 2, 3, 5, dtype=torch.double).permute(1, 0, 3, 2)
    assert not upstream.is_contiguous()
    start = torch.zeros(2, 3, 5, 3, dtype=torch.double, requires_grad=True)
    before = LinearState.empty(2, 3, 5, 3)
    _, state = causal_linear_attention(q, k, v, replace(before, kv=start), chunk_size=4)
    expected = torch.autograd.grad(start + k.mT @ v, (start, k, v), upstream)
    assert_close(torch.autograd.grad(state.kv, (start, k, v), upstream), expected)


def test_gradcheck_with_proportions():
    (q, k, v), (p, s) = make_qkv(9, features=2, values=2, heads=1), make_proportions(9, heads=1)
    assert torch.autograd.gradcheck(
        lambda *x: causal_proportional_attention(*x, chunk_size=4)[0], (q, k, v, p, s)
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_state_is_of_fixed_size_and_full_precision(dtype):
    sizes = set()
    for length in (1, 5, 100):
        _, state = causal_linear_attention(*make_qkv(length, dtype=dtype))
        assert state.kv.dtype == state.k.dtype == torch.float64
        assert state.length.tolist() == [length, length]
        sizes.add(state.n_bytes)
    assert len(sizes) == 1


def alike(n, heads=1):
    """Tokens that are all the same: their sums round the same way again and again."""
    q, k = torch.full((1, heads, n, 2), 0.7), torch.tensor([0.3, 0.9]).expand(1, heads, n, 2)
    return q, k, torch.tensor([0.77, 0.11]).expand(1, heads, n, 2)


def assert_sums_of(state, n):
    _, k, v = (x[0, 0, 0].double() for x in alike(1))
    assert state.length.tolist() == [n]
    assert_close(state.k, (n * k).expand_as(state.k), rtol=1e-5, atol=0)
    assert_close(state.kv, (n * torch.outer(k, v)).expand_as(state.kv), rtol=1e-5, atol=0)


@pytest.mark.parametrize("n_at_once", [1, 8])
def test_sums_do_not_drift_over_a_million_tokens_read_a_few_at_a_time(n_at_once):
    o, state = causal_linear_attention(*alike(n_at_once))
    while state.length < 2**20:
        state = state.merge(state)
    for _ in range(2000):
        o, state = causal_linear_attention(*alike(n_at_once), state)
    assert_sums_of(state, 2**20 + 2000 * n_at_once)
    assert_close(o, alike(n_at_once)[2], rtol=1e-5, atol=0)


def test_sums_do_not_drift_over_many_chunks():
    n = 2**18
    o, state = causal_linear_attention(*alike(n))
    assert_sums_of(state, n)
    assert_close(o, alike(n)[2], rtol=1e-5, atol=0)


@pytest.mark.parametrize("n_query", [1, 8], ids=["by-scores", "by-a-state"])
def test_sums_over_a_source_of_a_million_tokens_are_exact(n_query):
    heads = 8 if n_query > 1 else 1
    o, state = read_and_attend(alike(n_query, heads)[0], *alike(1_000_000, heads)[1:])
    assert_sums_of(state, 1_000_000)
    assert_close(o, alike(n_query, heads)[2], rtol=1e-5, atol=0)


def test_sums_of_tokens_that_are_only_read_are_exact():
    _, k, v = alike(1_000_000)
    assert_sums_of(LinearState.empty(1, 1, 2, 2).advance(k=k, v=v), 1_000_000)


def test_sums_are_exact_under_transforms_too():
    def read(q):
        return read_and_attend(q, *alike(1_000_000)[1:])[1].tensors()

    found = torch.func.vmap(read)(alike(8)[0].unsqueeze(0))
    assert_sums_of(LinearState(**{name: x[0] for name, x in found.items()}), 1_000_000)


# Pads and packing


@pytest.mark.parametrize("where", ["left", "right", "holes"])
@pytest.mark.parametrize("gated", [False, True])
def test_pads_change_nothing_for_real_tokens(padded_to_17, gated):
    inputs = (*make_qkv(12), *make_proportions(12), make_gate(12, 5))
    real, mask = padded_to_17

    def attend(q, k, v, p, s, gate, key_mask=None):
        log_gate = gate if gated else None
        return causal_proportional_attention(
            q, k, v, p, s, key_mask=key_mask, log_gate=log_gate, chunk_size=8
        )

    padded = tuple(
        x.new_full((*x.shape[:2], 17, *x.shape[3:]), 1e3).index_copy(2, real, x) for x in inputs
    )
    padded[2].data[:, :, ~mask[0]] = math.nan  # A pad's value may be anything at all.
    expected, final = attend(*inputs)
    actual, state = attend(*padded, key_mask=mask)
    assert_close(actual[:, :, real], expected)
    assert_close(state.tensors(), final.tensors())
    assert_same_gradients(actual[:, :, real], expected, inputs if gated else inputs[:-1])


def test_masked_keys_are_not_there_in_the_bidirectional_form():
    q, k, v = make_qkv(12)
    mask = torch.rand(2, 12) < 0.5
    expected = linear_attention_reference(q, k, v, sees=mask[:, None, None, :])
    actual = linear_attention(q, k, v, key_mask=mask)
    assert_close(actual, expected)
    assert_same_gradients(actual, expected, (q, k, v))


@pytest.mark.parametrize("gated", [False, True])
def test_packed_sequences_do_not_see_each_other(gated):
    lengths = [3, 1, 0, 20, 9, 3]
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    t = sum(lengths)
    inputs = (*make_qkv(t, batch=1), *make_proportions(t, batch=1), make_gate(t, 5, batch=1))

    def attend(q, k, v, p, s, gate, state=None, **options):
        log_gate = gate if gated else None
        return causal_proportional_attention(
            q, k, v, p, s, state, log_gate=log_gate, chunk_size=8, **options
        )

    packed, states = attend(*inputs, cu_seqlens=bounds)
    pieces, finals = zip(
        *(attend(*cut(inputs, *span)) for span in bounds.unfold(0, 2, 1).tolist()), strict=True
    )
    expected = torch.cat(pieces, dim=2)
    assert_close(packed, expected)
    assert_close(states.kv, torch.cat([final.kv for final in finals]))
    assert states.length.tolist() == lengths
    assert_same_gradients(packed, expected, inputs if gated else inputs[:-1])

    again, _ = attend(*inputs, states, cu_seqlens=bounds)
    alone, _ = attend(*cut(inputs, 4, 24), finals[3])
    assert_close(again[:, :, 4:24], alone)


def test_packed_sequences_may_hold_pads():
    qkv = make_qkv(9, batch=1)
    mask = torch.tensor([[True, False, True, True, True, False, True, True, True]])
    packed, _ = causal_linear_attention(*qkv, cu_seqlens=torch.tensor([0, 4, 9]), key_mask=mask)
    alone, _ = causal_linear_attention(*cut(qkv, 4, 9), key_mask=mask[:, 4:])
    assert_close(packed[:, :, 4:], alone)


# Layout, precision, extremes


def test_inputs_need_not_be_contiguous():
    qkv = make_qkv(20)
    strided = tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in qkv)
    assert not strided[0].is_contiguous()
    assert_close(causal_linear_attention(*strided)[0], causal_linear_attention(*qkv)[0])
    spread = tuple(torch.stack([x, x], dim=-1)[..., 0] for x in qkv)
    assert_close(causal_linear_attention(*spread)[0], causal_linear_attention(*qkv)[0])


def test_more_rows_than_are_taken_at_once():
    qkv = make_qkv(9, batch=50, heads=3)
    expected = causal_linear_attention_reference(*qkv)
    actual, _ = causal_linear_attention(*qkv, chunk_size=4)
    assert_close(actual, expected)
    assert_same_gradients(actual, expected, qkv)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("length", [100, 5000])
def test_every_dtype_keeps_within_the_published_tolerance(dtype, length):
    """In float16 a denominator held in the inputs' dtype would be wrong from 2,048 tokens on."""
    exact = make_qkv(length, batch=1, heads=1, features=8)
    p, s = make_proportions(length, batch=1, heads=1)
    rounded = tuple(x.detach().to(dtype).requires_grad_() for x in (*exact, p, s))
    exact = tuple(x.detach().double().requires_grad_() for x in rounded)
    upstream = torch.randn(exact[2].shape, dtype=torch.double).to(dtype)

    expected, _ = causal_proportional_attention(*exact)
    actual, _ = causal_proportional_attention(*rounded)
    assert actual.dtype == dtype
    assert relative_error(actual, expected) <= TOLERANCES[dtype].output

    gradients = torch.autograd.grad(actual, rounded, upstream)
    references = torch.autograd.grad(expected, exact, upstream.double())
    for name, gradient, reference in zip("qkvps", gradients, references, strict=True):
        assert gradient.dtype == dtype
        assert relative_error(gradient, reference) <= TOLERANCES[dtype].gradient, name


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_large_denominators_do_not_spoil_half_precision_gradients(dtype):
    """Squared in float16, as a well-known library does, these denominators overflow."""
    exact = tuple(x.detach() * 30 for x in make_qkv(500, batch=1, heads=1, features=16))
    rounded = tuple(x.to(dtype).requires_grad_() for x in exact)
    exact = tuple(x.detach().double().requires_grad_() for x in rounded)
    expected, _ = causal_linear_attention(*exact)
    actual, _ = causal_linear_attention(*rounded)
    for gradient, reference in zip(
        torch.autograd.grad(actual.double().square().sum(), rounded),
        torch.autograd.grad(expected.square().sum(), exact),
        strict=True,
    ):
        assert relative_error(gradient, reference) <= 2 * TOLERANCES[dtype].gradient


def test_a_query_that_matches_no_key_gets_zeros_rather_than_nans():
    q, k, v = make_qkv(20)
    nothing = torch.zeros_like(q, requires_grad=True)
    for o in (
        causal_linear_attention(nothing, k, v)[0],
        linear_attention(nothing, k, v),
        linear_attention(q, k, v, key_mask=torch.zeros(2, 20, dtype=torch.bool)),
    ):
        assert torch.equal(o, torch.zeros_like(o))
        gradients = torch.autograd.grad(o.sum(), (nothing, q, k, v), allow_unused=True)
        assert all(x is None or x.isfinite().all() for x in gradients)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_query_that_matches_no_key_has_no_gradient(dtype):
    """The gradient of 0 / eps would be infinite in float16, and 0 times that is no number."""
    x, k, v = (x.detach().to(dtype) for x in make_qkv(20))
    p = torch.rand(2, 3, 20).to(dtype).requires_grad_()
    x[:, :, 5:9] = -1
    x.requires_grad_()
    q = proportional(x.relu(), p)
    key, mask = proportional(k, p.detach()), torch.ones(2, 20, dtype=torch.bool)
    visible = torch.arange(20) + 1
    for o in (
        causal_linear_attention(q, key, v)[0],
        causal_linear_attention(q, key, v, log_gate=-torch.rand(2, 3, 20))[0],
        causal_proportional_attention(x.relu(), k, v, p, p.detach())[0],
        linear_attention(q, key, v, key_mask=mask),
        staircase_linear_attention(q, key, v, visible),
    ):
        for gradient in torch.autograd.grad(o.sum(), (x, p), retain_graph=True):
            assert gradient.isfinite().all()
            assert torch.equal(gradient[:, :, 5:9], torch.zeros_like(gradient[:, :, 5:9]))


magnitudes = st.sampled_from([0.0, 1e-18, 1e-9, 1e-3, 1.0, 1e3, 1e9, 1e15])


@given(q=magnitudes, k=magnitudes, v=magnitudes, constant=st.booleans(), seed=st.integers(0, 9))
def test_no_finite_input_gives_nan_or_infinity(q, k, v, constant, seed):
    options = {"batch": 1, "heads": 2, "seed": seed, "dtype": torch.float32}
    inputs = make_qkv(17, **options)
    if constant:
        inputs = tuple(torch.ones_like(x) for x in inputs)
    scaled = [(x.detach() * m).requires_grad_() for x, m in zip(inputs, (q, k, v), strict=True)]
    for o in (
        causal_linear_attention(*scaled, chunk_size=8)[0],
        causal_linear_attention(*scaled, log_gate=torch.full((1, 2, 17), -0.1), chunk_size=8)[0],
        linear_attention(*scaled),
        staircase_linear_attention(*scaled, torch.arange(17) // 2),
    ):
        assert o.isfinite().all()
        # A weighted mean lies among its values (or between them and 0, where the floor holds).
        assert o.abs().max() <= scaled[2].abs().max() * (1 + 1e-5)
        for gradient in torch.autograd.grad(o.sum(), scaled):
            assert gradient.isfinite().all()


def test_scaling_a_query_changes_no_digit():
    q, k, v = make_qkv(20, dtype=torch.float32)
    expected, _ = causal_linear_attention(q, k, v, eps=1e-30)
    scaled, _ = causal_linear_attention(q * 2.0**40, k, v, eps=1e-30)
    assert torch.equal(scaled, expected)


@pytest.mark.parametrize("t", [50, 150], ids=["square", "chunks"])
def test_autocast_rounds_nothing(t):
    qkv, ps = make_qkv(t, dtype=torch.float32), make_proportions(t, dtype=torch.float32)
    gate, visible = -torch.rand(2, 3, t), torch.arange(t) + 1

    def every(q, k, v, p, s):
        o, state = causal_proportional_attention(q, k, v, p, s)
        return (
            o,
            state.kv,
            causal_linear_attention(q, k, v, log_gate=gate)[0],
            linear_attention(q, k, v),
            staircase_linear_attention(q, k, v, visible),
        )

    expected = every(*qkv, *ps)
    with torch.autocast("cpu", torch.bfloat16):
        actual = every(*qkv, *ps)
    expected, actual = (
        (*each, *torch.autograd.grad(each[0].square().sum(), (*qkv, *ps)))
        for each in (expected, actual)
    )
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def test_extreme_proportions_never_make_a_score_negative():
    """cos(pi/2) is -4e-8 in single precision, and 1e15 of that would be no small thing."""
    q = k = v = torch.full((1, 1, 3, 2), 1e15, requires_grad=True)
    p, s = torch.ones(1, 1, 3), torch.zeros(1, 1, 3)
    o, _ = causal_proportional_attention(q, k, v, p, s)
    assert o.isfinite().all()
    assert (o >= 0).all()


def test_results_are_bit_equal_from_run_to_run():
    runs = []
    for _ in range(2):
        inputs = (*make_qkv(100, dtype=torch.float32), *make_proportions(100, dtype=torch.float32))
        o, _ = causal_proportional_attention(*inputs)
        runs.append((o, *torch.autograd.grad(o.square().sum(), inputs)))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize("gated", [False, True])
def test_compiled_gives_the_same_numbers(gated, shapes_unchecked):
    inputs = (*make_qkv(20), *make_proportions(20), make_gate(20, "head"))

    def attend(q, k, v, p, s, gate):
        log_gate = gate if gated else None
        first, state = causal_proportional_attention(
            *cut((q, k, v, p, s), 9),
            log_gate=gate[:, :, :9] if gated else None,
            chunk_size=4,
        )
        second, state = causal_proportional_attention(
            *cut((q, k, v, p, s), 9, None),
            state,
            log_gate=log_gate[:, :, 9:] if gated else None,
            chunk_size=4,
        )
        return torch.cat([first, second], dim=2), state.kv

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    expected, kv = attend(*inputs)
    actual, compiled_kv = compiled(*inputs)
    assert_close((actual, compiled_kv), (expected, kv))
    assert_same_gradients(actual, expected, inputs if gated else inputs[:-1])


def side_by_side(x):
    """The same numbers, the heads of a token beside each other, as a projection leaves them."""
    return x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()


@pytest.mark.parametrize("lay", [lambda x: x, side_by_side], ids=["apart", "side-by-side"])
@pytest.mark.parametrize("proportions", [True, False])
def test_the_compiler_finds_nothing_wrong_with_the_custom_ops(lay, proportions, shapes_unchecked):
    q, k, v = map(lay, make_qkv(20))
    x, y = (
        (lay(cosine(p).detach().requires_grad_()) for p in make_proportions(20))
        if proportions
        else (None, None)
    )
    f = q.shape[-1] * (2 if proportions else 1)
    kv, k_sum = (torch.rand(2, 3, *n, dtype=torch.double) for n in ((f, 3), (f,)))
    before = kv.requires_grad_(), k_sum.requires_grad_()
    mask = torch.rand(2, 1, 20, 1) < 0.7
    gate = lay(make_gate(20, "head"))
    for fading in ((None, None), (None, [-0.1, -0.2, -0.3]), (gate, None)):
        torch.library.opcheck(chunked.attend, (q, k, v, x, y, *fading, *before, 8, True, 1e-6))
    torch.library.opcheck(whole.attend, (q, k, v, x, y, mask, torch.double, True, 1e-6))


def test_heads_side_by_side_stay_so():
    q, k, v = map(side_by_side, make_qkv(20, values=5))
    for o in (linear_attention(q, k, v), causal_linear_attention(q, k, v, chunk_size=8)[0]):
        assert o.transpose(1, 2).is_contiguous()
        grads = torch.autograd.grad(o.sum(), (q, k, v))
        assert all(x.transpose(1, 2).is_contiguous() for x in grads)


# Bad input


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.rand(2, 3, 20, 4)}, r"q is \[2, 3, 20, 4\] and k is \[2, 3, 20, 5\].*axis 3"),
        ({"v": torch.rand(2, 3, 19, 3)}, r"k is \[2, 3, 20, 5\] and v is \[2, 3, 19, 3\].*axis 2"),
        ({"q": torch.rand(2, 3, 19, 5)}, r"axis 2 \(t\)"),
        ({"q": torch.rand(3, 20, 5)}, r"q is \[3, 20, 5\]; expected axes"),
        ({"k": torch.ones(2, 3, 20, 5, dtype=torch.long)}, r"k has dtype torch.int64.*k.float"),
        ({"key_mask": torch.ones(2, 20)}, r"key_mask has dtype torch.float32; expected bool"),
        ({"key_mask": torch.ones(2, 19).bool()}, r"key_mask is \[2, 19\].*must be \[2, 20\]"),
        ({"chunk_size": 0}, r"chunk_size=0"),
        ({"log_gate": torch.zeros(2, 3, 20, 4)}, r"log_gate is \[2, 3, 20, 4\]"),
        ({"fade": (-1.0, 2.0, 0.0)}, r"fade=.* must hold 3 rates of at most 0"),
        ({"fade": (-1.0, 0.0)}, r"fade=.* must hold 3 rates"),
        ({"cu_seqlens": torch.tensor([0, 20])}, r"the batch is 2"),
        ({"state": "empty"}, r"state is a str"),
        ({"state": LinearState.empty(2, 3, 5, 4)}, r"state.kv is \[2, 3, 5, 4\].*\[2, 3, 5, 3\]"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_bad_input_is_named(change, message, shapes_unchecked):
    q, k, v = make_qkv(20, dtype=torch.float32)
    with pytest.raises(InputError, match=message):
        causal_linear_attention(**({"q": q, "k": k, "v": v} | change))


@pytest.mark.parametrize("bounds", [[1, 20], [0, 19], [0, 12, 7, 20], [20]])
def test_bounds_that_do_not_cut_up_the_tokens_are_named(bounds, shapes_unchecked):
    with pytest.raises(InputError, match="cu_seqlens"):
        causal_linear_attention(*make_qkv(20, batch=1), cu_seqlens=torch.tensor(bounds))
