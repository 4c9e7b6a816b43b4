"""Promises of additive attention: focus-weighted means, over all of the past or a window."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from leap.errors import InputError
from leap.ops.additive import (
    FocusState,
    WindowState,
    additive_attention,
    additive_attention_reference,
    additive_pool,
    blocked,
    surrounding_attention,
)
from leap.ops.tolerance import TOLERANCES, relative_error

pytestmark = pytest.mark.usefixtures("each_backend")

LENGTHS = [1, 2, 15, 16, 17, 50]
WINDOWS = [None, 1, 2, 3, 4, 7, 16, 31, 32, 33, 48, 1000]
FEW_WINDOWS = [None, 1, 3, 20, 40]


def make(length, *, batch=2, heads=3, values=4, spread=1.0, seed=0, dtype=torch.double):
    options = {"dtype": torch.double, "generator": torch.Generator().manual_seed(seed)}
    focus = spread * torch.randn(batch, heads, length, **options)
    v = torch.randn(batch, heads, length, values, **options)
    return tuple(x.to(dtype).requires_grad_() for x in (focus, v))


def make_mask(length, *, batch=2, share=0.7, seed=1):
    return torch.rand(batch, length, generator=torch.Generator().manual_seed(seed)) < share


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(blocked, "BLOCK", 4)
    blocked._pieces.cache_clear()
    yield
    blocked._pieces.cache_clear()


def cut(tensors, *span):
    return tuple(x[:, :, slice(*span)] for x in tensors)


def grads_of(outputs, inputs, seed=2, retain_graph=False):
    generator = torch.Generator().manual_seed(seed)
    options = {"dtype": torch.double, "generator": generator}
    upstream = [torch.randn(x.shape, **options).to(x.dtype) for x in outputs]
    return torch.autograd.grad(
        outputs, inputs, upstream, retain_graph=retain_graph, materialize_grads=True
    )


def assert_same_outputs_and_gradients(actual, expected, inputs):
    assert_close(actual, expected)
    assert_close(grads_of([actual], inputs), grads_of([expected], inputs))


def exact_rows(focus, v, window, rows):
    """Some rows in double precision, and the least and greatest value that each row sees."""
    focus, v = focus.detach().double(), v.detach().double()
    means, least, greatest = [], [], []
    for i in rows:
        seen = slice(max(i + 1 - (window or i + 1), 0), i + 1)
        means.append(focus[:, :, None, seen].softmax(-1) @ v[:, :, seen])
        least.append(v[:, :, seen].amin(2, keepdim=True))
        greatest.append(v[:, :, seen].amax(2, keepdim=True))
    return tuple(torch.cat(x, dim=2) for x in (means, least, greatest))


# The formula


@pytest.mark.parametrize("window", WINDOWS, ids=lambda w: f"window-{w}")
@pytest.mark.parametrize("length", LENGTHS, ids=lambda n: f"{n}-tokens")
def test_agrees_with_the_definition(length, window):
    inputs = make(length)
    actual, _ = additive_attention(*inputs, window=window)
    expected = additive_attention_reference(*inputs, window)
    assert_same_outputs_and_gradients(actual, expected, inputs)


@pytest.mark.parametrize("window", [None, 3, 40, 150], ids=lambda w: f"window-{w}")
@pytest.mark.parametrize("cache", [32, 640], ids=lambda n: f"cache-of-{n}")
def test_agrees_with_the_definition_when_the_cache_is_short(cache, window, monkeypatch):
    monkeypatch.setattr(blocked, "CACHE", cache)
    inputs = make(300)
    actual, _ = additive_attention(*inputs, window=window)
    expected = additive_attention_reference(*inputs, window)
    assert_same_outputs_and_gradients(actual, expected, inputs)


@pytest.mark.parametrize("window", [None, 3, 8, 100, 200], ids=lambda w: f"window-{w}")
def test_blocks_of_blocks_of_blocks_agree_with_the_definition(window, small_blocks):
    inputs = make(4**4 + 1, batch=1, heads=2, values=1)
    actual, _ = additive_attention(*inputs, window=window)
    expected = additive_attention_reference(*inputs, window)
    assert_same_outputs_and_gradients(actual, expected, inputs)


@pytest.mark.parametrize("spread", [1, 30, 300], ids=lambda s: f"logits-of-{s}")
@pytest.mark.parametrize("length", [1024, 65536], ids=lambda n: f"{n}-tokens")
def test_single_precision_keeps_its_digits_at_any_length_window_and_logit(length, spread):
    inputs = make(length, batch=1, heads=1, values=2, spread=spread, dtype=torch.float32)
    rows = [0, 1, *torch.randint(length, (50,)).tolist(), length - 1]
    for window in (1, 2, 3, 4, 7, 16, 64, 100, 1000, length, length + 5, None):
        expected, least, greatest = exact_rows(*inputs, window, rows)
        actual = additive_attention(*inputs, window=window)[0].detach()[:, :, rows].double()
        assert (actual - expected).abs().max() <= 2e-6
        rounding = 1e-6
        assert (actual >= least - rounding).all() and (actual <= greatest + rounding).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("window", [None, 4, 100], ids=lambda w: f"window-{w}")
def test_low_precision_costs_no_more_than_the_rounding_of_the_results(window, dtype):
    inputs = make(2000, batch=1, heads=2, values=8, spread=3, dtype=dtype)
    exact_inputs = tuple(x.detach().double().requires_grad_() for x in inputs)
    actual, _ = additive_attention(*inputs, window=window)
    expected, _ = additive_attention(*exact_inputs, window=window)
    assert actual.dtype == dtype
    assert relative_error(actual, expected) <= TOLERANCES[dtype].output
    for grad, exact in zip(
        grads_of([actual], inputs), grads_of([expected], exact_inputs), strict=True
    ):
        assert grad.dtype == dtype
        assert relative_error(grad, exact) <= TOLERANCES[dtype].gradient


@pytest.mark.parametrize("length", [1, 40])
def test_autocast_does_not_reach_inside(length):
    inputs = make(length, dtype=torch.float32)
    expected, _ = additive_attention(*inputs, window=40)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual, _ = additive_attention(*inputs, window=40)
    assert torch.equal(actual, expected)
    assert all(map(torch.equal, grads_of([actual], inputs), grads_of([expected], inputs)))


def test_any_memory_layout_will_do():
    inputs = make(50)
    expected, _ = additive_attention(*inputs, window=20)
    focus, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs)
    actual, _ = additive_attention(focus, v, window=20)
    assert_same_outputs_and_gradients(actual, expected, inputs)


# Gradients


@pytest.mark.parametrize("window", FEW_WINDOWS, ids=lambda w: f"window-{w}")
@pytest.mark.parametrize("masked", [False, True], ids=["unmasked", "masked"])
def test_gradients_are_those_of_small_differences(window, masked):
    inputs = make(19, batch=1, heads=1, values=2)
    mask = make_mask(19, batch=1) if masked else None
    torch.autograd.gradcheck(
        lambda *x: additive_attention(*x, window=window, key_mask=mask)[0], inputs, fast_mode=True
    )


@pytest.mark.parametrize("length", [1, 18])
def test_gradients_of_the_states_are_those_of_small_differences(length):
    def global_step(mass, sum, focus, v):
        state = FocusState(peak, mass, sum, length=torch.tensor([5]))
        o, after = additive_attention(focus, v, state)
        return o, after.mean(), (after.mass.log() + after.peak - peak.exp()).diff()

    def window_step(old_focus, old_v, focus, v):
        state = WindowState(old_focus, old_v, length=torch.tensor([5]))
        o, after = additive_attention(focus, v, state, window=6)
        return o, after.focus, after.v

    tokens = make(length, batch=1, heads=2, values=2)
    past = make(5, batch=1, heads=2, values=2, seed=5)
    state = FocusState.of(*past)
    peak = state.peak.detach()
    start = tuple(x.detach().requires_grad_() for x in (state.mass, state.sum))
    # Where the new peak lies is no part of the function, so it must not move with the inputs.
    calm = (tokens[0].detach().clamp_max(peak.amin() - 1).requires_grad_(), tokens[1])
    torch.autograd.gradcheck(global_step, (*start, *calm), fast_mode=True)
    torch.autograd.gradcheck(window_step, (*past, *tokens), fast_mode=True)


@pytest.mark.parametrize("window", [None, 4, 40], ids=lambda w: f"window-{w}")
def test_gradients_of_a_past_of_any_mass_are_those_of_small_differences(window):
    tokens = make(18, batch=1, heads=1, values=2)
    past = make(20, batch=1, heads=1, values=2, seed=5)
    mass = torch.rand(1, 1, 20, dtype=torch.double) + 1
    torch.autograd.gradcheck(
        lambda *x: blocked.attend(*x[:2], None, *x[2:], window)[0],
        (*tokens, *past, mass.requires_grad_()),
        fast_mode=True,
    )


@pytest.mark.parametrize("window", FEW_WINDOWS, ids=lambda w: f"window-{w}")
@pytest.mark.parametrize("at", [1, 16, 29, 49])
def test_gradients_flow_through_the_state_as_through_the_whole(at, window):
    inputs = make(50, spread=5)
    whole, end = additive_attention(*inputs, window=window)
    head, state = additive_attention(*cut(inputs, at), window=window)
    tail, end_of_tail = additive_attention(*cut(inputs, at, None), state, window=window)
    results = [[whole], [torch.cat([head, tail], dim=2)]]
    for outputs, last in zip(results, (end, end_of_tail), strict=True):
        outputs += [last.mean()] if window is None else [last.focus, last.v]
    assert_close(results[1], results[0])
    assert_close(grads_of(results[1], inputs), grads_of(results[0], inputs))


@pytest.mark.parametrize("window", FEW_WINDOWS, ids=lambda w: f"window-{w}")
def test_enormous_logits_and_empty_rows_have_finite_gradients(window):
    focus, v = make(50, dtype=torch.float32)
    focus = (focus.sign() * 1e4).detach().requires_grad_()
    mask = make_mask(50)
    mask[0] = False
    o, state = additive_attention(focus, v, window=window, key_mask=mask)
    again, state = additive_attention(focus, v, state, window=window, key_mask=mask)
    outputs = [o, again, state.mean()] if window is None else [o, again]
    grads = grads_of(outputs, (focus, v))
    assert all(x.isfinite().all() for x in (*outputs, *grads))
    assert not o[0].any() and not any(x[0].any() for x in grads)


# Who sees whom


@pytest.mark.parametrize("window", WINDOWS, ids=lambda w: f"window-{w}")
def test_an_edit_changes_no_bit_before_it_nor_beyond_the_window(window):
    focus, v = (x.detach() for x in make(100, dtype=torch.float32))
    before, _ = additive_attention(focus, v, window=window)
    for at in (0, 15, 16, 37, 99):
        edited_focus, edited_v = focus.clone(), v.clone()
        edited_focus[:, :, at] += 3
        edited_v[:, :, at] *= -2
        after, _ = additive_attention(edited_focus, edited_v, window=window)
        end = at + (window or 100)
        assert torch.equal(after[:, :, :at], before[:, :, :at])
        assert torch.equal(after[:, :, end:], before[:, :, end:])
        assert not torch.equal(after[:, :, at], before[:, :, at])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("window", FEW_WINDOWS, ids=lambda w: f"window-{w}")
def test_nan_and_infinity_reach_only_who_sees_them(window, value):
    focus, v = (x.detach() for x in make(100, dtype=torch.float32))
    expected, _ = additive_attention(focus, v, window=window)
    for at in (0, 20, 47, 99):
        for broken in ("v", "focus") if value != -math.inf else ("v",):
            spoilt_focus, spoilt_v = focus.clone(), v.clone()
            if broken == "v":
                spoilt_v[1, 2, at, 0] = value
            else:
                spoilt_focus[1, 2, at] = value
            actual, _ = additive_attention(spoilt_focus, spoilt_v, window=window)
            hit = torch.zeros_like(v, dtype=torch.bool)
            hit[1, 2, at : at + (window or 100), : 1 if broken == "v" else None] = True
            assert actual[hit].isnan().all()
            assert torch.equal(actual[~hit], expected[~hit])


@pytest.mark.parametrize("window", FEW_WINDOWS, ids=lambda w: f"window-{w}")
def test_a_broken_gradient_reaches_only_what_its_token_saw(window):
    inputs = make(100)
    o, _ = additive_attention(*inputs, window=window)
    upstream = torch.ones_like(o)
    expected = torch.autograd.grad(o, inputs, upstream, retain_graph=True)
    upstream[0, 1, 50, 2] = math.nan
    actual = torch.autograd.grad(o, inputs, upstream)
    unseen = torch.ones(2, 3, 100, dtype=torch.bool)
    unseen[0, 1, max(51 - (window or 51), 0) : 51] = False
    for grad, exact in zip(actual, expected, strict=True):
        assert torch.equal(grad[unseen], exact[unseen])


# Cut, stepped, padded, packed


@pytest.mark.parametrize("window", FEW_WINDOWS, ids=lambda w: f"window-{w}")
@pytest.mark.parametrize("masked", [False, True], ids=["unmasked", "masked"])
@pytest.mark.parametrize(
    "pieces",
    [[1] * 50, [49, 1], [1, 49], [16, 0, 17, 17], [5, 30, 15]],
    ids=lambda pieces: "one-by-one" if len(pieces) == 50 else "+".join(map(str, pieces)),
)
def test_a_sequence_can_be_cut_anywhere(pieces, masked, window):
    inputs = make(50, spread=5)
    mask = make_mask(50) if masked else None
    whole, end = additive_attention(*inputs, window=window, key_mask=mask)
    outputs, state, start = [], None, 0
    for n in pieces:
        part = None if mask is None else mask[:, start : start + n]
        tokens = cut(inputs, start, start + n)
        o, state = additive_attention(*tokens, state, window=window, key_mask=part)
        outputs.append(o)
        start += n
    assert_close(torch.cat(outputs, dim=2), whole)
    assert_close(state.tensors(), end.tensors())


@pytest.mark.parametrize("window", FEW_WINDOWS, ids=lambda w: f"window-{w}")
def test_pads_anywhere_change_nothing_for_the_others(window):
    inputs = make(40)
    expected, end = additive_attention(*inputs, window=window)
    exact = grads_of([expected], inputs, retain_graph=True)
    for places in (
        torch.arange(40),
        torch.arange(40) + 23,
        torch.randperm(63, generator=torch.Generator().manual_seed(0))[:40].sort().values,
    ):
        # What stands at a pad does not matter, be it not even a number.
        focus, v = (torch.full((2, 3, 63, *x.shape[3:]), math.nan).to(x) for x in inputs)
        focus, v = (
            padded.index_copy(2, places, x) for padded, x in zip((focus, v), inputs, strict=True)
        )
        mask = torch.zeros(2, 63, dtype=torch.bool)
        mask[:, places] = True
        o, state = additive_attention(focus, v, window=window, key_mask=mask)
        assert not o.transpose(1, 2)[~mask].any()
        assert_close(o[:, :, places], expected)
        assert_close(state.tensors(), end.tensors())
        assert_close(grads_of([o[:, :, places]], inputs, retain_graph=True), exact)
        upstream = torch.ones_like(o).masked_fill(~mask[:, None, :, None], math.nan)
        grads = torch.autograd.grad(o, inputs, upstream)
        assert_close(grads, torch.autograd.grad(expected.sum(), inputs, retain_graph=True))


@pytest.mark.parametrize("window", FEW_WINDOWS, ids=lambda w: f"window-{w}")
def test_masked_agrees_with_the_definition(window):
    inputs = make(50)
    mask = make_mask(50)
    mask[0, :20] = False
    actual, state = additive_attention(*inputs, window=window, key_mask=mask)
    expected = additive_attention_reference(*inputs, window, mask)
    assert_same_outputs_and_gradients(actual, expected, inputs)
    assert state.length.tolist() == mask.sum(1).tolist()


@pytest.mark.parametrize("window", FEW_WINDOWS, ids=lambda w: f"window-{w}")
def test_packed_sequences_are_each_on_their_own(window):
    lengths = [3, 20, 1, 0, 26]
    inputs = make(sum(lengths), batch=1)
    ends = torch.tensor([0, *lengths]).cumsum(0)
    packed, state = additive_attention(*inputs, window=window, cu_seqlens=ends)
    alone = [
        additive_attention(*cut(inputs, start, end), window=window)
        for start, end in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)
    ]
    expected = torch.cat([o for o, _ in alone], dim=2)
    assert_same_outputs_and_gradients(packed, expected, inputs)
    assert_close(state.tensors(), alone[0][1].concat([s for _, s in alone[1:]]).tensors())

    further, _ = additive_attention(*inputs, state, window=window, cu_seqlens=ends)
    for i, (start, end) in enumerate(zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)):
        again, _ = additive_attention(*cut(inputs, start, end), alone[i][1], window=window)
        assert_close(further[:, :, start:end], again)


# Other promises


@pytest.mark.parametrize("window", [None, 40], ids=lambda w: f"window-{w}")
@pytest.mark.parametrize("length", [1, 50])
def test_compiled_gives_the_same_numbers(length, window, shapes_unchecked):
    inputs = make(length)
    mask = make_mask(length)
    state = additive_attention(*make(9, seed=3), window=window)[1].detach()

    def run(focus, v, state):
        o, after = additive_attention(focus, v, state, window=window, key_mask=mask)
        return o, after.reserve().tensors()

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for start in (None, state):
        (actual, state_), (expected, exact) = compiled(*inputs, start), run(*inputs, start)
        assert_same_outputs_and_gradients(actual, expected, inputs)
        assert_close(state_, exact)


def test_the_compiler_finds_nothing_wrong_with_the_custom_ops():
    focus, v = make(20)
    past = make(5, seed=3)
    mask = make_mask(20)
    mass = torch.rand(2, 3, 5, dtype=torch.double, requires_grad=True)
    torch.library.opcheck(blocked.attend, (focus, v, None, None, None, None, None))
    torch.library.opcheck(blocked.attend, (focus, v, mask, *past, mass, 40))


@pytest.mark.parametrize("window", [None, 4, 100], ids=lambda w: f"window-{w}")
def test_twice_the_same_to_the_last_bit(window):
    inputs = make(3000, dtype=torch.float32)
    first, second = (additive_attention(*inputs, window=window)[0] for _ in range(2))
    assert torch.equal(first, second)
    assert all(map(torch.equal, grads_of([first], inputs), grads_of([second], inputs)))


def test_inference_mode_leaves_nothing_behind_that_training_could_trip_over():
    inputs = make(50)
    with torch.inference_mode():
        expected, _ = additive_attention(*(x.detach() for x in inputs), window=37)
    actual, _ = additive_attention(*inputs, window=37)
    assert_close(actual, expected)
    grads_of([actual], inputs)


@given(
    length=st.integers(1, 40),
    window=st.none() | st.integers(1, 45),
    scale=st.sampled_from([0.0, 1e-18, 1.0, 1e4, 1e15]),
    focus_scale=st.sampled_from([0.0, 1e-18, 1.0, 1e4, 1e15]),
    constant=st.booleans(),
    share=st.sampled_from([0.0, 0.5, 1.0]),
    seed=st.integers(0, 99),
)
def test_finite_inputs_give_finite_results(
    length, window, scale, focus_scale, constant, share, seed
):
    focus, v = (x.detach() for x in make(length, seed=seed, dtype=torch.float32))
    if constant:
        focus, v = torch.ones_like(focus), torch.ones_like(v)
    focus = (focus * focus_scale).requires_grad_()
    v = (v * scale).requires_grad_()
    mask = make_mask(length, share=share, seed=seed)
    o, state = additive_attention(focus, v, window=window, key_mask=mask)
    pooled = additive_pool(focus, v, key_mask=mask)
    assert o.isfinite().all() and pooled.isfinite().all()
    assert not any(x.isnan().any() for x in state.tensors().values())
    assert o.abs().max() <= v.abs().max() * (1 + 1e-5)
    grads = torch.autograd.grad(o.sum() + pooled.sum(), (focus, v))
    assert all(x.isfinite().all() for x in grads)


@pytest.mark.parametrize("window", FEW_WINDOWS, ids=lambda w: f"window-{w}")
def test_an_empty_continuation_changes_nothing(window):
    inputs = make(20)
    _, state = additive_attention(*inputs, window=window)
    o, after = additive_attention(*cut(inputs, 0), state, window=window)
    assert o.shape == (2, 3, 0, 4)
    assert_close(after.tensors(), state.tensors())
    o, start = additive_attention(*cut(inputs, 0), window=window)
    assert o.shape == (2, 3, 0, 4) and start.length.tolist() == [0, 0]


# Errors


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"window": 0}, r"window=0 sees no token; give 1 or more"),
        ({"window": -3}, r"window=-3"),
        ({"focus": torch.zeros(2, 3)}, r"focus is \[2, 3\]; expected axes \[b, h, t\]"),
        ({"v": torch.zeros(2, 3, 8)}, r"v is \[2, 3, 8\]; expected axes \[b, h, t, p\]"),
        ({"v": torch.zeros(2, 3, 7, 4)}, r"differ in axis 2"),
        ({"focus": torch.zeros(2, 3, 8).long()}, r"focus has dtype torch.int64"),
        ({"v": torch.zeros(2, 3, 8, 4).int()}, r"v has dtype torch.int32"),
        ({"key_mask": torch.ones(2, 8)}, r"key_mask has dtype torch.float32; expected bool"),
        ({"key_mask": torch.ones(2, 7).bool()}, r"key_mask is \[2, 7\].* must be \[2, 8\]"),
        ({"state": WindowState.empty(2, 3, 5, 4)}, r"WindowState; .* goes on from a FocusState"),
        (
            {"state": FocusState.empty(2, 3, 4), "window": 5},
            r"FocusState; with window=5 .* from a WindowState",
        ),
        (
            {"state": WindowState.empty(2, 3, 5, 4), "window": 6},
            r"\[2, 3, 5, 4\]; with window=6 .* must be \[2, 3, 6, 4\]",
        ),
        ({"state": FocusState.empty(2, 3, 5)}, r"\[2, 3, 5\]; .* must be \[2, 3, 4\]"),
        ({"cu_seqlens": torch.tensor([0, 8])}, r"the batch is 2"),
    ],
    ids=lambda x: ",".join(x) if isinstance(x, dict) else "",
)
def test_bad_input_is_one_sentence_that_says_what_would_work(change, message, shapes_unchecked):
    good = {"focus": torch.zeros(2, 3, 8), "v": torch.zeros(2, 3, 8, 4)}
    with pytest.raises(InputError, match=message):
        additive_attention(**good | change)


# The pool


def test_pooling_is_one_softmax_over_the_sequence():
    focus, v = inputs = make(30, spread=5)
    expected = (focus.softmax(-1).unsqueeze(2) @ v).squeeze(2)
    assert_same_outputs_and_gradients(additive_pool(*inputs), expected, inputs)
    assert_close(additive_attention(*inputs)[0][:, :, -1], expected)


def test_pooling_leaves_pads_out_and_gives_0_for_nothing_but_pads():
    focus, v = inputs = make(30)
    mask = make_mask(30)
    mask[0] = False
    pooled = additive_pool(*inputs, key_mask=mask)
    grads = grads_of([pooled], inputs)
    assert not pooled[0].any() and not any(x[0].any() for x in grads)
    assert_close(pooled[1:], additive_pool(focus[1:, :, mask[1]], v[1:, :, mask[1]]))
    assert not any(x[1, :, ~mask[1]].any() for x in grads)
    assert not additive_pool(*cut(inputs, 0)).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_pooling_in_low_precision_costs_no_more_than_rounding(dtype):
    inputs = make(5000, dtype=dtype)
    exact = additive_pool(*(x.double() for x in inputs))
    assert additive_pool(*inputs).dtype == dtype
    assert relative_error(additive_pool(*inputs), exact) <= TOLERANCES[dtype].output


def surrounding_reference(focus, v, window, key_mask):
    """Each real token and those less than a window of real ones away, one by one."""
    o = torch.zeros_like(v)
    for b in range(len(v)):
        real = key_mask[b].nonzero().flatten()
        for rank, i in enumerate(real):
            seen = real if window is None else real[max(0, rank - window + 1) : rank + window]
            weights = focus[b, :, seen].softmax(-1)
            o[b, :, i] = (weights.unsqueeze(-1) * v[b, :, seen]).sum(1)
    return o


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("pads", [False, True])
@pytest.mark.parametrize("window", [None, 1, 2, 5, 16, 17, 1000])
@pytest.mark.parametrize("length", [1, 2, 17, 30])
def test_what_surrounds_a_token_is_the_mean_over_both_sides(length, window, pads):
    inputs = make(length, spread=5.0)
    mask = make_mask(length) if pads else torch.ones(2, length, dtype=torch.bool)
    given = mask if pads else None
    actual = surrounding_attention(*inputs, window=window, key_mask=given)
    expected = surrounding_reference(*inputs, window, mask)
    real = mask[:, None, :, None]
    assert_same_outputs_and_gradients(actual * real, expected, inputs)
    assert actual.isfinite().all()


def test_packed_surroundings_do_not_reach_into_each_other():
    focus, v = make(20, batch=1)
    packed = surrounding_attention(focus, v, window=3, cu_seqlens=torch.tensor([0, 7, 7, 8, 20]))
    alone = [surrounding_attention(*cut((focus, v), *span), window=3) for span in ((0, 7), (7, 8))]
    alone.append(surrounding_attention(*cut((focus, v), 8, 20), window=3))
    assert_close(packed, torch.cat(alone, dim=2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.half], ids=str)
def test_surroundings_in_half_precision_stay_within_the_table(dtype):
    focus, v = make(100, dtype=dtype)
    mask = make_mask(100)
    exact = surrounding_attention(focus.double(), v.double(), window=9, key_mask=mask)
    actual = surrounding_attention(focus, v, window=9, key_mask=mask)
    real = mask[:, None, :, None]
    assert actual.dtype == dtype
    assert relative_error(actual * real, exact * real) < TOLERANCES[dtype].output


def test_a_surrounding_of_nothing_is_an_error():
    with pytest.raises(InputError, match="window=0 sees no token"):
        surrounding_attention(*make(5), window=0)
