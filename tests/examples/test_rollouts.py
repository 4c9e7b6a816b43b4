"""The example runs, at a size that takes seconds."""

import importlib.util
import re
from pathlib import Path

import pytest
import torch

ROLLOUTS = Path(__file__).parents[2] / "examples" / "rollouts.py"


@pytest.fixture(scope="module")
def rollouts():
    spec = importlib.util.spec_from_file_location("rollouts", ROLLOUTS)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_one_state_gives_64_roll_outs(rollouts, capsys, shapes_unchecked):
    written = rollouts.main(rollouts.Settings(prefix=200, tokens=3))
    assert len(written) == 64
    assert len(set(written)) > 32
    out = capsys.readouterr().out
    assert "read 200 tokens in" in out
    assert "forked it 64 ways" in out
    shared, own = (float(x) for x in re.findall(r"([\d.]+) ms", out))
    assert shared > 0 and own > 0


def test_a_fork_goes_on_as_if_it_had_read_the_text(rollouts, tmp_path):
    model, tokenizer = rollouts.make_model(None)
    ids = tokenizer.encode("def fork(state):").long().unsqueeze(0)
    model.save_state(tmp_path / "state", rollouts.read(model, ids[:, :-1]))
    state = model.load_state(tmp_path / "state")
    state.batch_repeat_interleave(3)
    with torch.no_grad():
        forked = model(ids[:, -1:].expand(3, 1), past_key_values=state).logits[:, -1]
        whole = model(ids).logits[:, -1]
    torch.testing.assert_close(forked, whole.expand(3, -1))
