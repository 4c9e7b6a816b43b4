"""Transformers that cost O(N) to train and O(1) a token to run.

Where to look:

    leap.ops      the mechanisms, functions of tensors `[batch, heads, tokens, width]`
    leap.layers   the same with their parameters, as torch modules
    leap.models   language models, for Hugging Face: registered with its Auto classes by this import
    leap.bench    speed and memory, measured; `leap bench` on the command line
"""

from importlib.metadata import version

from leap.models import (
    LeapConfig,
    LeapForCausalLM,
    LeapformerConfig,
    LeapformerForCausalLM,
    LeapformerModel,
    LeapModel,
    with_proportions,
)

__all__ = [
    "LeapConfig",
    "LeapForCausalLM",
    "LeapModel",
    "LeapformerConfig",
    "LeapformerForCausalLM",
    "LeapformerModel",
    "with_proportions",
]

__version__ = version("leapformer")
