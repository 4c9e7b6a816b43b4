import pytest
import torch
from torch.testing import assert_close

from leap.layers.efficient import KernelizedAttention, SkyformerAttention
from leap.layers.efficient.gaussian import gaussian

LENGTH = 9


def with_the_parameters_of(sky):
    dense = KernelizedAttention(12, 3).double()
    dense.load_state_dict({k: v for k, v in sky.state_dict().items() if k != "drawn"})
    return dense


@pytest.mark.parametrize("n_landmark", [2 * LENGTH, 128])
def test_with_every_token_a_landmark_it_is_kernelized_attention(n_landmark, make_tokens):
    layer = SkyformerAttention(12, 3, n_landmark=n_landmark, ridge=1e-12).double()
    x = make_tokens(LENGTH)
    assert_close(layer(x)[0], with_the_parameters_of(layer)(x)[0], rtol=1e-6, atol=1e-8)


def test_more_landmarks_come_closer(make_tokens):
    x = make_tokens(64)

    def error(n_landmark):
        layer = SkyformerAttention(12, 3, n_landmark=n_landmark, ridge=1e-6).double()
        return (layer(x)[0] - with_the_parameters_of(layer)(x)[0]).norm().item()

    errors = [error(n) for n in (4, 16, 64)]
    assert errors == sorted(errors, reverse=True) and errors[2] < errors[0] / 10


def test_it_is_the_formula(make_tokens, assert_same):
    layer, x = SkyformerAttention(12, 3, n_landmark=4).double(), make_tokens(LENGTH)
    q, k, v = (layer.split(proj(x)) for proj in (layer.q_proj, layer.k_proj, layer.v_proj))
    # Of two stretches each, one query and one key.
    place = (torch.tensor([0, 1, 0, 1]) * 2**20 + layer.drawn) * LENGTH // 2**21
    s = torch.cat([q[:, :, place[:2]], k[:, :, place[2:]]], dim=2)
    middle = gaussian(s, s) + 0.1 * torch.eye(4)
    o = gaussian(q, s) @ torch.linalg.inv(middle) @ gaussian(s, k) @ v
    assert_same(layer(x)[0], layer.o_proj(layer.join(o)), layer, x)


@pytest.mark.parametrize("n_landmark", [2, 7])
def test_an_odd_number_of_landmarks_is_as_good(n_landmark, make_tokens):
    layer = SkyformerAttention(12, 3, n_landmark=n_landmark).double()
    assert layer(make_tokens(LENGTH))[0].isfinite().all()
