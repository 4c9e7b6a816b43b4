import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from leap.errors import ConfigError, InputError
from leap.ops import features
from leap.ops.features import FEATURES, feature_map, positional, proportional, rotary

WIDTH = 6


def make_x(t=5, *, width=WIDTH, seed=0):
    options = {"dtype": torch.double, "generator": torch.Generator().manual_seed(seed)}
    return torch.randn(2, 3, t, width, **options).requires_grad_()


@pytest.mark.parametrize(
    ("name", "formula"),
    {
        "relu": lambda x: max(x, 0.0),
        "elu_plus_one": lambda x: x + 1 if x > 0 else math.exp(x),
        "square": lambda x: max(x, 0.0) ** 2,
        "power": lambda x: max(x, 0.0) ** 2,
        "cubic": lambda x: x**3,
        "exp": math.exp,
        "sinh": lambda x: max(math.sinh(x), 0.0),
        "neg_sinh": math.sinh,
    }.items(),
)
def test_each_map_is_its_formula(name, formula):
    x = make_x()
    expected = torch.tensor([formula(value) for value in x.flatten().tolist()], dtype=x.dtype)
    assert_close(FEATURES[name].key(x).flatten(), expected)


@pytest.mark.parametrize("name", FEATURES)
def test_maps_have_the_gradient_of_their_formula(name):
    x = make_x(2)
    assert torch.autograd.gradcheck(FEATURES[name].key, x)
    assert torch.autograd.gradcheck(FEATURES[name].query, x)


@pytest.mark.parametrize("name", FEATURES)
def test_a_query_is_mapped_as_a_key_up_to_its_scale(name):
    x = make_x()
    query, key = FEATURES[name].query(x), FEATURES[name].key(x)
    assert_close(
        query / query.norm(dim=-1, keepdim=True).clamp_min(1e-300),
        key / key.norm(dim=-1, keepdim=True).clamp_min(1e-300),
    )


@pytest.mark.parametrize("name", FEATURES)
def test_only_maps_that_say_so_are_signed(name):
    x = make_x(50)
    assert bool((FEATURES[name].key(x) < 0).any()) == FEATURES[name].signed
    assert bool((FEATURES[name].query(x) < 0).any()) == FEATURES[name].signed


@pytest.mark.parametrize("dtype", [torch.double, torch.float, torch.bfloat16, torch.half], ids=str)
@pytest.mark.parametrize("name", FEATURES)
@settings(max_examples=20)
@given(exponent=st.floats(-18, 15), sign=st.sampled_from([-1, 1]))
def test_no_map_gives_an_infinity_or_changes_the_dtype(name, dtype, exponent, sign):
    size = min(10.0**exponent, torch.finfo(dtype).max)
    x = torch.tensor([sign * size, 1.0, -1.0, 0.0], dtype=dtype, requires_grad=True)
    for phi in (FEATURES[name].key, FEATURES[name].query):
        y = phi(x)
        (gradient,) = torch.autograd.grad(y.sum(), x)
        assert y.dtype == dtype
        assert y.isfinite().all()
        assert gradient.isfinite().all()


def test_elu_plus_one_stays_positive_far_below_zero():
    assert features.elu_plus_one(torch.tensor([-50.0])) > 0


def test_parameters_of_a_map_are_given_by_name():
    x = make_x()
    assert_close(feature_map("power", degree=3.0).key(x), features.relu(x) ** 3)
    scaled = feature_map("exp", scale=0.5)
    assert_close(scaled.key(x), (x / 2).exp())
    assert_close(scaled.query(x).log() - scaled.query(x)[..., :1].log(), (x - x[..., :1]) / 2)


def test_an_unknown_map_is_an_error_that_lists_the_known():
    with pytest.raises(ConfigError, match=r"'rleu'.* relu, elu_plus_one, .*neg_sinh"):
        feature_map("rleu")


def test_an_unknown_parameter_is_an_error_that_lists_the_known():
    with pytest.raises(ConfigError, match="exp has no parameter 'degree'; it has scale"):
        feature_map("exp", degree=2.0)
    with pytest.raises(ConfigError, match="it has none"):
        feature_map("relu", degree=2.0)
    with pytest.raises(ConfigError, match=r"degree=0\.5"):
        feature_map("power", degree=0.5).key(make_x())


def test_proportional_reweights_scores_by_the_cosine_of_the_difference():
    q, k = make_x(4), make_x(7, seed=1)
    p, s = torch.rand(2, 3, 4).double(), torch.rand(2, 3, 7).double()
    cosine = torch.cos(math.pi / 2 * (p.unsqueeze(-1) - s.unsqueeze(-2)))
    assert_close(proportional(q, p) @ proportional(k, s).mT, (q @ k.mT) * cosine)
    assert torch.autograd.gradcheck(proportional, (q, p.requires_grad_()))


def test_proportional_puts_the_sine_first():
    x = make_x()
    assert_close(proportional(x, torch.ones(2, 3, 5).double())[..., :WIDTH], x)


@pytest.mark.parametrize("dtype", [torch.double, torch.float], ids=str)
def test_proportional_features_are_nowhere_negative(dtype):
    x = torch.ones(1, 1, 3, 1, dtype=dtype)
    p = torch.tensor([[[0.0, 0.5, 1.0]]], dtype=dtype)
    assert (proportional(x, p) >= 0).all()


def test_positional_is_proportional_with_the_share_of_the_length():
    x = make_x(5)
    p = (torch.arange(1, 6).double() / 8).expand(2, 3, 5)
    assert_close(positional(x, 8), proportional(x, p))


def test_positional_goes_on_from_given_positions_row_by_row():
    x = make_x(8)
    whole = positional(x, 8)
    assert_close(positional(x[:, :, 3:], 8, torch.arange(3, 8)), whole[:, :, 3:])
    positions = torch.tensor([[0, 1], [6, 7]])
    some = positional(torch.stack([x[0, :, :2], x[1, :, 6:]]), 8, positions)
    assert_close(some, torch.stack([whole[0, :, :2], whole[1, :, 6:]]))


def test_positional_takes_a_length_for_each_row():
    x = make_x(3)
    each = positional(x, torch.tensor([3, 9]))
    assert_close(each[:1], positional(x[:1], 3))
    assert_close(each[1:], positional(x[1:], 9))


def test_rotary_scores_depend_on_the_difference_of_positions_alone():
    q, k = make_x(1).expand(2, 3, 4, WIDTH), make_x(1, seed=1).expand(2, 3, 4, WIDTH)
    at = torch.tensor([3, 4, 10, 1003])
    scores = (rotary(q, at + 7) * rotary(k, at)).sum(-1)
    assert_close(scores, scores[..., :1].expand_as(scores))


def test_rotary_turns_each_pair_by_its_own_angle():
    x = make_x(3, width=4)
    y = rotary(x, base=100.0)
    for m, speed in enumerate([1.0, 0.1]):
        pair = torch.complex(x[..., m], x[..., m + 2])
        angle = torch.polar(torch.ones(3).double(), torch.arange(3).double() * speed)
        assert_close(torch.complex(y[..., m], y[..., m + 2]), pair * angle)
    assert torch.autograd.gradcheck(rotary, x)


def test_rotary_is_exact_after_ten_million_tokens():
    x = make_x(4)
    at = torch.arange(10**7, 10**7 + 4)
    assert_close(rotary(x.float(), at), rotary(x, at).float(), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.half], ids=str)
def test_placing_maps_keep_the_dtype(dtype):
    x = make_x().to(dtype)
    assert proportional(x, torch.rand(2, 3, 5)).dtype == dtype
    assert positional(x, 8).dtype == dtype
    assert rotary(x).dtype == dtype


def test_a_position_beyond_the_length_is_an_error_that_names_it():
    with pytest.raises(InputError, match=r"position 4 lies beyond length=3"):
        positional(make_x(5), 3)
    with pytest.raises(InputError, match=r"position 9 lies beyond length=9"):
        positional(make_x(2), 9, torch.tensor([8, 9]))
    with pytest.raises(InputError, match=r"position 2 lies beyond"):
        positional(make_x(3), torch.tensor([3, 2]))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: proportional(x, torch.rand(2, 3, 4)), r"p is \[2, 3, 4\].*axis 2"),
        (lambda x: proportional(x.long(), torch.rand(2, 3, 5)), r"x has dtype torch.int64"),
        (lambda x: proportional(x[0], torch.rand(2, 3, 5)), r"x is \[3, 5, 6\]"),
        (lambda x: positional(x, 9, torch.arange(4)), r"positions are \[4\].* \[5\] or \[2, 5\]"),
        (lambda x: rotary(x, torch.arange(5.0)), "positions are .*torch.float32"),
        (lambda x: rotary(x[..., :5]), r"width 5 must be even"),
    ],
)
@pytest.mark.usefixtures("shapes_unchecked")
def test_bad_input_is_named(call, message):
    with pytest.raises(InputError, match=message):
        call(make_x())


@pytest.mark.usefixtures("shapes_unchecked")
def test_maps_compile_whole():
    x = make_x().detach().float()

    def everything(x):
        mapped = [phi.key(x) for phi in FEATURES.values()] + [FEATURES["exp"].query(x)]
        return [*mapped, positional(x, 9), rotary(x, torch.arange(5) + 1)]

    assert_close(torch.compile(everything, fullgraph=True, backend="aot_eager")(x), everything(x))
