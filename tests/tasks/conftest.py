"""What the tests of every task need."""

import pytest

from leap.tasks.files import data_folder


@pytest.fixture
def data():
    """The folder of data sets."""
    if not data_folder().is_dir():
        pytest.skip(f"no data sets in {data_folder()}; name their folder by LEAP_DATA")
    return data_folder()
