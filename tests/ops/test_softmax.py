import math
from itertools import pairwise

import pytest
import torch
from torch.testing import assert_close

from leap.errors import InputError
from leap.ops.softmax import (
    SoftmaxState,
    causal_softmax_attention,
    softmax_attention,
    softmax_attention_reference,
)
from leap.ops.state import load_state

LENGTH = 9


def make_qkv(t=LENGTH, n=None, *, seed=0):
    options = {"dtype": torch.double, "generator": torch.Generator().manual_seed(seed)}
    shapes = [(2, 3, t, 4), (2, 3, n or t, 4), (2, 3, n or t, 5)]
    return tuple(torch.randn(shape, **options).requires_grad_() for shape in shapes)


def definition(q, k, v, sees):
    """The formula, with `sees` true where query i sees key j; a query that sees none gets 0."""
    weights = (q @ k.mT / math.sqrt(q.shape[-1])).exp() * sees
    return weights @ v / weights.sum(-1, keepdim=True).clamp_min(1e-300)


def assert_same_with_gradients(actual, expected, inputs):
    assert_close(actual, expected)
    upstream = torch.randn_like(expected)
    assert_close(
        torch.autograd.grad(actual, inputs, upstream, retain_graph=True),
        torch.autograd.grad(expected, inputs, upstream, retain_graph=True),
    )


def causal_sight(t):
    return torch.ones(t, t).tril()


def test_agrees_with_the_definition():
    qkv = make_qkv(5, 7)
    assert_same_with_gradients(softmax_attention(*qkv), definition(*qkv, torch.ones(5, 7)), qkv)
    qkv = make_qkv()
    actual, _ = causal_softmax_attention(*qkv)
    assert_same_with_gradients(actual, definition(*qkv, causal_sight(LENGTH)), qkv)


def test_the_reference_gives_the_same_wherever_a_query_sees_a_key():
    qkv = make_qkv(5, 7)
    masks = {
        "key_mask": torch.tensor([[1, 0, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1, 1]]).bool(),
        "visible": torch.tensor([1, 3, 3, 6, 7]),
    }
    for given in ({}, masks):
        expected = softmax_attention(*qkv, **given)
        assert_same_with_gradients(softmax_attention_reference(*qkv, **given), expected, qkv)
    nothing = softmax_attention_reference(*qkv, key_mask=torch.zeros(2, 7).bool())
    assert_close(nothing, qkv[2].mean(dim=2, keepdim=True).expand_as(nothing))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("cut", [0, 1, 4, LENGTH])
def test_a_sequence_can_be_cut_anywhere(cut, masked):
    qkv = make_qkv()
    mask = torch.rand(2, LENGTH) < 0.7 if masked else None
    whole, final = causal_softmax_attention(*qkv, key_mask=mask)
    masks = (None, None) if mask is None else (mask[:, :cut], mask[:, cut:])
    head, state = causal_softmax_attention(*(x[:, :, :cut] for x in qkv), key_mask=masks[0])
    tail, resumed = causal_softmax_attention(
        *(x[:, :, cut:] for x in qkv), state, key_mask=masks[1]
    )
    assert_same_with_gradients(torch.cat([head, tail], dim=2), whole, qkv)
    assert_close(resumed.tensors(), final.tensors())


def test_pads_anywhere_change_nothing_and_are_not_counted():
    qkv = make_qkv()
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1], [1, 0, 1, 1, 0, 0, 1, 0, 0]]).bool()
    padded, state = causal_softmax_attention(*qkv, key_mask=mask)
    for row in range(2):
        alone, _ = causal_softmax_attention(*(x[row : row + 1, :, mask[row]] for x in qkv))
        assert_same_with_gradients(padded[row : row + 1, :, mask[row]], alone, qkv)
    assert state.length.tolist() == [7, 4]


def test_a_query_that_sees_no_key_gets_zeros_and_finite_gradients():
    qkv = make_qkv()
    mask = torch.zeros(2, LENGTH, dtype=torch.bool)
    for o in (
        causal_softmax_attention(*qkv, key_mask=mask)[0],
        softmax_attention(*qkv, key_mask=mask),
        softmax_attention(*qkv, visible=torch.zeros(LENGTH, dtype=torch.long)),
    ):
        assert_close(o, torch.zeros_like(o))
        assert all(g.isfinite().all() for g in torch.autograd.grad(o.sum(), qkv))


def test_a_schedule_shows_the_first_keys():
    qkv = make_qkv(4, 7)
    visible = torch.tensor([[0, 2, 2, 7], [1, 3, 5, 6]])
    sees = (torch.arange(7) < visible.unsqueeze(-1)).unsqueeze(1)
    actual = softmax_attention(*qkv, visible=visible)
    assert_same_with_gradients(actual, definition(*qkv, sees), qkv)
    assert_close(softmax_attention(*qkv, visible=visible[0])[0], actual[0])


@pytest.mark.parametrize("window", [1, 3, 7])
@pytest.mark.parametrize("scheduled", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_a_window_shows_the_last_real_keys_of_those_visible(window, scheduled, masked):
    qkv = make_qkv(4, 7)
    real = torch.tensor([[1, 1, 1, 1, 1, 1, 1], [1, 0, 1, 1, 1, 0, 0]]).bool()
    visible = torch.tensor([[0, 2, 5, 7], [1, 4, 6, 6]])
    given = {"key_mask": real} if masked else {}
    given |= {"visible": visible} if scheduled else {}
    sees = torch.zeros(2, 1, 4, 7, dtype=torch.bool)
    for row in range(2):
        for i in range(4):
            n_visible = int(visible[row, i]) if scheduled else 7
            keys = [j for j in range(n_visible) if not masked or real[row, j]]
            sees[row, 0, i, keys[-window:]] = True
    actual = softmax_attention(*qkv, window=window, **given)
    assert_same_with_gradients(actual, definition(*qkv, sees), qkv)
    if not scheduled:  # the first query of the schedule sees no key
        reference = softmax_attention_reference(*qkv, window=window, **given)
        assert_same_with_gradients(reference, actual, qkv)


@pytest.mark.parametrize("masked", [False, True])
def test_a_state_can_keep_the_last_tokens_alone(masked):
    q, k, v = make_qkv()
    mask = torch.tensor([[1] * 9, [1, 0, 1, 1, 0, 0, 1, 0, 1]]).bool() if masked else None
    state = SoftmaxState.empty(k, v)
    for i in range(LENGTH):
        token = slice(i, i + 1)
        key_mask = None if mask is None else mask[:, token]
        state = state.advance(k=k[:, :, token], v=v[:, :, token], key_mask=key_mask).last(3)
    expected = softmax_attention(q, k, v, key_mask=mask, window=3)
    assert_close(softmax_attention(q, state.k, state.v, key_mask=state.mask), expected)
    assert state.length.tolist() == [9, 5 if masked else 9]
    assert state.places[:, -3:].tolist()[0] == [7, 8, 9]
    if not masked:
        assert state.k.shape[2] == 3
    assert_close(state.rollback(0).tensors(), state.tensors())
    with pytest.raises(InputError, match="cannot take back 1 tokens: the state has forgotten"):
        state.rollback(1)

    early, late = (
        SoftmaxState.empty(k, v).advance(k=k[:, :, part], v=v[:, :, part]).last(3)
        for part in (slice(4), slice(4, None))
    )
    merged = early.merge(late)
    assert merged.length.tolist() == [9, 9]
    assert_close(merged.last(3).k, k[:, :, -3:])


def test_what_is_dropped_is_not_kept_in_memory():
    _, k, v = make_qkv(500)
    state = SoftmaxState.empty(k, v).advance(k=k, v=v)
    for smaller in (state.last(3), state.without_values()):
        assert smaller.k.untyped_storage().nbytes() == smaller.k.numel() * 8
        assert smaller.v.untyped_storage().nbytes() == smaller.v.numel() * 8


def test_rows_together_have_no_more_pads_than_the_longest_asks_for():
    _, k, v = make_qkv()
    mask = torch.tensor([[0] * 6 + [1] * 3, [0] * 4 + [1, 0, 0, 1, 0]]).bool()
    state = SoftmaxState.empty(k, v).advance(k=k, v=v, key_mask=mask)
    joined = state.concat([state.select(torch.tensor([1]))])
    assert joined.k.shape[2] == 3
    assert joined.length.tolist() == [3, 2, 2]
    assert_close(joined.k[0], k[0, :, 6:])
    assert_close(joined.k[2, :, 1:], k[1][:, [4, 7]])


def test_packed_sequences_are_as_if_alone():
    lengths = [3, 1, 5, 0]
    qkv = tuple(x[:1] for x in make_qkv())
    bounds = torch.tensor([0, 3, 4, 9, 9])
    packed, state = causal_softmax_attention(*qkv, cu_seqlens=bounds)
    again, after = causal_softmax_attention(*qkv, state, cu_seqlens=bounds)
    assert state.length.tolist() == lengths
    for start, end in pairwise(bounds):
        alone, past = causal_softmax_attention(*(x[:, :, start:end] for x in qkv))
        assert_close(packed[:, :, start:end], alone)
        if end > start:
            twice, _ = causal_softmax_attention(*(x[:, :, start:end] for x in qkv), past)
            assert_close(again[:, :, start:end], twice)
    shorter = after.rollback(2)
    assert_close(shorter.k[0, :, -1:], qkv[1][0, :, :1])
    assert_close(shorter.k[2, :, -3:], qkv[1][0, :, 4:7])


def test_the_last_tokens_can_be_taken_back():
    qkv, (q, k, v) = make_qkv(), make_qkv(4, seed=1)
    mask, pads = torch.rand(2, LENGTH) < 0.7, torch.tensor([[1, 0, 0, 1], [1, 1, 1, 1]]).bool()
    _, state = causal_softmax_attention(*qkv, key_mask=mask)
    for key_mask in (None, pads):
        _, longer = causal_softmax_attention(q, k, v, state.record(), key_mask=key_mask)
        assert_close(longer.rollback(4).tensors(), state.tensors())
    with pytest.raises(InputError, match="cannot take back 14 tokens, 13 are kept"):
        longer.rollback(14)


def test_states_of_two_halves_merge_into_that_of_the_whole():
    qkv = make_qkv()
    _, whole = causal_softmax_attention(*qkv)
    _, first = causal_softmax_attention(*(x[:, :, :4] for x in qkv))
    _, second = causal_softmax_attention(*(x[:, :, 4:] for x in qkv))
    assert_close(first.merge(second).tensors(), whole.tensors())


def test_a_state_is_saved_and_loaded(tmp_path):
    _, state = causal_softmax_attention(*make_qkv())
    state.save(tmp_path / "state")
    loaded = load_state(tmp_path / "state")
    assert isinstance(loaded, SoftmaxState)
    assert_close(loaded.tensors(), state.tensors())


# Gates


def make_gate(t=LENGTH, *, seed=5):
    options = {"dtype": torch.double, "generator": torch.Generator().manual_seed(seed)}
    return (-2 * torch.rand(2, 3, t, **options)).requires_grad_()


def forgetting(q, k, v, log_gate):
    """The Forgetting Transformer's formula: what is gone between a key and a query, off scores."""
    total = log_gate.cumsum(-1)
    bias = total.unsqueeze(-1) - total.unsqueeze(-2)
    scores = q @ k.mT / math.sqrt(q.shape[-1]) + bias
    hidden = causal_sight(q.shape[2]) == 0
    return scores.masked_fill(hidden, -math.inf).softmax(-1) @ v


@pytest.mark.parametrize("t", range(1, 10))
def test_gates_agree_with_the_definition(t):
    qkv, gate = make_qkv(t), make_gate(t)
    actual, state = causal_softmax_attention(*qkv, log_gate=gate)
    assert_same_with_gradients(actual, forgetting(*qkv, gate), (*qkv, gate))
    assert_close(state.log_gate, gate)


def test_gates_of_one_forget_nothing_and_those_of_alibi_are_slopes():
    qkv = make_qkv()
    plain, _ = causal_softmax_attention(*qkv)
    ones, _ = causal_softmax_attention(*qkv, log_gate=torch.zeros(2, 3, LENGTH).double())
    assert_close(ones, plain)
    slopes = torch.tensor([0.5, 0.1, 0.02])
    faded, _ = causal_softmax_attention(*qkv, slopes=slopes)
    gate = -slopes.double()[None, :, None].expand(2, 3, LENGTH)
    assert_close(causal_softmax_attention(*qkv, log_gate=gate)[0], faded, rtol=1e-6, atol=1e-6)
    both, _ = causal_softmax_attention(*qkv, slopes=slopes, log_gate=gate)
    twice, _ = causal_softmax_attention(*qkv, slopes=2 * slopes)
    assert_close(both, twice, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("cut", range(LENGTH + 1))
def test_a_gated_sequence_can_be_cut_anywhere_and_its_halves_merged(cut, masked):
    inputs = (*make_qkv(), make_gate())
    mask = torch.tensor([[0, 0, 1, 1, 0, 1, 1, 1, 1], [1, 0, 1, 1, 0, 0, 1, 0, 0]]).bool()
    masks = (mask, mask[:, :cut], mask[:, cut:]) if masked else (None, None, None)

    def attend(q, k, v, gate, state=None, *, key_mask):
        return causal_softmax_attention(q, k, v, state, log_gate=gate, key_mask=key_mask)

    whole, final = attend(*inputs, key_mask=masks[0])
    head, state = attend(*(x[:, :, :cut] for x in inputs), key_mask=masks[1])
    later = tuple(x[:, :, cut:] for x in inputs)
    tail, resumed = attend(*later, state, key_mask=masks[2])
    assert_same_with_gradients(torch.cat([head, tail], dim=2), whole, inputs)
    assert_close(resumed.tensors(), final.tensors())
    _, apart = attend(*later, key_mask=masks[2])
    assert_close(state.merge(apart).tensors(), final.tensors())
    assert_close(resumed.rollback(LENGTH - cut).tensors(), state.tensors())


def test_gates_of_pads_count_for_nothing():
    inputs = (*make_qkv(), make_gate())
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1], [1, 0, 1, 1, 0, 0, 1, 0, 0]]).bool()
    q, k, v, gate = inputs
    padded, state = causal_softmax_attention(q, k, v, log_gate=gate, key_mask=mask)
    _, other = causal_softmax_attention(
        q, k, v, log_gate=gate.masked_fill(~mask[:, None], torch.nan), key_mask=mask
    )
    assert_close(other.tensors(), state.tensors())
    for row in range(2):
        alone = forgetting(*(x[row : row + 1, :, mask[row]] for x in inputs))
        assert_same_with_gradients(padded[row : row + 1, :, mask[row]], alone, inputs)


def test_gated_packed_sequences_are_as_if_alone():
    q, k, v, gate = (x[:1] for x in (*make_qkv(), make_gate()))
    bounds = torch.tensor([0, 3, 5, 9, 9])  # the first two are padded together
    packed, state = causal_softmax_attention(q, k, v, log_gate=gate, cu_seqlens=bounds)
    again, _ = causal_softmax_attention(q, k, v, state, log_gate=gate, cu_seqlens=bounds)
    for start, end in pairwise(bounds):
        qkv, g = [x[:, :, start:end] for x in (q, k, v)], gate[:, :, start:end]
        alone, past = causal_softmax_attention(*qkv, log_gate=g)
        assert_close(packed[:, :, start:end], alone)
        twice, _ = causal_softmax_attention(*qkv, past, log_gate=g)
        assert_close(again[:, :, start:end], twice)


def test_a_gated_state_keeps_its_last_tokens_and_is_saved(tmp_path):
    qkv, gate = make_qkv(), make_gate()
    _, state = causal_softmax_attention(*qkv, log_gate=gate)
    assert_close(state.last(3).log_gate, gate[:, :, -3:])
    state.save(tmp_path / "state")
    assert_close(load_state(tmp_path / "state").tensors(), state.tensors())
    for given, message in ((None, "made with gates, and now none"), (gate, "no gates, and now")):
        past = state if given is None else causal_softmax_attention(*qkv)[1]
        with pytest.raises(InputError, match=message):
            causal_softmax_attention(*qkv, past, log_gate=given)


def test_long_gated_texts_keep_single_precision():
    random = torch.Generator().manual_seed(0)
    qkv = [torch.randn(1, 2, 2000, 8, generator=random) for _ in "qkv"]
    gate = torch.nn.functional.logsigmoid(3 + torch.randn(1, 2, 2000, generator=random))
    o, _ = causal_softmax_attention(*qkv, log_gate=gate)
    expected, _ = causal_softmax_attention(*(x.double() for x in qkv), log_gate=gate.double())
    assert_close(o.double(), expected, rtol=1e-4, atol=1e-4)
    half, _ = causal_softmax_attention(*(x.bfloat16() for x in qkv), log_gate=gate.bfloat16())
    assert half.dtype == torch.bfloat16
    assert_close(half.double(), expected, rtol=0.1, atol=0.1)


@pytest.mark.parametrize("dtype", [torch.half, torch.bfloat16], ids=str)
def test_half_precision_keeps_its_dtype(dtype):
    qkv = tuple(x.to(dtype) for x in make_qkv())
    o, state = causal_softmax_attention(*qkv)
    step, _ = causal_softmax_attention(*(x[:, :, -1:] for x in qkv), state)
    assert o.dtype == step.dtype == dtype
    assert o.isfinite().all() and step.isfinite().all()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda q, k, v: softmax_attention(q.long(), k, v), "q has dtype torch.int64"),
        (lambda q, k, v: softmax_attention(q, k[..., :3], v), r"they differ in axis 3"),
        (lambda q, k, v: softmax_attention(q, k, v[:, :, :4]), r"they differ in axis 2"),
        (lambda q, k, v: softmax_attention(q[0], k, v), r"q is \[3, 9, 4\]; expected axes"),
        (lambda q, k, v: softmax_attention(q, k, v, key_mask=torch.ones(2, 9)), "expected bool"),
        (
            lambda q, k, v: softmax_attention(q, k, v, visible=torch.arange(9) + 2),
            r"visible runs from 2 to 10; with 9 keys",
        ),
        (
            lambda q, k, v: causal_softmax_attention(
                q, k, v, causal_softmax_attention(q[:1], k[:1], v[:1])[1]
            ),
            r"k is \[2, 3, 9, 4\] and the state was made by k \[1, 3, 9, 4\]",
        ),
    ],
)
@pytest.mark.usefixtures("shapes_unchecked")
def test_bad_input_is_named(call, message):
    with pytest.raises(InputError, match=message):
        call(*make_qkv())
