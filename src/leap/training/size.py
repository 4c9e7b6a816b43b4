"""Whether a model can be trained here, found without making its weights."""

from collections.abc import Callable
from typing import Any

import torch

from leap.errors import ConfigError
from leap.training.fit import GIB, memory, processes
from leap.training.recipe import DeviceName

WEIGHT_BYTES = 4
"""Of a weight in float32, as all are trained."""
COPIES = 4
"""What training keeps of a weight: itself, its gradient and the two means of AdamW."""


def check_size(build: Callable[[], Any], device: DeviceName | None = None) -> None:
    """Refuse settings that make no model, or one that this machine has no room for.

    Args:
        build: makes the model, of which no weights are made here.
        device: where it is to be trained, as a recipe has it.

    Raises:
        ConfigError: with what is wrong, or what the model would take.
    """
    with torch.device("meta"):
        n = build().num_parameters()
    on_host = WEIGHT_BYTES * (COPIES if processes(device).device.type == "cpu" else 1)
    needed, there_is = n * on_host, memory(torch.device("cpu"))
    if needed > there_is:
        raise ConfigError(
            f"a model of these sizes has {n:,} parameters, which take {needed / GIB:,.0f} GiB, and "
            f"there are {there_is / GIB:,.0f}; give a smaller hidden_size, or fewer layers"
        )
