"""Models learn on the Triton backend what they learn on the CPU's: its kernels end to end."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from leap import LeapConfig, LeapForCausalLM, LeapformerConfig, LeapformerForCausalLM
from leap.ops.backends import using
from leap.ops.triton import causal
from leap.ops.triton.device import interpreted

pytestmark = pytest.mark.usefixtures("interpreter")
PLACE = "cpu" if interpreted() else "cuda"
SIZES = {"vocab_size": 11, "hidden_size": 8, "n_layer": 1, "n_head": 2, "n_positions": 32}
SIZES |= {"hidden_dropout_prob": 0.0}  # A compiled model drops others.
MODELS = {
    "travelled, with gates": lambda: LeapformerForCausalLM(LeapformerConfig(**SIZES)),
    "LEAP": lambda: LeapForCausalLM(LeapConfig(**SIZES, window_sizes=[4])),
}


def losses(kind, backend, n_steps, *, compiled=False):
    """Of the first steps of training, in double precision."""
    torch.manual_seed(0)
    model = MODELS[kind]().double().to(PLACE).train()
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ids = torch.randint(11, (1, 18), generator=torch.Generator().manual_seed(1)).to(PLACE)

    def loss_of(ids):
        return model(ids, labels=ids, use_cache=False).loss

    if compiled:  # Without code generation, which the interpreter gains nothing from.
        loss_of = torch.compile(loss_of, backend="aot_eager", fullgraph=True)
    found = []
    with using(backend):
        for _ in range(n_steps):
            loss = loss_of(ids)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            found.append(loss.item())
    return found


@pytest.mark.parametrize("kind", MODELS)
def test_a_model_learns_what_it_learns_on_the_cpu(kind):
    found = losses(kind, "triton", 3)
    assert_close(found, losses(kind, "torch", 3), rtol=1e-9, atol=0)
    assert found[2] < found[0]


COMPILED = """
import conftest, torch
from test_triton import MODELS, losses

conftest.patch_once()
for kind in MODELS:
    found = losses(kind, "triton", 2, compiled=True)
    torch.testing.assert_close(found, losses(kind, "torch", 2), rtol=1e-9, atol=0)
"""


def test_a_compiled_model_learns_the_same():
    """In a process of its own: the shape checks of the tests stop a compiler, even turned off."""
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), str(here.parent), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", COMPILED],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_it_is_the_kernels_that_the_model_runs(monkeypatch):
    def fail(*args):
        raise AssertionError("a kernel ran")

    monkeypatch.setattr(causal, "attend_op", fail)
    with pytest.raises(AssertionError, match="a kernel ran"):
        losses("travelled, with gates", "triton", 1)
