"""Promises of the native convolution: outputs, gradients and states of double precision."""

import pytest
import torch

from leap.ops import TapState, causal_convolution
from leap.ops.backends import using
from leap.ops.native import convolution, library
from leap.ops.tolerance import TOLERANCES, relative_error

pytestmark = pytest.mark.skipif(
    library.missing() is not None, reason=f"no native library: {library.missing()}"
)


@pytest.fixture(params=["AVX-512", "AVX2", "NEON"])
def instructions(request):
    """Each instruction set that this processor has."""
    before = library.instructions()
    if not library.use_instructions(request.param):
        pytest.skip(f"no {request.param} here")
    yield
    assert library.use_instructions(before)


def run(backend, dtype, x, weight, past, upstream, *, silu, mask=None):
    """What comes out, the state after, and the gradients of all inputs."""
    given = [each.detach().to(dtype).requires_grad_() for each in (x, weight, past)]
    state = TapState(given[2], length=torch.zeros(len(x), dtype=torch.long))
    with using(backend):
        y, after = causal_convolution(*given[:2], state, key_mask=mask, silu=silu)
        if mask is not None:
            y = y.masked_fill(~mask.unsqueeze(-1), 0)
        grads = torch.autograd.grad(y, given, upstream.to(dtype))
    return y, after.x, *grads


def make(t, d, taps, b=2):
    torch.manual_seed(t)
    x, upstream = torch.randn(2, b, t, d).unbind()
    return x, torch.randn(d, taps), torch.randn(b, taps - 1, d), upstream


def assert_within_tolerance(found, exact):
    limit = TOLERANCES[torch.float32]
    for i, (one, other) in enumerate(zip(found, exact, strict=True)):
        assert relative_error(one, other) <= (limit.output if i < 2 else limit.gradient), i


@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize(
    ("t", "d", "taps"), [(1, 5, 4), (2, 16, 4), (3, 33, 2), (70, 48, 4), (9, 20, 7), (1100, 3, 4)]
)
def test_outputs_states_and_gradients_are_those_of_double_precision(t, d, taps, silu, instructions):
    given = make(t, d, taps)
    for mask in (None, torch.rand(2, t) < 0.7):
        found = run("native", torch.float32, *given, silu=silu, mask=mask)
        exact = run("torch", torch.double, *given, silu=silu, mask=mask)
        assert_within_tolerance(found, exact)


def test_any_strides_give_the_same_bits():
    x, weight, past, upstream = make(20, 24, 4)
    expected = run("native", torch.float32, x, weight, past, upstream, silu=True)
    turned = x.mT.contiguous().mT, weight.mT.contiguous().mT, past.mT.contiguous().mT
    parts = torch.cat([x, x], dim=-1)[..., :24]
    for given in (turned, (parts, weight, past)):
        found = run("native", torch.float32, *given, upstream.mT.contiguous().mT, silu=True)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_any_number_of_threads_gives_the_same_bits(monkeypatch):
    given = make(50, 24, 4, b=5)
    expected = run("native", torch.float32, *given, silu=True)
    monkeypatch.setattr(library, "n_threads", lambda work, rows: min(3, rows))
    found = run("native", torch.float32, *given, silu=True)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_what_it_does_not_take_goes_to_torch():
    x, weight, past, _ = make(4, 5, 4)
    assert convolution.refusal(x, weight, past) is None
    assert "float32" in convolution.refusal(x.bfloat16(), weight, past)
    y, _ = causal_convolution(x.bfloat16(), weight.bfloat16(), silu=True)
    assert y.dtype == torch.bfloat16


def test_second_derivatives_are_there():
    x, weight, *_ = make(6, 5, 4)
    found = []
    for backend in ("native", "torch"):
        given = [each.clone().requires_grad_() for each in (x, weight)]
        with using(backend):
            y, _ = causal_convolution(*given, silu=True)
            first = torch.autograd.grad(y.square().sum(), given, create_graph=True)
            found.append(torch.autograd.grad(sum(g.square().sum() for g in first), given))
    for one, other in zip(*found, strict=True):
        assert relative_error(one, other) < 1e-4


def test_the_compiler_finds_nothing_wrong_with_the_op(shapes_unchecked):
    x, weight, past, _ = (each.requires_grad_() for each in make(5, 6, 4))
    torch.library.opcheck(convolution.convolve_op, (x, weight, past, True))
