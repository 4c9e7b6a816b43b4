from itertools import pairwise

import pytest
import torch
from torch.testing import assert_close

from leap.errors import InputError
from leap.ops import TapState, causal_convolution
from leap.ops.convolution import causal_convolution_reference
from leap.ops.state import load_state

LENGTH = 9
TAPS = 4
MASKS = {
    "left": [[0, 0, 0, 1, 1, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1, 1, 1, 1]],
    "right": [[1, 1, 1, 1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 1, 1, 1, 1]],
    "holes": [[0, 1, 0, 1, 1, 1, 0, 0, 1], [1, 0, 0, 0, 0, 0, 0, 1, 0]],
    "nothing": [[0] * 9, [1] * 9],
}


def make(t=LENGTH, *, batch=2, taps=TAPS, seed=0):
    options = {"dtype": torch.double, "generator": torch.Generator().manual_seed(seed)}
    shapes = [(batch, t, 5), (5, taps), (5,)]
    return tuple(torch.randn(shape, **options).requires_grad_() for shape in shapes)


def assert_same_with_gradients(actual, expected, inputs):
    assert_close(actual, expected)
    upstream = torch.randn_like(expected)
    options = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
    assert_close(
        torch.autograd.grad(actual, inputs, upstream, **options),
        torch.autograd.grad(expected, inputs, upstream, **options),
    )


@pytest.mark.parametrize("taps", [1, 2, 4, 7])
@pytest.mark.parametrize("t", range(1, 10))
def test_agrees_with_the_definition(t, taps):
    x, weight, bias = make(t, taps=taps)
    y, state = causal_convolution(x, weight, bias=bias)
    expected = causal_convolution_reference(x, weight, bias)
    assert_same_with_gradients(y, expected, (x, weight, bias))
    assert state.length.tolist() == [t, t]
    without = causal_convolution_reference(x, weight)
    assert_same_with_gradients(causal_convolution(x, weight)[0], without, (x, weight))


def test_the_definition_is_that_of_a_token_and_those_before_it():
    x, weight, bias = make()
    y = causal_convolution_reference(x, weight, bias)
    for i in range(LENGTH):
        met = sum(x[:, i - j] * weight[:, TAPS - 1 - j] for j in range(min(i + 1, TAPS)))
        assert_close(y[:, i], met + bias)


@pytest.mark.parametrize("pads", [None, *MASKS])
@pytest.mark.parametrize("cut", range(LENGTH + 1))
def test_a_sequence_can_be_cut_anywhere(cut, pads):
    x, weight, _ = make()
    mask = None if pads is None else torch.tensor(MASKS[pads]).bool()
    real = slice(None) if mask is None else mask
    whole, final = causal_convolution(x, weight, key_mask=mask)
    masks = (None, None) if mask is None else (mask[:, :cut], mask[:, cut:])
    head, state = causal_convolution(x[:, :cut], weight, key_mask=masks[0])
    tail, resumed = causal_convolution(x[:, cut:], weight, state, key_mask=masks[1])
    both = torch.cat([head, tail], dim=1)
    assert_same_with_gradients(both[real], whole[real], (x, weight))
    assert_same_with_gradients(resumed.x, final.x, (x,))
    assert_close(resumed.tensors(), final.tensors())


@pytest.mark.parametrize("pads", [None, *MASKS])
def test_steps_make_the_whole(pads):
    x, weight, _ = make()
    mask = None if pads is None else torch.tensor(MASKS[pads]).bool()
    whole, final = causal_convolution(x, weight, key_mask=mask)
    steps, state = [], None
    for i in range(LENGTH):
        key_mask = None if mask is None else mask[:, i : i + 1]
        y, state = causal_convolution(x[:, i : i + 1], weight, state, key_mask=key_mask)
        steps.append(y)
    real = slice(None) if mask is None else mask
    assert_same_with_gradients(torch.cat(steps, dim=1)[real], whole[real], (x, weight))
    assert_close(state.tensors(), final.tensors())


@pytest.mark.parametrize("pads", MASKS)
def test_pads_anywhere_leave_no_trace_whatever_stands_there(pads):
    x, weight, bias = make()
    mask = torch.tensor(MASKS[pads]).bool()
    filled = x.detach().masked_fill(~mask.unsqueeze(-1), torch.nan).requires_grad_()
    y, state = causal_convolution(filled, weight, key_mask=mask, bias=bias)
    assert y.isfinite().all() and state.x.isfinite().all()
    for row in range(2):
        alone = x[row : row + 1, mask[row]]
        expected, after = causal_convolution(alone, weight, bias=bias)
        assert_close(y[row : row + 1, mask[row]], expected)
        assert_close(state.select(torch.tensor([row])).tensors(), after.tensors())
        options = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
        wanted = torch.autograd.grad(expected.sum(), weight, **options)
        assert_close(torch.autograd.grad(y[row, mask[row]].sum(), weight, **options), wanted)


def test_packed_sequences_are_as_if_alone():
    x, weight, _ = make(batch=1)
    bounds = torch.tensor([0, 3, 4, 9, 9])
    packed, state = causal_convolution(x, weight, cu_seqlens=bounds)
    again, _ = causal_convolution(x, weight, state, cu_seqlens=bounds)
    assert state.length.tolist() == [3, 1, 5, 0]
    alone, twice = [], []
    for start, end in pairwise(bounds):
        y, past = causal_convolution(x[:, start:end], weight)
        alone.append(y)
        twice.append(causal_convolution(x[:, start:end], weight, past)[0])
    assert_same_with_gradients(packed, torch.cat(alone, dim=1), (x, weight))
    assert_same_with_gradients(again, torch.cat(twice, dim=1), (x, weight))


@pytest.mark.parametrize("masked", [False, True])
def test_recorded_tokens_can_be_taken_back_for_ever(masked):
    x, weight, _ = make()
    mask = torch.tensor(MASKS["holes"]).bool() if masked else None
    drafts, pads = make(6, seed=1)[0], torch.tensor([[1, 0, 1, 1, 0, 1], [1] * 6]).bool()
    _, state = causal_convolution(x, weight, key_mask=mask)
    state = state.record(limit=4)
    for n_kept in range(7):
        _, longer = causal_convolution(drafts, weight, state, key_mask=pads)
        back = longer.rollback(6 - n_kept)
        _, expected = causal_convolution(
            drafts[:, :n_kept], weight, state, key_mask=pads[:, :n_kept]
        )
        assert_close(back.tensors(), expected.tensors())
    for i in range(6):
        _, longer = causal_convolution(drafts[:, i : i + 1], weight, longer)
    with pytest.raises(InputError, match="cannot take back"):
        longer.rollback(20)
    n_read = LENGTH if mask is None else int(mask[1].sum())
    assert longer.rollback(4).length[1] == n_read + 6 + 6 - 4


def test_a_state_is_saved_and_loaded_and_keeps_no_more_than_its_taps(tmp_path):
    x, weight, _ = make(500)
    _, state = causal_convolution(x, weight)
    assert state.x.untyped_storage().nbytes() == state.x.numel() * 8
    state.save(tmp_path / "state")
    loaded = load_state(tmp_path / "state")
    assert isinstance(loaded, TapState)
    assert_close(loaded.tensors(), state.tensors())


def test_states_cannot_be_merged():
    x, weight, _ = make()
    _, state = causal_convolution(x, weight)
    with pytest.raises(InputError, match=r"cannot be merged.*read B from the state after A"):
        state.merge(state)


@pytest.mark.parametrize("dtype", [torch.half, torch.bfloat16, torch.float], ids=str)
def test_lower_precision_keeps_its_dtype_and_is_close(dtype):
    x, weight, bias = (each.detach().to(dtype).requires_grad_() for each in make())
    y, state = causal_convolution(x, weight, bias=bias)
    expected, _ = causal_convolution(x.double(), weight.double(), bias=bias.double())
    assert y.dtype == state.x.dtype == dtype
    assert_close(y.double(), expected, rtol=2e-2, atol=2e-2)
    assert all(g.isfinite().all() for g in torch.autograd.grad(y.sum(), (x, weight, bias)))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x, w: causal_convolution(x.long(), w), "x has dtype torch.int64"),
        (lambda x, w: causal_convolution(x[0], w), r"x is \[9, 5\]; expected axes"),
        (lambda x, w: causal_convolution(x, w[:3]), r"weight is \[3, 4\].*must be \[5, taps\]"),
        (lambda x, w: causal_convolution(x, w, key_mask=torch.ones(2, 9)), "expected bool"),
        (
            lambda x, w: causal_convolution(x, w, causal_convolution(x[:1], w)[1]),
            r"the state holds \[1, 3, 5\].*must be \[2, 3, 5\]",
        ),
        (
            lambda x, w: causal_convolution(x, w, causal_convolution(x, w[:, :2])[1]),
            r"the state holds \[2, 1, 5\].*must be \[2, 3, 5\]",
        ),
    ],
)
@pytest.mark.usefixtures("shapes_unchecked")
def test_bad_input_is_named(call, message):
    with pytest.raises(InputError, match=message):
        call(*make()[:2])
