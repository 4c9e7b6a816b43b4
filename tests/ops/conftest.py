import pytest
import torch

from leap.ops.backends import BACKENDS, using


@pytest.fixture(scope="module", params=["chosen", "torch"])
def each_backend(request):
    """A module's promises hold for the backend that is chosen here, and for torch."""
    if request.param == "chosen" and BACKENDS["native"].missing() is not None:
        pytest.skip("torch is the one that is chosen here")
    torch.compiler.reset()  # Each may compile as often as if it were alone.
    with using(None if request.param == "chosen" else request.param):
        yield
