import torch
import torch.nn.functional as F
from torch.testing import assert_close

from leap.layers.efficient import S4DAttention

LENGTH = 9


def recurrence(layer, u):
    """What the convolutions give, `[b, d, t]`, a token at a time."""
    rate, (onward, backward) = layer.discrete(u.dtype)
    state = torch.zeros(*u.shape[:2], rate.shape[-1], dtype=rate.dtype)
    forward = []
    for i in range(u.shape[-1]):
        state = rate.exp() * state + u[..., i, None]
        forward.append(2 * (onward * state).sum(-1).real)
    state, behind = torch.zeros_like(state), []
    for i in reversed(range(u.shape[-1])):
        behind.append(2 * (backward * state).sum(-1).real)
        state = rate.exp() * state + u[..., i, None]
    return torch.stack(forward, dim=-1) + torch.stack(behind[::-1], dim=-1)


def test_the_convolution_is_the_recurrence(make_tokens, assert_same):
    layer, x = S4DAttention(12, n_state=6).double(), make_tokens(LENGTH)
    assert_same(layer.convolve(x.mT), recurrence(layer, x.mT), layer, x)


def test_the_layer_is_the_formula(make_tokens, assert_same):
    layer, x = S4DAttention(12, n_state=6).double(), make_tokens(LENGTH)
    y = F.gelu(recurrence(layer, x.mT).mT + layer.skip * x)
    a, b = layer.o_proj(y).chunk(2, dim=-1)
    assert_same(layer(x)[0], a * b.sigmoid(), layer, x)


def test_a_step_holds_its_input(make_tokens):
    # The discrete system is the continuous one, solved by tiny steps.
    layer, u = S4DAttention(2, n_state=4).double(), torch.randn(1, 2, 3).double()
    with torch.no_grad():
        layer.log_step.fill_(0.0)
    rate, _ = layer.discrete(torch.double)  # dt = 1, so this is A
    n, x, ys = 2_000, torch.zeros_like(rate), []
    c = torch.view_as_complex(layer.c.detach())[0]
    for i in range(3):
        for _ in range(n):
            x = x + (rate.detach() * x + u[0, :, i, None]) / n
        ys.append(2 * (c * x).sum(-1).real)
    onward, _ = layer.kernels(3, torch.double)
    actual = [sum(onward[:, i - j] * u[0, :, j] for j in range(i + 1)) for i in range(3)]
    assert_close(torch.stack(actual), torch.stack(ys), rtol=2e-2, atol=2e-2)


def test_it_begins_stable_with_rising_frequencies():
    layer = S4DAttention(12, n_state=6)
    rate, _ = layer.discrete(torch.float)
    assert (rate.real < 0).all()
    step = layer.log_step.exp()
    assert (step >= 0.001).all() and (step <= 0.1).all()
    assert_close(rate.imag / step.unsqueeze(-1), torch.pi * torch.arange(3.0).expand(12, 3))
