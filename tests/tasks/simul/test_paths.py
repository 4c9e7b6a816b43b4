"""Read schedules."""

import pytest

from leap.errors import ConfigError
from leap.tasks.simul.paths import Paths, wait_schedule


def test_a_wait_is_a_staircase():
    assert wait_schedule(4, 3).tolist() == [3, 4, 5, 6]
    assert wait_schedule(3, 2, ratio=4).tolist() == [8, 12, 16]


def test_states_come_by_the_chunk():
    assert wait_schedule(4, 3, chunk_size=2).tolist() == [4, 4, 6, 6]
    assert wait_schedule(2, 1, ratio=4, chunk_size=8).tolist() == [8, 8]
    assert wait_schedule(2, 1, chunk_size=0) is None
    assert wait_schedule(2, "offline") is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"waits": ()}, "one or more"),
        ({"waits": (0,)}, "holds 0"),
        ({"ratio": 0}, "ratio=0"),
        ({"chunk_sizes": (-1,)}, "chunk_sizes"),
    ],
)
def test_paths_that_lead_nowhere_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        Paths(**options)
