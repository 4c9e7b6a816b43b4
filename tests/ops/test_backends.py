"""Promises of the backends: which one answers, and what is said where none can."""

import os
import subprocess
import sys

import pytest
import torch
from torch.testing import assert_close

from leap.errors import ConfigError, InputError
from leap.ops import (
    additive_attention,
    backends,
    causal_linear_attention,
    causal_proportional_attention,
    causal_travelled_attention,
    linear_attention,
)
from leap.ops.backends import BACKENDS, choose, using


def make(length=70, width=4):
    return torch.rand(3, 2, 3, length, width, dtype=torch.double).unbind(0)


def everything(backend):
    """What each op that has a choice returns."""
    torch.manual_seed(0)
    (q, k, v), p = make(), torch.rand(2, 3, 70, dtype=torch.double)
    x, mask = torch.rand(2, 3, 70, 3, dtype=torch.double), torch.rand(2, 70) < 0.8
    gate = -torch.rand(2, 3, 70, dtype=torch.double)
    found = [
        causal_linear_attention(q, k, v, key_mask=mask, log_gate=gate, backend=backend),
        causal_linear_attention(q, k, v, fade=(-0.1, -1.0, 0.0), backend=backend),
        causal_linear_attention(q, k, v, reweighting=(x, x), normalise=False, backend=backend),
        causal_proportional_attention(q, k, v, p, p, backend=backend),
        causal_travelled_attention(q, k, v, x, backend=backend),
        additive_attention(p, v, key_mask=mask, backend=backend),
        additive_attention(p, v, window=5, backend=backend),
    ]
    whole = linear_attention(q, k, v, reweighting=(x, x), key_mask=mask, backend=backend)
    return [whole, *((o, state.tensors()) for o, state in found)]


def test_the_formulas_as_written_answer_where_they_are_asked_for():
    assert_close(everything("reference"), everything("torch"))


def test_a_backend_that_refuses_says_why():
    q, k, v = make()
    _, state = causal_linear_attention(q, k, v)
    with pytest.raises(InputError, match=r"'reference' cannot answer .* a state was given"):
        causal_linear_attention(q, k, v, state, backend="reference")
    with using("reference"), pytest.raises(InputError, match="a state was given"):
        causal_linear_attention(q, k, v, state)
    with pytest.raises(InputError, match="does not have this op"):
        choose("reference", {})


def test_an_unknown_name_is_refused():
    with pytest.raises(ConfigError, match=r"no backend is called 'fast'.* torch"):
        causal_linear_attention(*make(), backend="fast")
    with pytest.raises(ConfigError, match="no backend is called"), using("fast"):
        pass


def test_the_first_that_does_not_refuse_answers(monkeypatch):
    monkeypatch.setattr(
        backends, "BACKENDS", {"a": backends.Backend("a"), "b": backends.Backend("b"), **BACKENDS}
    )
    assert choose(None, {"a": None, "b": None}) == "a"
    assert choose(None, {"a": "too long", "b": None}) == "b"
    assert choose(None, {"a": "too long", "reference": None}) == "torch"
    assert choose("b", {"a": None, "b": None}) == "b"


def test_a_name_given_with_a_call_goes_before_the_one_around_it():
    with using("reference"):
        assert choose(None, {"reference": None}) == "reference"
        assert choose("torch", {"reference": None}) == "torch"
        with using(None):
            assert choose(None, {"reference": None}) != "reference"
    assert backends.named() is None


def run_leap(**environment):
    command = [sys.executable, "-m", "leap.cli", "backends"]
    environment = {**os.environ, **environment}
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def test_the_command_lists_every_backend_and_the_environment_names_one():
    done = run_leap(LEAP_BACKEND="reference")
    assert done.returncode == 0, done.stderr
    for name, backend in BACKENDS.items():
        assert f"\n{name} " in f"\n{done.stdout}" and backend.covers in done.stdout
    assert "LEAP_BACKEND=reference" in done.stdout
    done = run_leap(LEAP_BACKEND="fast")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "no backend is called 'fast'" in done.stderr
