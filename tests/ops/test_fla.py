"""Promises of the backend fla: the numbers of the others, by kernels of flash-linear-attention.

No GPU is needed: its reference functions, called as its kernels are, stand in for them.
"""

import importlib.util
import sys
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.testing import assert_close

from leap.errors import InputError
from leap.ops import LinearState, causal_linear_attention
from leap.ops.backends import BACKENDS
from leap.ops.fla import causal
from leap.ops.tolerance import TOLERANCES, relative_error

PACKAGE = importlib.util.find_spec("fla")
needs_fla = pytest.mark.skipif(
    PACKAGE is None or importlib.util.find_spec("einops") is None,
    reason="flash-linear-attention is not installed",
)


def load(name):
    """A file of the package by itself: to import all of it takes long."""
    folder = Path(PACKAGE.origin).parent
    spec = importlib.util.spec_from_file_location(f"fla_{name}", folder / "ops" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def sequences(function, q, k, v, g, *, scale, initial_state, output_final_state, cu_seqlens=None):
    """Call a reference function for each of packed sequences."""
    assert scale == 1.0 and output_final_state
    bounds = [0, q.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
    found = []
    for n, (begin, end) in enumerate(pairwise(bounds)):
        state = initial_state
        if cu_seqlens is not None and initial_state is not None:
            state = initial_state[n : n + 1]
        part = (None if x is None else x[:, begin:end] for x in (q, k, v, g))
        found.append(function(*part, initial_state=state, output_final_state=True))
    outputs, states = zip(*found, strict=True)
    return torch.cat(outputs, 1), torch.cat(states)


@pytest.fixture
def references(monkeypatch):
    """Its reference functions in the place of its kernels."""
    simple = load("simple_gla/naive").naive_recurrent_simple_gla
    gated = load("gla/naive").naive_recurrent_gla

    def per_head(q, k, v, g, **options):
        g = q.new_zeros(q.shape[:3]) if g is None else g
        return simple(q, k, v, g, scale=1.0, **options)

    def per_feature(q, k, v, g, **options):
        return gated(q * q.shape[-1] ** 0.5, k, v, g, **options)  # It has a scale of its own.

    found = causal.Kernels(
        lambda *args, **options: sequences(per_head, *args, **options),
        lambda *args, **options: sequences(per_feature, *args, **options),
    )
    monkeypatch.setattr(causal, "kernels", lambda: found)
    monkeypatch.setattr(causal, "refusal", lambda tokens: None)


def run(backend, *, rank=0, gates=None, packed=None, state=False, **options):
    torch.manual_seed(1)
    (b, h, t, f, e), n = (1, 2, 9, 4, 3), 1 if packed is None else len(packed) - 1
    given = [torch.rand(b, h, t, width) for width in (f, f, e)]
    given += [torch.rand(b, h, t, rank) for _ in "xy" if rank]
    if gates is not None:
        given.append(-torch.rand(b, h, t, *gates))
    given = [x.requires_grad_() for x in given]
    wide = f * max(rank, 1)
    before = LinearState(
        torch.rand(n, h, wide, e).double(), torch.rand(n, h, wide).double(), length=torch.zeros(n)
    )
    o, after = causal_linear_attention(
        *given[:3],
        before if state else None,
        reweighting=tuple(given[3:5]) if rank else None,
        log_gate=given[-1] if gates is not None else None,
        cu_seqlens=None if packed is None else torch.tensor(packed),
        key_mask=torch.rand(b, t) < 0.8,
        backend=backend,
        **options,
    )
    grads = torch.autograd.grad((o * torch.rand(o.shape)).sum() + after.kv.sum(), given)
    return o, after.kv, after.k, *grads


CALLS = {
    "plain": {},
    "not normalised": {"normalise": False},
    "fading": {"fade": (-0.1, -1.0), "state": True},
    "gates per head": {"rank": 2, "gates": (), "state": True},
    "gates per feature": {"rank": 2, "gates": (4,), "state": True},
    "packed": {"gates": (), "packed": [0, 2, 9], "state": True},
    "a feature map": {"feature": "exp"},
}


@needs_fla
@pytest.mark.parametrize("call", CALLS)
def test_outputs_states_and_gradients_are_those_of_torch(call, references):
    assert_close(run("fla", **CALLS[call]), run("torch", **CALLS[call]), rtol=1e-4, atol=1e-5)


@needs_fla
def test_denominators_are_right_where_those_of_the_package_are_not(references, monkeypatch):
    """Some 60,000 here: their square, in float16, is infinite."""
    stub = ModuleType("fla.ops.utils.cumsum")
    stub.chunk_global_cumsum = lambda x, reverse, cu_seqlens, output_dtype: (
        x.float().flip(1).cumsum(1).flip(1) if reverse else x.float().cumsum(1)
    ).to(output_dtype)
    for name in ("fla", "fla.ops", "fla.ops.utils"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, stub.__name__, stub)
    divide = load("linear_attn/utils").normalize_with_z_state

    def theirs(q, k, v):
        """`chunk_linear_attn` with a sum that is exact, and its own division."""
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        o, _ = causal.kernels().per_head(
            q, k, v, None, scale=1.0, initial_state=None, output_final_state=True
        )
        return divide(o.to(v.dtype), q, k, 1.0, None, False, None)[0].transpose(1, 2)

    q, k, v = ((torch.randn(1, 2, 64, 16).abs() * 8).half().requires_grad_() for _ in "qkv")
    v = (v.detach() / 64).half().requires_grad_()
    upstream = torch.randn(1, 2, 64, 16).half()
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    truth, _ = causal_linear_attention(*exact, backend="torch")
    wanted = torch.autograd.grad(truth, exact, upstream.double())
    errors = {}
    for name, attend in (
        ("ours", lambda *qkv: causal_linear_attention(*qkv, backend="fla")[0]),
        ("theirs", theirs),
    ):
        found = torch.autograd.grad(attend(q, k, v), (q, k, v), upstream)
        errors[name] = max(relative_error(x, y) for x, y in zip(found, wanted, strict=True))
    assert errors["ours"] <= TOLERANCES[torch.float16].gradient
    assert not errors["theirs"] <= 10 * TOLERANCES[torch.float16].gradient


def test_what_is_not_here_is_said(monkeypatch):
    q = torch.rand(1, 2, 9, 4)
    with pytest.raises(InputError, match=r"'fla' cannot answer this call: .*(GPU|installed)"):
        causal_linear_attention(q, q, q, backend="fla")
    monkeypatch.setattr("leap.ops.fla.package.find_spec", lambda name: None)
    assert "[fla]" in BACKENDS["fla"].missing()
