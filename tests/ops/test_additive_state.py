"""Promises of the states of additive attention: streaming, merging, taking back, keeping."""

import pytest
import torch
from torch.testing import assert_close

from leap.errors import InputError
from leap.ops.additive import FocusState, WindowState, additive_attention, additive_pool
from leap.ops.state import load_state

pytestmark = pytest.mark.usefixtures("each_backend")

WINDOWS = [None, 1, 6, 40]


def make(length, *, batch=2, heads=3, values=4, seed=0, dtype=torch.double, spread=3.0):
    options = {"dtype": dtype, "generator": torch.Generator().manual_seed(seed)}
    focus = spread * torch.randn(batch, heads, length, **options)
    return focus, torch.randn(batch, heads, length, values, **options)


def cut(tensors, *span):
    return tuple(x[:, :, slice(*span)] for x in tensors)


def read(tokens, state=None, *, window, key_mask=None):
    return additive_attention(*tokens, state, window=window, key_mask=key_mask)[1]


def empty(window):
    if window is None:
        return FocusState.empty(2, 3, 4)
    return WindowState.empty(2, 3, window, 4, dtype=torch.double)


def test_steps_far_into_a_sequence_do_not_drift(shapes_unchecked):
    n_read, n_steps = 100_000, 5_000
    focus, v = make(n_read + n_steps, batch=1, values=2, dtype=torch.float32, spread=1)
    focus = focus * torch.tensor([0, 3, 50]).reshape(1, 3, 1)
    with torch.inference_mode():
        state = read(cut((focus, v), n_read), window=None)
        for i in range(n_read, n_read + n_steps):
            state = read(cut((focus, v), i, i + 1), state, window=None)
        exact = FocusState.of(focus.double(), v.double())
    assert torch.equal(state.peak, exact.peak)
    assert_close(state.mass, exact.mass, rtol=1e-6, atol=0)
    # A mean of many may be near 0; its error is measured by the values it is a mean of.
    assert (state.mean() - exact.mean()).abs().max() <= 1e-6 * v.abs().max()


def test_a_mean_of_a_million_tokens_is_exact():
    """Tokens that are all the same, whose sums round the same way again and again."""
    focus = torch.zeros(1, 1, 1_000_000)
    v = torch.tensor([0.77, 0.11]).expand(1, 1, 1_000_000, 2)
    assert_close(FocusState.of(focus, v).mean(), v[:, :, 0].double(), rtol=1e-5, atol=0)
    assert_close(additive_pool(focus, v), v[:, :, 0], rtol=1e-5, atol=0)
    assert_close(additive_attention(focus, v)[0][:, :, -1], v[:, :, 0], rtol=1e-5, atol=0)


@pytest.mark.parametrize("window", WINDOWS, ids=lambda w: f"window-{w}")
def test_a_state_has_at_most_its_windows_size_and_a_precision_of_its_own(window):
    for dtype, kept in ((torch.bfloat16, torch.float32), (torch.double, torch.double)):
        kept = torch.double if window is None else kept
        tokens = make(50, dtype=torch.double)
        states = [
            read(tuple(x[:, :, :n].to(dtype) for x in tokens), window=window) for n in (1, 5, 50)
        ]
        if window is None:
            assert len({state.n_bytes for state in states}) == 1
        else:
            assert [state.v.shape[2] for state in states] == [
                min(n, window - 1) for n in (1, 5, 50)
            ]
            assert all(state.sizes()[2] == window for state in states)
        assert all(
            x.dtype == kept
            for state in states
            for name, x in state.tensors().items()
            if name != "length"
        )


@pytest.mark.parametrize("window", WINDOWS, ids=lambda w: f"window-{w}")
def test_reading_without_attending_leads_to_the_same_state(window):
    tokens = make(50)
    mask = torch.rand(2, 50) < 0.7
    start = read(cut(tokens, 20), window=window, key_mask=mask[:, :20])
    rest = cut(tokens, 20, None)
    for key_mask in (None, mask[:, 20:], mask[:, None, 20:]):
        flat = None if key_mask is None else key_mask.reshape(2, -1)
        expected = read(rest, start, window=window, key_mask=flat)
        actual = start.advance(focus=rest[0], v=rest[1], key_mask=key_mask)
        assert_close(actual.tensors(), expected.tensors())


@pytest.mark.parametrize("window", WINDOWS, ids=lambda w: f"window-{w}")
def test_two_states_merge_to_that_of_the_whole_sequence(window):
    tokens = make(30)
    a, b, c = (read(cut(tokens, i, j), window=window) for i, j in ((0, 3), (3, 5), (5, 30)))
    whole = read(tokens, window=window).tensors()
    assert_close(a.merge(b).merge(c).tensors(), whole)
    assert_close(a.merge(b.merge(c)).tensors(), whole)
    assert_close(empty(window).merge(a).tensors(), a.tensors())
    assert_close(a.merge(empty(window)).tensors(), a.tensors())


def test_merging_can_be_differentiated():
    tokens = tuple(x.requires_grad_() for x in make(30))
    merged = read(cut(tokens, 12), window=None).merge(read(cut(tokens, 12, None), window=None))
    whole = read(tokens, window=None)
    upstream = torch.randn_like(whole.mean())
    assert_close(
        torch.autograd.grad(merged.mean(), tokens, upstream),
        torch.autograd.grad(whole.mean(), tokens, upstream),
    )


@pytest.mark.parametrize("cuts", [[1, 1, 1, 1], [3, 1, 30, 1, 1], [0, 2, 5]], ids=str)
@pytest.mark.parametrize("window", [1, 2, 6, 40])
def test_a_window_takes_no_more_places_than_tokens_were_read(window, cuts, shapes_unchecked):
    tokens, start, state = make(50), 0, None
    whole, _ = additive_attention(*tokens, window=window)
    for n in cuts:
        o, state = additive_attention(*cut(tokens, start, start + n), state, window=window)
        assert_close(o, whole[:, :, start : start + n])
        start += n
        assert state.focus.shape[2] == state.v.shape[2] == min(start, window - 1)
        assert state.sizes()[2] == window


def test_places_for_the_whole_window_can_be_reserved():
    tokens = make(10)
    state = read(cut(tokens, 3), window=6)
    reserved = state.reserve()
    assert reserved.v.shape[2] == 5 and reserved.sizes()[2] == state.sizes()[2] == 6
    for n in (1, 7):
        o, after = additive_attention(*cut(tokens, 3, 3 + n), reserved, window=6)
        expected, then = additive_attention(*cut(tokens, 3, 3 + n), state, window=6)
        assert_close(o, expected)
        assert_close(after.tensors(), then.reserve().tensors())


@pytest.mark.parametrize("window", [1, 6, 40], ids=lambda w: f"window-{w}")
def test_rows_that_have_read_more_and_less_go_on_together(window):
    a, b, c, more = make(2), make(9, seed=1), make(30, seed=2), make(20, seed=3)
    mask = torch.rand(2, 9) < 0.7
    states = [read(a, window=window), read(b, window=window, key_mask=mask), read(c, window=window)]
    states.append(empty(window))
    joined = states[0].concat(states[1:])
    assert joined.sizes()[2] == window and joined.v.shape[2] == min(30, window - 1)
    together = [torch.cat([x] * 4) for x in more]
    for state in (joined, joined.select(torch.arange(8))):
        o, after = additive_attention(*together, state, window=window)
        for i, alone in enumerate(states):
            rows = torch.arange(2 * i, 2 * i + 2)
            expected, then = additive_attention(*more, alone, window=window)
            assert_close(o[rows], expected)
            assert_close(after.select(rows).reserve().tensors(), then.reserve().tensors())


def test_states_of_different_shapes_do_not_merge():
    with pytest.raises(InputError, match=r"\[2, 3, 4\] and \[2, 3, 5\]"):
        FocusState.empty(2, 3, 4).merge(FocusState.empty(2, 3, 5))
    with pytest.raises(InputError, match=r"\[2, 3, 8, 4\] and \[2, 3, 9, 4\]"):
        WindowState.empty(2, 3, 8, 4).merge(WindowState.empty(2, 3, 9, 4))


@pytest.mark.parametrize("window", WINDOWS, ids=lambda w: f"window-{w}")
def test_the_last_tokens_can_be_taken_back(window):
    tokens = make(60)
    mask = torch.rand(2, 60) < 0.7
    state = read(cut(tokens, 20), window=window).record(limit=12)
    for start, end, masked in ((20, 21, False), (21, 30, True), (30, 31, True), (31, 60, False)):
        key_mask = mask[:, start:end] if masked else None
        state = read(cut(tokens, start, end), state, window=window, key_mask=key_mask)
    mask[:, :21] = mask[:, 31:] = True
    for n in (0, 1, 12):
        expected = read(cut(tokens, 60 - n), window=window, key_mask=mask[:, : 60 - n])
        assert_close(state.rollback(n).tensors(), expected.tensors())
    again = read(cut(tokens, 50, None), state.rollback(10), window=window)
    assert_close(again.tensors(), state.tensors())
    assert_close(again.rollback(10).tensors(), state.rollback(10).tensors())


@pytest.mark.parametrize(("window", "cycles"), [(None, 10_000), (6, 1_000)], ids=["all", "window"])
def test_drafting_and_rejecting_for_ever_leaves_no_drift(window, cycles, shapes_unchecked):
    prompt = make(20, dtype=torch.float32)
    drafts = make(cycles, seed=1, dtype=torch.float32)
    state = read(prompt, window=window).record(limit=4)
    kept = []
    with torch.inference_mode():
        for i in range(cycles):
            state = read(cut(drafts, i, i + 1), state, window=window)
            if i % 100 == 0:
                kept.append(i)
            else:
                state = state.rollback(1)
    tokens = [torch.cat([x, y[:, :, kept]], dim=2) for x, y in zip(prompt, drafts, strict=True)]
    if window is None:
        assert_close(state.tensors(), FocusState.of(*(x.double() for x in tokens)).tensors())
    else:  # The tokens themselves are kept, so no bit may change.
        assert_close(state.tensors(), read(tokens, window=window).tensors(), rtol=0, atol=0)


@pytest.mark.parametrize("window", WINDOWS, ids=lambda w: f"window-{w}")
def test_rows_can_be_picked_repeated_and_kept_in_a_file(window, tmp_path):
    tokens = make(20)
    state = read(tokens, window=window)
    twice = state.select(torch.tensor([1, 0, 1]))
    assert_close(twice.tensors(), read([x[[1, 0, 1]] for x in tokens], window=window).tensors())
    state.save(tmp_path / "state.safetensors")
    loaded = load_state(tmp_path / "state.safetensors")
    assert type(loaded) is type(state)
    assert_close(loaded.tensors(), state.tensors())
    more = make(5, seed=9)
    assert torch.equal(*(additive_attention(*more, s, window=window)[0] for s in (state, loaded)))


def test_a_detached_state_stops_the_gradient():
    tokens = tuple(x.requires_grad_() for x in make(20))
    state = read(cut(tokens, 10), window=None).detach()
    o, _ = additive_attention(*cut(tokens, 10, None), state)
    grads = torch.autograd.grad(o.sum(), tokens)
    assert not any(x[:, :, :10].any() for x in grads)
