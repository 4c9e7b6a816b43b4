"""What bodies make of masks, positions and packed rows."""

import math

import pytest
import torch
from torch.testing import assert_close

from leap.errors import InputError
from leap.models.body import SinusoidalPositions, packed_at, real_tokens


def test_a_mask_is_that_of_the_last_tokens_and_none_where_all_are_real():
    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])
    assert real_tokens(None) is None
    assert real_tokens(mask).tolist() == [[False, True, True, True], [True] * 4]
    assert real_tokens(mask, 3) is None
    assert real_tokens(mask, 4).tolist() == real_tokens(mask).tolist()
    assert real_tokens(mask[:, :0], 0) is None
    with pytest.raises(InputError, match=r"attention_mask is \[2, 1, 4\]; expected \[batch"):
        real_tokens(mask[:, None])


def test_a_sequence_begins_where_positions_do_not_go_on_by_one():
    assert packed_at(None) is None
    assert packed_at(torch.tensor([[3, 4, 5, 6]])) is None
    assert packed_at(torch.tensor([[0, 1, 2, 0, 1, 0]])).tolist() == [0, 3, 5, 6]
    two_rows = torch.tensor([[0, 1, 0], [0, 1, 2]])
    assert packed_at(two_rows) is None


def test_the_number_of_a_sequence_goes_before_positions():
    positions, number = torch.tensor([[0, 1, 0, 1]]), torch.tensor([[0, 0, 0, 1]])
    assert packed_at(positions, number).tolist() == [0, 3, 4]
    assert packed_at(positions, torch.zeros_like(number)) is None


@pytest.mark.parametrize("width", [2, 5, 8])
def test_waves_are_from_a_turn_to_ten_thousand_turns_long(width):
    embedded = SinusoidalPositions(width)(torch.tensor([[0, 1, 7]]))
    half = (width + 1) // 2
    speeds = [1e4 ** -(i / max(half - 1, 1)) for i in range(half)]
    expected = [
        [*(math.sin(p * s) for s in speeds), *(math.cos(p * s) for s in speeds)][:width]
        for p in (0, 1, 7)
    ]
    assert_close(embedded, torch.tensor([expected]))
