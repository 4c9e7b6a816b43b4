"""Whether flash-linear-attention can answer calls here."""

from importlib.util import find_spec

import torch

from leap.extras import install_command


def missing() -> str | None:
    """Why it is not here, or None if it is."""
    if find_spec("fla") is None:
        return f"flash-linear-attention is not installed: {install_command('fla')}"
    if not torch.cuda.is_available():
        return "its kernels need a GPU, and none is here"
    return None
