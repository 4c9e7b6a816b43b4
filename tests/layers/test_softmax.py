import math

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from leap.errors import ConfigError
from leap.layers import SoftmaxAttention
from leap.ops.features import rotary

LENGTH = 7


def build(**options):
    return SoftmaxAttention(12, 3, **options).double()


def definition(layer, x, source, sees, placed=lambda x: x):
    q, k, v = layer.q_proj(x), layer.k_proj(source), layer.v_proj(source)
    q, k, v = (y.unflatten(-1, (3, -1)).transpose(1, 2) for y in (q, k, v))
    scores = placed(q) @ placed(k).mT / math.sqrt(q.shape[-1])
    weights = scores.masked_fill(sees == 0, -math.inf).softmax(-1)
    return layer.o_proj((weights @ v).transpose(1, 2).flatten(-2))


@pytest.mark.parametrize("turn", [False, True])
def test_causal_attention_is_the_definition(turn, make_tokens, assert_same):
    layer, x = build(rotary=turn, value_width=5), make_tokens(LENGTH)
    sees = torch.ones(LENGTH, LENGTH).tril()
    expected = definition(layer, x, x, sees, rotary if turn else lambda x: x)
    assert_same(layer(x)[0], expected, layer, x)


def test_cross_attention_is_the_definition_whole_and_in_pieces(make_tokens, assert_same):
    layer, x, source = build(form="cross"), make_tokens(3), make_tokens(LENGTH, seed=1)
    visible = torch.tensor([2, 5, 7])
    sees = torch.arange(LENGTH) < visible.unsqueeze(-1)
    expected = definition(layer, x, source, sees)
    assert_same(layer(x, source=source, visible=visible)[0], expected, layer, x, source)

    _, state = layer(x[:, :0], source=source[:, :2])
    y0, state = layer.step(x[:, 0], state)
    y1, state = layer.step(x[:, 1], state, source=source[:, 2:5])
    y2, state = layer.step(x[:, 2], state, source=source[:, 5:])
    assert_same(torch.stack([y0, y1, y2], dim=1), expected, layer, x, source)


def test_a_window_is_the_same_whole_and_in_pieces_and_bounds_the_state(make_tokens, assert_same):
    layer, x, source = build(form="cross", window=3), make_tokens(4), make_tokens(9, seed=1)
    visible = torch.tensor([2, 5, 8, 9])
    order = torch.arange(9)
    sees = (order < visible.unsqueeze(-1)) & (order >= visible.unsqueeze(-1) - 3)
    expected = definition(layer, x, source, sees)
    assert_same(layer(x, source=source, visible=visible)[0], expected, layer, x, source)

    state, outputs, earlier = None, [], []
    for i, (start, end) in enumerate([(0, 2), (2, 5), (5, 8), (8, 9)]):
        y, state = layer.step(x[:, i], state, source=source[:, start:end])
        outputs.append(y)
        earlier.append(state.without_values())
        assert state.k.shape[2] <= 3
    assert_same(torch.stack(outputs, dim=1), expected, layer, x, source)
    assert state.length.tolist() == [9] * len(x)

    weights = layer.weights(x, source=source)
    assert_close(weights[..., :6], torch.zeros_like(weights[..., :6]))
    before = layer.shares(x, state, earlier)
    expected = torch.stack([weights[..., :n].sum(-1) for n in (2, 5, 8, 9)], dim=-1)
    assert_close(before, expected)


@pytest.mark.parametrize(("form", "window"), [("causal", 3), ("bidirectional", 3), ("cross", 0)])
def test_a_window_is_for_the_source_and_shows_something(form, window):
    with pytest.raises(ConfigError, match="a window is for form='cross', of 1 or more"):
        build(form=form, window=window)


def test_a_gate_is_the_forgetting_transformer(make_tokens, assert_same):
    layer, x = build(gate="head"), make_tokens(LENGTH)
    torch.nn.init.normal_(layer.gate.last.weight)
    total = F.logsigmoid(layer.gate.net(x)).transpose(1, 2).cumsum(-1)
    q, k, v = (layer.split(proj(x)) for proj in (layer.q_proj, layer.k_proj, layer.v_proj))
    scores = q @ k.mT / 2 + total.unsqueeze(-1) - total.unsqueeze(-2)
    weights = scores.masked_fill(torch.ones(LENGTH, LENGTH).tril() == 0, -math.inf).softmax(-1)
    assert_same(layer(x)[0], layer.o_proj(layer.join(weights @ v)), layer, x)
    assert_close(layer.weights(x), weights)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gate": "channel"}, r"gate='channel'.*use gate='head'"),
        ({"gate": "head", "form": "bidirectional"}, r"gate='head'.*use it with form='causal'"),
        ({"gate": "head", "form": "cross"}, r"gate='head'.*use it with form='causal'"),
    ],
)
@pytest.mark.usefixtures("shapes_unchecked")
def test_gates_that_do_not_fit_are_named(options, message):
    with pytest.raises(ConfigError, match=message):
        build(**options)


def test_positions_may_be_given(make_tokens):
    layer, x = build(rotary=True), make_tokens(LENGTH)
    at = torch.arange(100, 100 + LENGTH).expand(2, LENGTH)
    assert_close(layer(x, positions=at)[0], layer(x)[0])  # only differences count
    spread = layer(x, positions=3 * at)[0]
    assert not torch.allclose(spread, layer(x)[0])


def test_dropout_falls_on_scores_in_training_alone(make_tokens):
    layer, x = build(dropout=0.5), make_tokens(LENGTH)
    assert not torch.equal(layer(x)[0], layer(x)[0])
    assert torch.equal(layer.eval()(x)[0], layer(x)[0])


@pytest.mark.parametrize("form", ["bidirectional", "cross"])
def test_the_naive_form_gives_the_same_numbers(form):
    layers = []
    for naive in (False, True):
        torch.manual_seed(0)
        layers.append(SoftmaxAttention(8, 2, form=form, naive=naive).double())
    x, mask = torch.randn(2, 6, 8).double(), torch.tensor([[True] * 6, [True] * 4 + [False] * 2])
    inputs = {"key_mask": mask} | ({"source": x} if form == "cross" else {})
    assert_close(layers[1](x, **inputs)[0], layers[0](x, **inputs)[0])
    with pytest.raises(ConfigError, match="naive=True is for form='bidirectional' or 'cross'"):
        SoftmaxAttention(8, 2, naive=True)
