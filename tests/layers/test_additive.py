import math

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from leap.errors import ConfigError, InputError
from leap.layers import FORMULATIONS, LeapAttention
from leap.layers.additive import FastformerState, log_elu_plus_one
from leap.ops.additive import FocusState, WindowState

LENGTH, WIDTH = 9, 4


def build(formulation, window=None, **options):
    layer = LeapAttention(12, 3, formulation=formulation, window=window, **options).double()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return layer


def split(x):
    return x.unflatten(-1, (3, -1)).transpose(1, 2)


def norm(x):
    """Mean 0, and variance 1 by the unbiased estimate; the 1e-6 is ours."""
    return (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True) + 1e-6).sqrt()


def mean(weight, payload, window):
    """Section 1.1: each row the mean of what it sees, by weights that do not depend on the row.

    The window is a number, or a matrix of who sees whom.
    """
    i, j = torch.arange(payload.shape[2])[:, None], torch.arange(payload.shape[2])
    if isinstance(window, torch.Tensor):
        sees = window
    else:
        sees = (j <= i) & (j > i - (window or payload.shape[2]))
    weights = weight.unsqueeze(2) * sees
    return weights @ payload / weights.sum(-1, keepdim=True)


def additive(layer, x, window):
    v = split(layer.v_proj(x))
    logits = (v * layer.u[:, None]).sum(-1) / math.sqrt(WIDTH)
    return mean(logits.exp(), v, window)


def leap_0_1(layer, x, window, c=5):
    q, k, v = split(layer.q_proj(x)), split(layer.k_proj(x)), split(layer.v_proj(x))
    logits = c * (norm(q) * norm(k)).sum(-1) / WIDTH
    return split(layer.g_proj(x).sigmoid()) * mean(logits.exp(), v, window)


def leap_1_0(layer, x, window, c=10):
    q, f, k, v = (
        norm(split(p(x))) for p in (layer.q_proj, layer.f_proj, layer.k_proj, layer.v_proj)
    )
    weight = (c / WIDTH * (f * k).sum(-1)).exp()
    k, v = mean(weight, k, window), mean(weight, v, window)
    return torch.sigmoid(c / WIDTH * (q * k).sum(-1, keepdim=True)) * v


def leap_elu(layer, x, window):
    q, f, k, v = (split(p(x)) for p in (layer.q_proj, layer.f_proj, layer.k_proj, layer.v_proj))
    weight = F.elu((f * k).sum(-1) / math.sqrt(WIDTH)) + 1
    k, v = mean(weight, k, window), mean(weight, v, window)
    return torch.sigmoid((q * k).sum(-1, keepdim=True) / math.sqrt(WIDTH)) * v


def fastformer(layer, x, window, c=5):
    def additive_attention(y, u):
        y, u = norm(y), norm(u)
        return mean((c * (y * u[:, None]).sum(-1) / WIDTH).exp(), y, window)

    q, k, v = split(layer.q_proj(x)), split(layer.k_proj(x)), split(layer.v_proj(x))
    p = additive_attention(q, layer.q_focus) * k
    return additive_attention(p, layer.k_focus) * v


def leap_mixed(layer, x, window):
    heads = leap_elu(layer, x, window).transpose(1, 2).flatten(-2)
    return split(heads @ layer.o_proj.weight.T)


DEFINITIONS = {
    "additive": additive,
    "leap-0.1": leap_0_1,
    "leap-1.0": leap_1_0,
    "leap-elu": leap_elu,
    "leap-mixed": leap_mixed,
    "fastformer": fastformer,
}


@pytest.mark.parametrize("window", [None, 1, 3, LENGTH + 5])
@pytest.mark.parametrize("formulation", FORMULATIONS)
def test_each_formulation_is_its_formula(formulation, window, make_tokens, assert_same):
    layer, x = build(formulation, window), make_tokens(LENGTH)
    expected = DEFINITIONS[formulation](layer, x, window).transpose(1, 2).flatten(-2)
    assert_same(layer(x)[0], expected, layer, x)


@pytest.mark.parametrize("window", [None, 1, 3, LENGTH + 5])
@pytest.mark.parametrize("formulation", FORMULATIONS)
def test_each_is_so_in_both_directions(formulation, window, make_tokens, assert_same):
    layer, x = build(formulation, window, form="bidirectional"), make_tokens(LENGTH)
    apart = (torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)).abs()
    expected = layer.join(DEFINITIONS[formulation](layer, x, apart < (window or LENGTH)))
    y, state = layer(x)
    assert_same(y, expected, layer, x)
    assert state is None


def test_in_both_directions_it_goes_on_from_no_state(make_tokens):
    layer, x = build("leap-1.0", form="bidirectional"), make_tokens(LENGTH)
    _, state = build("leap-1.0")(x)
    with pytest.raises(InputError, match="goes on from no state; use form='causal'"):
        layer(x, state)
    with pytest.raises(InputError, match="takes no steps; use form='causal'"):
        layer.step(x[:, 0], None)
    with pytest.raises(ConfigError, match="alibi is for form='causal'"):
        build("leap-1.0", form="bidirectional", alibi=True)


def test_another_rescale_takes_the_place_of_the_formulation_s(make_tokens):
    x = make_tokens(LENGTH)
    for name in ("leap-0.1", "leap-1.0", "fastformer"):
        layer = build(name, rescale=3.0)
        expected = DEFINITIONS[name](layer, x, None, c=3).transpose(1, 2).flatten(-2)
        assert_close(layer(x)[0], expected)


def test_no_rescale_means_no_norms(make_tokens):
    layer, x = build("leap-1.0", rescale=None), make_tokens(LENGTH)
    q, f, k, v = (split(layer.get_submodule(f"{name}_proj")(x)) for name in "qfkv")
    weight = ((f * k).sum(-1) / math.sqrt(WIDTH)).exp()
    gate = torch.sigmoid((q * mean(weight, k, None)).sum(-1, keepdim=True) / math.sqrt(WIDTH))
    expected = gate * mean(weight, v, None)
    assert_close(layer(x)[0], expected.transpose(1, 2).flatten(-2))


@pytest.mark.parametrize("formulation", FORMULATIONS)
def test_a_window_ends_where_it_says(formulation, make_tokens):
    # Fastformer looks through its window twice, so sees nearly twice as far.
    window, sight = 3, 3 if formulation != "fastformer" else 5
    layer, x = build(formulation, window), make_tokens(LENGTH).detach()
    changed = x.clone()
    changed[:, 2] = -7
    before, after = layer(x)[0], layer(changed)[0]
    assert torch.equal(before[:, 2 + sight :], after[:, 2 + sight :])
    assert not torch.isclose(before[:, 1 + sight], after[:, 1 + sight]).any()


@pytest.mark.parametrize("formulation", FORMULATIONS)
def test_the_focus_explains_what_comes_out(formulation, make_tokens):
    layer, x = build(formulation), make_tokens(LENGTH)
    focus = layer.focus(x)
    weight = focus.logits.exp()
    if formulation == "additive":
        expected = mean(weight, split(layer.v_proj(x)), None)
    elif formulation == "leap-0.1":
        expected = focus.gate * mean(weight, split(layer.v_proj(x)), None)
    elif formulation == "fastformer":
        met = mean(focus.query_logits.exp(), norm(split(layer.q_proj(x))), None)
        met = norm(met * split(layer.k_proj(x)))
        expected = mean(weight, met, None) * split(layer.v_proj(x))
    else:
        v = layer.norm(split(layer.v_proj(x)))
        expected = focus.gate.unsqueeze(-1) * mean(weight, v, None)
    expected = expected.transpose(1, 2).flatten(-2)
    if formulation == "leap-mixed":
        expected = layer.o_proj(expected)
    assert_close(layer(x)[0], expected)


def test_the_focus_goes_on_from_a_state(make_tokens):
    layer, x = build("leap-1.0"), make_tokens(LENGTH)
    whole = layer.focus(x)
    tail = layer.focus(x[:, 4:], layer(x[:, :4])[1])
    assert_close(tail.logits, whole.logits[:, :, 4:])
    assert_close(tail.gate, whole.gate[:, :, 4:])


def test_the_logits_stay_within_the_rescale(make_tokens):
    layer, x = build("leap-1.0"), make_tokens(100)
    for scale in (1e-3, 1.0, 1e6):
        assert layer.focus(scale * x).logits.abs().max() <= 10 * (WIDTH - 1) / WIDTH + 1e-9


def test_a_constant_head_is_normed_to_zeros_with_a_finite_gradient():
    layer = build("leap-1.0")
    x = torch.full((1, 3, 1, WIDTH), 2.0, dtype=torch.double, requires_grad=True)
    y = layer.norm(x)
    assert (y == 0).all()
    assert torch.autograd.grad(y[..., 0].sum(), x)[0].isfinite().all()


def test_elu_weights_become_logits_without_rounding_to_zero():
    x = torch.tensor([-800.0, -1.0, 0.0, 2.0, 1e9], dtype=torch.double, requires_grad=True)
    expected = torch.tensor([-800.0, -1.0, 0.0, math.log(3), math.log(1e9 + 1)]).double()
    assert_close(log_elu_plus_one(x), expected, rtol=1e-7, atol=1e-7)
    assert torch.autograd.gradcheck(log_elu_plus_one, x[1:4:2])


@pytest.mark.parametrize("formulation", ["leap-1.0", "fastformer"])
@pytest.mark.parametrize("window", [None, 3])
def test_each_keeps_the_state_it_needs(formulation, window, make_tokens):
    _, state = build(formulation, window)(make_tokens(LENGTH))
    kind = FocusState if window is None else WindowState
    parts = (state.query, state.key) if formulation == "fastformer" else (state,)
    assert all(isinstance(part, kind) for part in parts)


def test_halves_of_a_sequence_merge_except_in_fastformer(make_tokens):
    x, more = make_tokens(LENGTH), make_tokens(3, seed=1)
    for name in ("additive", "leap-0.1", "leap-1.0", "leap-elu"):
        layer = build(name)
        _, whole = layer(x)
        merged = layer(x[:, :4])[1].merge(layer(x[:, 4:])[1])
        assert_close(layer(more, merged)[0], layer(more, whole)[0])
    layer = build("fastformer")
    with pytest.raises(InputError, match="fastformer cannot be merged"):
        layer(x[:, :4])[1].merge(layer(x[:, 4:])[1])


def test_fastformer_s_state_is_two_of_the_same_length(make_tokens):
    mask = torch.rand(2, LENGTH) < 0.5
    _, state = build("fastformer")(make_tokens(LENGTH), key_mask=mask)
    assert isinstance(state, FastformerState)
    assert_close(state.length, state.key.length)
    assert_close(state.length, mask.sum(1))


@pytest.mark.parametrize(
    ("formulation", "n_projections", "n_vectors"),
    [
        ("additive", 1, 1),
        ("leap-0.1", 4, 0),
        ("leap-1.0", 4, 0),
        ("leap-elu", 4, 0),
        ("leap-mixed", 5, 0),
        ("fastformer", 3, 2),
    ],
)
def test_sizes_are_those_of_the_formulas(formulation, n_projections, n_vectors):
    layer = LeapAttention(128, 4, formulation=formulation)
    expected = n_projections * 128 * 128 + n_vectors * 128
    assert sum(p.numel() for p in layer.parameters()) == expected


@pytest.mark.parametrize("formulation", FORMULATIONS)
def test_dropout_acts_in_training_alone(formulation, make_tokens):
    layer, x = build(formulation, dropout=0.5), make_tokens(LENGTH)
    assert not torch.equal(layer(x)[0], layer(x)[0])
    assert torch.equal(layer.eval()(x)[0], layer(x)[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"formulation": "leap-2.0"}, r"formulation='leap-2.0'.*additive, leap-0.1, leap-1.0"),
        ({"window": 0}, r"window=0 .*give 1"),
        ({"window": -4}, r"window=-4 .*None for all"),
        ({"formulation": "leap-elu", "rescale": 5.0}, r"'leap-elu' has no norms"),
        ({"formulation": "leap-1.0", "rescale": 0.0}, r"rescale=0.0"),
        ({"formulation": "leap-1.0", "hidden_size": 3}, r"heads of width 1"),
    ],
)
def test_bad_settings_are_errors_that_say_what_would_work(options, message):
    with pytest.raises(ConfigError, match=message):
        LeapAttention(**{"hidden_size": 12, "n_head": 3} | options)


def test_a_global_state_does_not_suit_a_window(make_tokens):
    _, state = build("leap-1.0")(make_tokens(LENGTH))
    with pytest.raises(InputError, match="goes on from a WindowState, not from a FocusState"):
        build("leap-1.0", 3)(make_tokens(LENGTH), state)
