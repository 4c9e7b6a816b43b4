"""Promises of places that are travelled."""

import math

import pytest
import torch
from torch.testing import assert_close

from leap.errors import InputError
from leap.ops import LinearState, causal_travelled_attention, load_state
from leap.ops.tolerance import TOLERANCES, relative_error
from leap.ops.travel import ClockState, clock, travelled

pytestmark = pytest.mark.usefixtures("each_backend")

FADE = (-0.5, -0.1, 0.0)


def make_inputs(length, *, clocks=1, batch=2, heads=3, seed=0, dtype=torch.double):
    options = {"dtype": dtype, "generator": torch.Generator().manual_seed(seed)}
    q, k = (torch.rand(batch, heads, length, 5, **options) for _ in "qk")
    v = torch.randn(batch, heads, length, 4, **options)
    turn = 2 * torch.rand(batch, heads, length, clocks, **options)
    gate = -torch.rand(batch, heads, length, **options)
    return tuple(x.requires_grad_() for x in (q, k, v, turn, gate))


def attend(q, k, v, turn, gate, state=None, **options):
    options = {"chunk_size": 8} | options
    return causal_travelled_attention(q, k, v, turn, state, log_gate=gate, **options)


def cut(tensors, *span):
    return tuple(x[:, :, slice(*span)] for x in tensors)


def as_defined(q, k, v, turn, gate):
    """The formula as written."""
    places, faded = turn.cumsum(2), gate.cumsum(2)
    weights = (1 + (places.unsqueeze(3) - places.unsqueeze(2)).cos().mean(-1)) / 2
    left = (faded.unsqueeze(3) - faded.unsqueeze(2)).clamp_max(0).exp()
    scores = ((q @ k.mT) * weights * left).tril()
    return scores @ v / scores.sum(-1, keepdim=True)


@pytest.mark.parametrize("clocks", [1, 2, 3])
@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 50])
def test_scores_are_weighed_by_the_distance_travelled(length, clocks):
    inputs = make_inputs(length, clocks=clocks)
    expected = as_defined(*inputs)
    actual, state = attend(*inputs)
    assert_close(actual, expected)
    upstream = torch.randn_like(expected)
    assert_close(
        torch.autograd.grad(actual, inputs, upstream, retain_graph=True),
        torch.autograd.grad(expected, inputs, upstream),
    )
    assert_close(state.angle, inputs[3].sum(2).remainder(2 * math.pi))
    assert state.angle.dtype == torch.double


def test_no_steps_are_no_places():
    q, k, v, turn, gate = make_inputs(20)
    still, _ = attend(q, k, v, torch.zeros_like(turn), gate)
    scores = ((q @ k.mT) * (gate.cumsum(2).unsqueeze(3) - gate.cumsum(2).unsqueeze(2)).exp()).tril()
    assert_close(still, scores @ v / scores.sum(-1, keepdim=True))


@pytest.mark.parametrize("split", [0, 1, 8, 13, 19, 20])
def test_a_sequence_can_be_cut_anywhere(check_cut, split):
    check_cut(attend, make_inputs(20), split, "kv")


@pytest.mark.parametrize("split", [1, 8, 13])
def test_two_halves_read_apart_merge_into_the_whole(split):
    inputs = make_inputs(20, clocks=2)
    _, final = attend(*inputs)
    _, a = attend(*cut(inputs, split))
    _, b = attend(*cut(inputs, split, None))
    assert_close(a.merge(b).tensors(), final.tensors())


@pytest.mark.parametrize("n", [1, 3, 7])
def test_the_last_tokens_can_be_taken_back(n):
    inputs = make_inputs(20)
    _, state = attend(*cut(inputs, 11))
    _, ahead = attend(*cut(inputs, 11, 20), state.record(16))
    _, expected = attend(*cut(inputs, 20 - n))
    back = ahead.rollback(n)
    assert_close(back.tensors(), expected.tensors())
    again, _ = attend(*cut(inputs, 20 - n, None), back)
    whole, _ = attend(*inputs)
    assert_close(again, whole[:, :, 20 - n :])


@pytest.mark.parametrize("axes", [None, "b t", "b 1 t"])
def test_clocks_can_be_turned_back(axes):
    turn = make_inputs(9)[3].detach()
    mask = torch.ones(2, 9, dtype=torch.bool)
    if axes is not None:
        mask[:, [1, 6]] = False

    def read(state, begin, end):
        part = mask[:, begin:end] if axes != "b 1 t" else mask[:, None, begin:end]
        return state.advance(turn=turn[:, :, begin:end], key_mask=None if axes is None else part)

    before = read(ClockState.empty(turn), 0, 4)
    back = read(before.record(8), 4, 9).rollback(3)
    assert_close(back.tensors(), read(before, 4, 6).tensors())


def test_pads_take_no_step():
    inputs = make_inputs(12)
    mask = torch.ones(2, 12, dtype=torch.bool)
    mask[:, [0, 5, 6, 11]] = False
    real = mask[0].nonzero().flatten()
    expected, final = attend(*(x[:, :, real] for x in inputs))
    actual, state = attend(*inputs, key_mask=mask)
    assert_close(actual[:, :, real], expected)
    assert_close(state.tensors(), final.tensors())


def test_packed_sequences_begin_at_their_own_place():
    lengths = [3, 1, 0, 20, 9]
    inputs = make_inputs(sum(lengths), batch=1)
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    packed, states = attend(*inputs, cu_seqlens=bounds)
    pieces = [attend(*cut(inputs, *span)) for span in bounds.unfold(0, 2, 1).tolist()]
    assert_close(packed, torch.cat([o for o, _ in pieces], dim=2))
    assert_close(states.angle, torch.cat([state.angle for _, state in pieces]))
    again, _ = attend(*inputs, states, cu_seqlens=bounds)
    alone, _ = attend(*cut(inputs, 4, 24), pieces[3][1])
    assert_close(again[:, :, 4:24], alone)


def test_a_state_goes_to_a_file_and_back(tmp_path):
    inputs = make_inputs(9)
    _, state = attend(*inputs)
    state.save(tmp_path / "state.safetensors")
    loaded = load_state(tmp_path / "state.safetensors")
    assert_close(loaded.tensors(), state.tensors(), rtol=0, atol=0)


def test_a_million_tokens_leave_no_drift():
    """The angle after a million steps, one call at a time and all at once, against the sum."""
    turn = torch.full((1, 1, 1000, 1), 0.7310585786300049)
    angle = None
    for _ in range(1000):
        _, angle = travelled(turn, angle)
    exact = math.remainder(1_000_000 * float(turn[0, 0, 0, 0]), 2 * math.pi) % (2 * math.pi)
    _, at_once = travelled(turn.expand(1, 1, 1000, 1).repeat(1, 1, 1000, 1))
    assert abs(float(angle) - exact) < 1e-8
    assert abs(float(at_once) - exact) < 1e-8


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_every_dtype_keeps_within_the_published_tolerance(dtype):
    rounded = tuple(x.detach().to(dtype).requires_grad_() for x in make_inputs(500, batch=1))
    exact = tuple(x.detach().double().requires_grad_() for x in rounded)
    expected, _ = attend(*exact)
    actual, _ = attend(*rounded)
    assert actual.dtype == dtype
    assert relative_error(actual, expected) <= TOLERANCES[dtype].output
    upstream = torch.randn_like(expected).to(dtype)
    for gradient, reference in zip(
        torch.autograd.grad(actual, rounded, upstream),
        torch.autograd.grad(expected, exact, upstream.double()),
        strict=True,
    ):
        assert relative_error(gradient, reference) <= 2 * TOLERANCES[dtype].gradient


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("clocks", [1, 3])
def test_hands_that_point_apart_never_make_a_score_negative(dtype, clocks):
    angles = torch.linspace(0, 2 * math.pi, 1001, dtype=torch.double).unsqueeze(-1)
    hands = clock(angles.expand(-1, clocks), dtype)
    opposite = clock(angles.expand(-1, clocks) + math.pi, dtype)
    assert ((hands * opposite).sum(-1) >= 0).all()
    assert ((hands * opposite).sum(-1) < 1e-5).all()


def test_a_state_without_clocks_is_named():
    q, k, v, turn, gate = make_inputs(4)
    with pytest.raises(InputError, match="no clocks"):
        attend(q, k, v, turn, gate, LinearState.empty(2, 3, 15, 4))
