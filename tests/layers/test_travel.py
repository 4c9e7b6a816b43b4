"""Promises of layers whose tokens travel."""

import math

import pytest
import torch
from torch.testing import assert_close

from leap.errors import ConfigError, InputError
from leap.layers import LeapformerAttention, SoftmaxAttention
from leap.layers.travel import Rotation, Steps
from leap.ops.features import elu_plus_one, rotary, rotary_speeds


def build(*, seed=0, hidden_size=12, n_head=3, **options):
    torch.manual_seed(seed)
    layer = LeapformerAttention(hidden_size, n_head, proportion="travelled", **options).double()
    for name, parameter in layer.named_parameters():
        if "weight" in name:
            torch.nn.init.normal_(parameter, std=0.5)
    return layer.eval()


def weights(layer, x, source=None):
    """Token-to-token weights by the formula, without gates."""
    source = x if source is None else source
    q = elu_plus_one(layer.split(layer.q_proj(x)))
    k = elu_plus_one(layer.split(layer.k_proj(source)))
    omega = layer.steps.log_frequency.exp()[:, None, None, :]
    places = layer.steps.lengths(source).cumsum(2)
    asked = places if layer.query_steps is None else layer.query_steps.lengths(x).cumsum(2)
    gap = asked[:, :, :, None] - places[:, :, None, :]
    return (q @ k.mT) * (1 + (omega * gap[..., None]).cos().mean(-1)) / 2


@pytest.mark.parametrize("clocks", [1, 2])
@pytest.mark.parametrize("form", ["causal", "bidirectional", "cross"])
def test_scores_are_weighed_by_the_distance_between_places(form, clocks):
    layer = build(form=form, clocks=clocks, feature="elu_plus_one")
    x, source = torch.randn(2, 2, 9, 12).double().unbind(0)
    given = {"source": source} if form == "cross" else {}
    scores = weights(layer, x, **given)
    if form == "causal":
        scores = scores.tril()
    expected = scores / scores.sum(-1, keepdim=True)
    assert_close(layer.weights(x, **given), expected, rtol=1e-6, atol=1e-9)
    v = layer.split(layer.v_proj(given.get("source", x)))
    y, _ = layer(x, **given)
    assert_close(y, layer.o_proj(layer.join(expected @ v)), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("masked", [False, True])
def test_divided_places_of_equal_steps_are_cosformer(masked):
    layer = build(form="bidirectional", places="divided", constant_steps=True)
    cosformer = LeapformerAttention(12, 3, form="bidirectional", proportion="fixed").double()
    cosformer.load_state_dict(layer.state_dict(), strict=False)
    x = torch.randn(2, 20, 12).double()
    mask = torch.arange(20) < torch.tensor([[14], [20]]) if masked else None
    actual, expected = layer(x, key_mask=mask)[0], cosformer.eval()(x, key_mask=mask)[0]
    real = torch.ones(2, 20, dtype=torch.bool) if mask is None else mask
    assert_close(actual[real], expected[real], rtol=0, atol=1e-12)


def test_divided_places_run_from_the_first_step_to_one():
    layer = build(form="bidirectional", places="divided")
    p, s = layer.proportions(torch.randn(2, 9, 12).double())
    assert_close(p[..., -1], torch.ones(2, 3).double())
    assert (p.diff(dim=-1) > 0).all() and (p > 0).all()
    assert_close(p, s)


def test_a_fresh_layer_steps_about_one_and_its_clocks_turn_a_quarter_in_1_to_64():
    steps = Steps(64, 4)
    lengths = steps.lengths(0.1 * torch.randn(2, 50, 64))
    assert_close(lengths, torch.ones_like(lengths), rtol=0, atol=0.2)
    quarters = math.pi / 2 / steps.log_frequency.exp().flatten()
    assert_close(quarters, torch.tensor([1.0, 4.0, 16.0, 64.0]))


def test_steps_and_clocks_learn():
    for form in ("causal", "bidirectional", "cross"):
        layer = build(form=form)
        x = torch.randn(2, 9, 12).double()
        y, _ = layer(x, source=torch.randn(2, 7, 12).double() if form == "cross" else None)
        y.square().sum().backward()
        travelling = [p for n, p in layer.named_parameters() if "steps" in n]
        assert len(travelling) == (5 if form == "cross" else 3)
        for parameter in travelling:
            assert parameter.grad.abs().max() > 1e-6


def test_steps_may_be_shared_constant_or_read_off_by_a_net():
    x = torch.randn(2, 9, 12)
    shared = Steps(12, 3, per_head=False).lengths(x)
    assert_close(shared[:, 0], shared[:, 2])
    assert Steps(12, 3, learned=False).lengths(x).eq(1).all()
    sizes = [sum(p.numel() for p in Steps(12, 3, hidden=n).parameters()) for n in (None, 4)]
    assert sizes == [12 * 3 + 3 + 3, (12 * 4 + 4) + (4 * 3 + 3) + 3]


def test_queries_of_a_source_go_on_from_where_they_were():
    layer = build(form="cross")
    x, source = torch.randn(2, 9, 12).double(), torch.randn(2, 7, 12).double()
    whole, _ = layer(x, source=source)
    _, read = layer(x[:, :0], source=source)
    asked, pieces = None, []
    for piece in x.split([1, 3, 5], dim=1):
        angles, asked = layer.walk(piece, asked)
        y, read = layer(piece, read, angles=angles)
        pieces.append(y)
    assert_close(torch.cat(pieces, dim=1), whole)
    with pytest.raises(InputError, match=r"give angles, which layer\.walk"):
        layer(x, read)


def test_queries_can_be_taken_back():
    layer = build(form="cross")
    x = torch.randn(2, 9, 12).double()
    _, before = layer.walk(x[:, :4])
    _, ahead = layer.walk(x[:, 4:], before.record())
    _, expected = layer.walk(x[:, :6])
    assert_close(ahead.rollback(3).angle, expected.angle)
    _, second = layer.walk(x[:, 4:])
    assert_close(before.merge(second).angle, ahead.angle)
    with pytest.raises(ConfigError, match="only form='cross'"):
        build().walk(x)


def test_a_layer_that_fades_both_ways_sees_near_tokens_more():
    layer = LeapformerAttention(
        12, 3, form="bidirectional", proportion="none", alibi=True, feature="elu_plus_one"
    ).double()
    found = layer.weights(torch.zeros(1, 41, 12).double())[0, 0, 20]
    assert (found[:20].diff() > 0).all() and (found[20:].diff() < 0).all()
    assert_close(found[:20], found[21:].flip(0))


def test_places_that_are_read_on_from_need_no_last_one():
    layer = build(form="bidirectional")
    x = torch.randn(2, 9, 12).double()
    visible = torch.tensor([3] * 3 + [6] * 3 + [9] * 3)
    whole, _ = layer(x, visible=visible)
    state, pieces = None, []
    for piece in x.split(3, dim=1):
        y, state = layer(piece, state)
        pieces.append(y)
    assert_close(torch.cat(pieces, dim=1), whole)


@pytest.mark.parametrize("kind", [SoftmaxAttention, LeapformerAttention])
def test_a_selective_rotation_that_reads_nothing_is_rotary(kind):
    options = {"feature": "elu_plus_one"} if kind is LeapformerAttention else {}
    torch.manual_seed(0)
    layer = kind(16, 2, rotary="selective", **options).double()
    plain = kind(16, 2, rotary=True, **options).double()
    plain.load_state_dict(layer.state_dict(), strict=False)
    x = torch.randn(2, 70, 16).double()
    assert (layer(x)[0] - plain(x)[0]).abs().max() > 1e-4
    torch.nn.init.zeros_(layer.rotation.net.weight)
    assert_close(layer(x)[0], plain(x)[0], rtol=1e-6, atol=1e-7)


def test_a_selective_rotation_turns_by_the_sum_of_its_turns():
    torch.manual_seed(0)
    layer = SoftmaxAttention(8, 2, rotary="selective").double()
    torch.nn.init.normal_(layer.rotation.net.weight)
    x = torch.randn(1, 6, 8).double()
    q, k, v = (layer.split(net(x)) for net in (layer.q_proj, layer.k_proj, layer.v_proj))
    turn = (1 + layer.split(layer.rotation.net(x))) * rotary_speeds(4)
    angle = turn.cumsum(2)

    # One token at a time, as complex numbers.
    def turned(heads):
        first, second = heads.chunk(2, dim=-1)
        return torch.complex(first, second) * torch.exp(1j * angle)

    scores = (turned(q) @ turned(k).conj().mT).real / math.sqrt(4)
    hidden = torch.ones(6, 6).triu(1).bool()
    expected = layer.o_proj(layer.join(scores.masked_fill(hidden, -math.inf).softmax(-1) @ v))
    assert_close(layer(x)[0], expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("form", ["bidirectional", "cross"])
def test_a_selective_rotation_is_for_the_causal_form(form):
    with pytest.raises(ConfigError, match=r"rotary='selective'.*use it with form='causal'"):
        SoftmaxAttention(8, 2, form=form, rotary="selective")


def test_states_of_a_selective_rotation_are_not_merged():
    layer = SoftmaxAttention(8, 2, rotary="selective")
    _, state = layer(torch.randn(1, 3, 8))
    with pytest.raises(InputError, match="selective rotary positions cannot be merged"):
        state.merge(state)


def test_rotations_can_be_equalised():
    rotation = Rotation(8, 2, 4)
    assert rotation.part == "rotations"
    assert rotation(torch.randn(1, 5, 8)).shape == (1, 2, 5, 2)
    assert rotary(torch.randn(1, 2, 5, 4)).shape == (1, 2, 5, 4)
