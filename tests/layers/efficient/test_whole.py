"""What every efficient attention promises, whatever is inside."""

from itertools import pairwise

import pytest
import torch
from torch.testing import assert_close

from leap.errors import ConfigError, InputError
from leap.layers import LeapAttention
from leap.layers.efficient import EFFICIENT, WholeSequenceAttention

LENGTH = 21
# As small as it takes for a sequence of this length to be long.
OPTIONS = {
    "bigbird": {"block_size": 2, "n_random": 1},
    "informer": {"n_query": 4, "n_sample": 18},
    "linformer": {"length": LENGTH, "n_mixture": 5},
    "nystromformer": {"n_landmark": 4},
    "reformer": {"chunk_size": 4, "max_bucket": 6},
    "s4d": {"n_state": 6},
    "skyformer": {"n_landmark": 7},
}
CASES = {
    **{name: (name, OPTIONS.get(name, {})) for name in EFFICIENT},
    "bigbird-kept": ("bigbird", {**OPTIONS["bigbird"], "recompute": False}),
    "nystromformer-conv": ("nystromformer", {"n_landmark": 4, "conv_kernel": 3}),
    "no-bias": ("performer", {"bias": False}),
}


def build(case, **more):
    name, options = CASES[case]
    layer = EFFICIENT[name](12, 3, **{**options, **more}).double()
    if name != "s4d":  # Its parameters have their places to begin from.
        for parameter in layer.parameters():
            torch.nn.init.normal_(parameter, std=0.5)
    return layer


@pytest.fixture(params=CASES)
def layer(request):
    return build(request.param)


PADS = {
    "left": lambda t: torch.arange(t) >= torch.tensor([[5], [0]]),
    "right": lambda t: torch.arange(t) < torch.tensor([[t - 6], [3]]),
    "nearly-all": lambda t: torch.arange(t) < torch.tensor([[t], [1]]),
    "holes": lambda t: torch.rand(2, t, generator=torch.Generator().manual_seed(1)) < 0.6,
}


@pytest.mark.parametrize("pads", PADS)
def test_pads_anywhere_change_nothing(layer, pads, make_tokens, assert_same):
    x, mask = make_tokens(LENGTH), PADS[pads](LENGTH)
    padded, _ = layer(x, key_mask=mask)
    for row in range(2):
        alone, _ = layer(x[row : row + 1, mask[row]])
        assert_same(padded[row : row + 1, mask[row]], alone, layer, x)


def test_pads_may_hold_anything(layer, make_tokens):
    if not isinstance(layer, WholeSequenceAttention):
        pytest.skip("does not take pads out")
    x, mask = make_tokens(LENGTH).detach(), PADS["holes"](LENGTH)
    junk = x.masked_fill(~mask.unsqueeze(-1), torch.nan)
    y, expected = (layer(tokens, key_mask=mask)[0][mask] for tokens in (junk, x))
    assert_close(y, expected)


@pytest.mark.parametrize("t", [1, 2, 3, LENGTH])
def test_sequences_of_any_length_have_finite_gradients(layer, t, make_tokens):
    x = make_tokens(t)
    y, state = layer(x)
    gradients = torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])
    assert y.shape == x.shape and state is None
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_gradients_are_those_of_finite_differences(layer, make_tokens):
    x = make_tokens(LENGTH, batch=1)
    assert torch.autograd.gradcheck(lambda x: layer(x)[0], x, fast_mode=True)


def test_a_row_of_nothing_but_pads_is_finite(layer, make_tokens):
    x = make_tokens(LENGTH)
    mask = torch.tensor([[False], [True]]).expand(2, LENGTH)
    y, _ = layer(x, key_mask=mask)
    gradients = torch.autograd.grad(y.sum(), [x, *layer.parameters()])
    assert y.isfinite().all() and all(gradient.isfinite().all() for gradient in gradients)


def test_no_tokens_give_none(layer, make_tokens):
    assert layer(make_tokens(0))[0].shape == (2, 0, 12)


def test_packed_sequences_are_as_if_alone(layer, make_tokens, assert_same):
    x, bounds = make_tokens(LENGTH, batch=1), torch.tensor([0, 12, 13, 13, LENGTH])
    packed, _ = layer(x, cu_seqlens=bounds)
    alone = [layer(x[:, start:end])[0] for start, end in pairwise(bounds) if end > start]
    assert_same(packed, torch.cat(alone, dim=1), layer, x)


@pytest.mark.parametrize("case", CASES)
def test_what_is_drawn_is_saved(case, make_tokens):
    layer, again, x = build(case), build(case), make_tokens(LENGTH)
    again.load_state_dict(layer.state_dict())
    assert torch.equal(again(x)[0], layer(x)[0])


@pytest.mark.parametrize("case", CASES)
def test_what_is_drawn_comes_from_the_seed(case):
    def drawn(seed):
        torch.manual_seed(seed)
        return build(case).state_dict()

    first, second = drawn(7), drawn(7)
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("case", CASES)
def test_dropout_acts_in_training_alone(case, make_tokens):
    layer, x = build(case, dropout=0.5), make_tokens(LENGTH)
    assert not torch.equal(layer(x)[0], layer(x)[0])
    assert torch.equal(layer.eval()(x)[0], layer(x)[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.half], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_half_precision_keeps_its_dtype_and_is_close(case, dtype, make_tokens):
    if case == "reformer":
        layer = build(case, chunk_size=LENGTH)  # Rounding moves tokens to other buckets.
    elif case == "informer":
        layer = build(case, n_query=LENGTH)  # ... and chooses other queries.
    else:
        layer = build(case)
    x = make_tokens(LENGTH).detach()
    expected, _ = layer(x)
    y, _ = layer.to(dtype)(x.to(dtype))
    assert y.dtype == dtype
    assert_close(y.double(), expected, rtol=0.1, atol=0.1 * expected.abs().max().item())


def test_autocast_gives_finite_numbers_and_gradients(layer, make_tokens):
    x = make_tokens(LENGTH).detach().float().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y, _ = layer.float()(x, key_mask=PADS["right"](LENGTH))
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert y.isfinite().all() and gradient.isfinite().all()


def test_large_and_small_tokens_give_finite_numbers(layer, make_tokens):
    x = make_tokens(LENGTH).detach().float()
    for scale in (1e-18, 1e-9, 1e9):
        y, _ = layer.float()(scale * x)
        assert y.isfinite().all()


ORDERLESS = ["fastformer", "joint-sinh", "kernelized", "performer"]


@pytest.mark.parametrize("case", ORDERLESS)
def test_tokens_in_another_order_give_the_same_in_that_order(case, make_tokens):
    layer, x, order = build(case), make_tokens(LENGTH), torch.randperm(LENGTH)
    assert_close(layer(x[:, order])[0], layer(x)[0][:, order])


@pytest.mark.parametrize(
    ("case", "options"),
    [
        ("informer", {"n_sample": LENGTH}),
        ("nystromformer", {"n_landmark": LENGTH, "n_iteration": 40}),
        ("reformer", {"chunk_size": LENGTH}),
        ("skyformer", {"n_landmark": 2 * LENGTH}),
        ("bigbird", {"block_size": LENGTH}),
    ],
)
def test_so_they_do_where_no_token_is_left_out(case, options, make_tokens):
    layer, x, order = build(case, **options), make_tokens(LENGTH), torch.randperm(LENGTH)
    assert_close(layer(x[:, order])[0], layer(x)[0][:, order])


def test_they_keep_no_state_and_take_no_steps(layer, make_tokens):
    x = make_tokens(LENGTH)
    _, state = LeapAttention(12, 3).double()(x)
    with pytest.raises(InputError, match="sees whole sequences and goes on from no state"):
        layer(x, state)
    with pytest.raises(InputError, match="takes no steps"):
        layer.step(x[:, 0], None)


@pytest.mark.parametrize(
    ("case", "options", "message"),
    [
        ("bigbird", {"block_size": 0}, "block_size=0 is too few; give 1 or more"),
        ("bigbird", {"window": 2}, "window=2 has no middle block"),
        ("informer", {"n_query": 0}, "n_query=0 is too few"),
        ("linformer", {"length": 0}, "length=0 is too few"),
        ("nystromformer", {"n_landmark": 0}, "n_landmark=0 is too few"),
        ("nystromformer", {"conv_kernel": 4}, "conv_kernel=4 has no middle"),
        ("performer", {"n_feature": 0}, "n_feature=0 is too few"),
        ("reformer", {"max_bucket": 1}, "max_bucket=1 is too few; give 2 or more"),
        ("s4d", {"n_state": 5}, "n_state=5 is no number of pairs"),
        ("skyformer", {"ridge": 0.0}, "ridge=0.0 leaves nothing to invert by"),
    ],
)
def test_bad_settings_are_errors_that_say_what_would_work(case, options, message):
    with pytest.raises(ConfigError, match=message):
        build(case, **options)
