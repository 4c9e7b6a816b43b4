from fnmatch import fnmatch
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from leap.ops.backends import BACKENDS, using
from leap.ops.triton.device import interpreted

INTERPRETED = {
    "test_additive.py": [
        "test_any_memory_layout_will_do*",
        "test_gradients_flow_through_the_state_as_through_the_whole*-29-window-20*",
        "test_masked_agrees_with_the_definition*-window-None*",
        "test_masked_agrees_with_the_definition*-window-20*",
        "test_packed_sequences_are_each_on_their_own*-window-3*",
    ],
    "test_linear.py": [
        "test_causal_agrees_with_the_definition*-50-tokens-True*",
        "test_proportional_is_the_plain_op_over_widened_features*-17-tokens*",
        "test_the_floor_of_the_normaliser_holds_in_value_and_gradient*-True*",
        "test_the_future_is_invisible*",
        "test_tokens_that_remember_are_exact_among_those_that_forget*",
        "test_a_fade_is_a_gate_that_never_changes*-9-True*",
        "test_a_sequence_can_be_cut_anywhere*-True-13*",
        "test_pads_change_nothing_for_real_tokens*-False-holes*",
        "test_gated_agrees_with_the_definition*-20-5*",
        "test_a_gated_sequence_token_by_token_is_the_whole*-5*",
        "test_a_gate_that_forgets_everything_leaves_the_token_itself*-inf-5*",
        "test_packed_sequences_do_not_see_each_other*-True*",
        "test_packed_sequences_may_hold_pads*",
        "test_scaling_a_query_changes_no_digit*",
    ],
    "test_travel.py": ["test_packed_sequences_begin_at_their_own_place*"],
}
"""Promises that kernels are held to in the interpreter, which takes a second for each: by file."""


def pytest_collection_modifyitems(config, items):
    """Leave out what the interpreter would take too long for."""
    left_out = [item for item in items if not _is_run(item)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if _is_run(item)]


def _is_run(item):
    if item.path.parent != Path(__file__).parent or "triton" not in item.name.split("[")[-1]:
        return True
    if item.path.name == "test_triton.py":
        return True
    return any(fnmatch(item.name, pattern) for pattern in INTERPRETED.get(item.path.name, ()))


@pytest.fixture(scope="module", params=["chosen", "torch", "triton"])
def each_backend(request):
    """A module's promises hold for the backend that is chosen here, for torch and for kernels."""
    if request.param == "chosen" and BACKENDS["native"].missing() is not None:
        pytest.skip("torch is the one that is chosen here")
    if request.param == "triton":
        if not interpreted():
            pytest.skip("on the CPU kernels are interpreted")
        request.getfixturevalue("interpreter")
    torch.compiler.reset()  # Each may compile as often as if it were alone.
    with using(None if request.param == "chosen" else request.param):
        yield


@pytest.fixture
def check_cut():
    """A sequence cut in two has the outputs, the state after it and the gradients of the whole."""

    def check(attend, inputs, split, sums, used=None):
        whole, final = attend(*inputs)
        head, state = attend(*(x[:, :, :split] for x in inputs))
        tail, resumed = attend(*(x[:, :, split:] for x in inputs), state)
        joined = torch.cat([head, tail], dim=2)
        assert_close(joined, whole)
        assert_close(resumed.tensors(), final.tensors())
        used, after = used or inputs, getattr(final, sums)
        outer = torch.randn_like(whole), torch.randn_like(after)
        assert_close(
            torch.autograd.grad((joined, getattr(resumed, sums)), used, outer),
            torch.autograd.grad((whole, after), used, outer),
        )

    return check


@pytest.fixture
def check_rollback():
    """The last n of 7 tokens can be taken back; then what is left goes on, or goes back too."""

    def check(read, state, n):
        back = read(3, 7, read(0, 3, state)).rollback(n)
        assert_close(back.tensors(), read(0, 7 - n, state).tensors())
        assert_close(back.rollback(7 - n).tensors(), state.tensors())
        assert_close(read(7 - n, 7, back).tensors(), read(0, 7, state).tensors())

    return check


@pytest.fixture
def padded_to_17(where):
    """Places of 12 real tokens among 17, and a mask of them for a batch of 2."""
    real = {
        "left": range(5, 17),
        "right": range(12),
        "holes": (0, 1, 4, 5, 6, 8, 11, 12, 13, 14, 15, 16),
    }[where]
    mask = torch.zeros(2, 17, dtype=torch.bool)
    mask[:, list(real)] = True
    return torch.tensor(list(real)), mask
