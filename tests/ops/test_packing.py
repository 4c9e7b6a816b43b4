"""Packed sequences: each is run by itself, with those that are nearly as long."""

from itertools import pairwise

import pytest
import torch
from torch.testing import assert_close

from leap.errors import InputError
from leap.ops.packing import check_cu_seqlens, run_packed
from leap.ops.state import Recurrent, state


@state
class Total(Recurrent):
    """The sum of all tokens so far, and how many there were."""

    total: torch.Tensor


def add_up(x, state, key_mask):
    """Running sums of real tokens, those before included."""
    before = x.new_zeros(len(x), *x.shape[1:2], *x.shape[3:]) if state is None else state.total
    length = torch.zeros(len(x), dtype=torch.long) if state is None else state.length
    sums = (x * key_mask[:, None, :, None]).cumsum(2) + before.unsqueeze(2)
    last = sums[:, :, -1] if x.shape[2] else before
    return sums, Total(last, length=length + key_mask.sum(1))


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_each_sequence_is_as_if_it_were_alone(masked, begun):
    bounds = [0, 3, 3, 11, 12, 15, 31]  # Of several groups, and one without a token.
    torch.manual_seed(0)
    x = torch.randn(1, 2, 31, 4)
    mask = torch.rand(1, 31) < 0.7 if masked else None
    past = Total(torch.randn(6, 2, 4), length=torch.arange(6)) if begun else None
    packed, after = run_packed(add_up, torch.tensor(bounds), {"x": x, "y": None}, past, mask)
    for i, (begin, end) in enumerate(pairwise(bounds)):
        real = torch.ones(1, end - begin, dtype=torch.bool)
        alone = add_up(
            x[:, :, begin:end],
            None if past is None else past.select(torch.tensor([i])),
            real if mask is None else mask[:, begin:end],
        )
        assert_close(packed[:, :, begin:end], alone[0])
        assert_close(after.select(torch.tensor([i])).tensors(), alone[1].tensors())


def test_lengths_in_a_batch_differ_by_less_than_a_factor_of_two():
    seen = []

    def note(x, state, key_mask):
        seen.append(sorted(key_mask.sum(1).tolist()))
        return add_up(x, state, key_mask)

    lengths = torch.tensor([1, 2, 3, 4, 7, 8, 15, 16, 5])
    bounds = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])
    run_packed(note, bounds, {"x": torch.ones(1, 1, 61, 1)}, None)
    assert sorted(seen) == [[1], [2, 3], [4, 5, 7], [8, 15], [16]]


@pytest.mark.parametrize(
    ("bounds", "axes", "message"),
    [
        ([0, 5], (2, 1, 5, 1), "the batch is 2; reshape"),
        ([0.0, 5.0], (1, 1, 5, 1), "expected integers"),
        ([[0, 5]], (1, 1, 5, 1), "expected integers"),
        ([5], (1, 1, 5, 1), "expected integers"),
        ([1, 5], (1, 1, 5, 1), "must rise from 0 to 5"),
        ([0, 4], (1, 1, 5, 1), "must rise from 0 to 5"),
        ([0, 4, 3, 5], (1, 1, 5, 1), "must rise from 0 to 5"),
    ],
)
def test_bounds_that_do_not_cut_up_the_tokens_are_refused(bounds, axes, message):
    with pytest.raises(InputError, match=message):
        check_cu_seqlens(torch.tensor(bounds), torch.ones(axes))
