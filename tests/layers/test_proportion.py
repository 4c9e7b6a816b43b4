import pytest
import torch
from torch.testing import assert_close

from leap.errors import ConfigError, InputError
from leap.layers import FixedProportion, LearnedProportion


def features(t=5, width=8):
    return torch.randn(2, 3, t, width, dtype=torch.double).relu()


def n_parameters(module):
    return sum(p.numel() for p in module.parameters())


def test_two_layers_are_the_formula():
    net, x = LearnedProportion(8, hidden=4).double(), features()
    (w1, b1), (w2, b2) = ((net.net[i].weight, net.net[i].bias) for i in (0, 2))
    expected = 1 / (1 + torch.exp(-(torch.relu(x @ w1.T + b1) @ w2.T + b2)))
    assert_close(net(x), expected.squeeze(-1))


def test_one_hidden_unit_means_a_single_layer():
    net, x = LearnedProportion(8, hidden=1).double(), features()
    expected = torch.sigmoid(x @ net.net[0].weight.T + net.net[0].bias)
    assert_close(net(x), expected.squeeze(-1))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 32 * 16 + 2 * 16 + 1),
        ({"hidden": 8}, 32 * 8 + 2 * 8 + 1),
        ({"hidden": 1}, 32 + 1),
        ({"step_down": 4}, 32 * 8 + 2 * 8 + 1),
        ({"step_down": 32}, 32 + 1),
        ({"n_head": 3}, 3 * (32 * 16 + 2 * 16 + 1)),
    ],
)
def test_sizes_are_those_of_the_paper(options, expected):
    assert n_parameters(LearnedProportion(32, **options)) == expected


def test_heads_share_a_net_or_have_one_each():
    x = features()
    swapped = x[:, [1, 0, 2]]
    shared, own = LearnedProportion(8).double(), LearnedProportion(8, n_head=3).double()
    assert_close(shared(swapped), shared(x)[:, [1, 0, 2]])
    assert not torch.allclose(own(swapped), own(x)[:, [1, 0, 2]])


def test_a_net_for_each_head_is_that_many_nets():
    own, x = LearnedProportion(8, n_head=3).double(), features()
    for head in range(3):
        one = LearnedProportion(8).double()
        for i in (0, 2):
            one.net[i].weight.data = own.net[i].weight[head].T
            one.net[i].bias.data = own.net[i].bias[head, 0]
        assert_close(own(x)[:, head], one(x[:, head : head + 1])[:, 0])


def test_a_fresh_net_puts_every_token_near_the_middle():
    assert (LearnedProportion(8).double()(features(100)) - 0.5).abs().max() < 0.35


@pytest.mark.parametrize("dtype", [torch.double, torch.float, torch.bfloat16], ids=str)
def test_proportions_stay_inside_zero_and_one_for_any_features(dtype):
    net = LearnedProportion(8).to(dtype)
    for scale in (-1e15, -1.0, 0.0, 1.0, 1e15):
        p = net((scale * features()).to(dtype))
        assert p.isfinite().all() and (p >= 0).all() and (p < 1).all()


def test_bins_round_to_their_centres_and_let_the_gradient_through():
    smooth, x = LearnedProportion(8).double(), (8 * features()).requires_grad_()
    binned = LearnedProportion(8, bins=4).double()
    binned.load_state_dict(smooth.state_dict())
    p = binned(x)
    assert set(p.flatten().tolist()) <= {0.125, 0.375, 0.625, 0.875}
    assert (p - smooth(x)).abs().max() <= 0.125 + 1e-12
    assert_close(torch.autograd.grad(p.sum(), x), torch.autograd.grad(smooth(x).sum(), x))


def test_fixed_proportions_are_shares_of_the_length():
    positions = torch.tensor([[0, 1, 2], [5, 6, 7]])
    p = FixedProportion(8)(features(3), positions)
    expected = torch.tensor([[1, 2, 3], [6, 7, 8]]).double() / 8
    assert_close(p, expected.unsqueeze(1).expand(2, 3, 3))


def test_fixed_proportions_without_a_length_are_of_each_row_s_own():
    positions = torch.tensor([[0, 1, 2], [0, 1, 1]])
    p = FixedProportion()(features(3), positions)
    assert_close(p[:, 0], torch.tensor([[1 / 3, 2 / 3, 1], [1 / 2, 1, 1]]).double())
    assert FixedProportion()(features(0), positions[:, :0]).shape == (2, 3, 0)


def test_bad_settings_are_errors_that_say_what_would_work():
    with pytest.raises(ConfigError, match=r"step_down=3 .* width 8; 1, 2, 4, 8 do"):
        LearnedProportion(8, step_down=3)
    with pytest.raises(ConfigError, match="hidden=0"):
        LearnedProportion(8, hidden=0)
    with pytest.raises(ConfigError, match="bins=0"):
        LearnedProportion(8, bins=0)
    with pytest.raises(ConfigError, match="length=0"):
        FixedProportion(0)
    with pytest.raises(InputError, match="give them"):
        FixedProportion(8)(features())
    with pytest.raises(InputError, match="position 8 lies beyond length=8"):
        FixedProportion(8)(features(1), torch.tensor([[0], [8]]))
