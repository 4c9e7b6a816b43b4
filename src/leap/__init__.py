"""Transformers that cost O(N) to train and O(1) per token to run.

Where to look:

    leap.ops      the mechanisms, functions of tensors `[batch, heads, tokens, width]`
    leap.layers   the same with their parameters, as torch modules
    leap.models   language models and classifiers, registered with Hugging Face's Auto classes
    leap.explain  what a prediction rests on; `leap explain` on the command line
    leap.bench    speed and memory, measured; `leap bench` on the command line

Importing this package imports neither torch nor transformers: a name below is loaded when it is
first used, and the Auto classes know our models as soon as there are Auto classes.
"""

from typing import TYPE_CHECKING

from leap.auto import register_with_transformers

if TYPE_CHECKING:
    from leap import bench as bench
    from leap import errors as errors
    from leap import explain as explain
    from leap import layers as layers
    from leap import models as models
    from leap import ops as ops
    from leap.models import (
        FastformerForCausalLM,
        FastformerLMConfig,
        LeapConfig,
        LeapForCausalLM,
        LeapformerConfig,
        LeapformerForCausalLM,
        LeapformerForSeq2SeqLM,
        LeapformerForSequenceClassification,
        LeapformerForSpeechSeq2Seq,
        LeapformerModel,
        LeapformerSeq2SeqConfig,
        LeapformerSpeechConfig,
        LeapModel,
        with_proportions,
    )

    __version__: str

__all__ = [
    "FastformerForCausalLM",
    "FastformerLMConfig",
    "LeapConfig",
    "LeapForCausalLM",
    "LeapModel",
    "LeapformerConfig",
    "LeapformerForCausalLM",
    "LeapformerForSeq2SeqLM",
    "LeapformerForSequenceClassification",
    "LeapformerForSpeechSeq2Seq",
    "LeapformerModel",
    "LeapformerSeq2SeqConfig",
    "LeapformerSpeechConfig",
    "with_proportions",
]

if not TYPE_CHECKING:  # Else a type checker would believe in any name.
    _PACKAGES = ("bench", "errors", "explain", "layers", "models", "ops")

    def __getattr__(name):
        """Load a public name."""
        if name == "__version__":
            from importlib.metadata import version

            value = version("leapformer")
        elif name in _PACKAGES:
            from importlib import import_module

            return import_module(f"leap.{name}")
        elif name in __all__:
            from leap import models

            value = getattr(models, name)
        else:
            raise AttributeError(f"module 'leap' has no attribute {name!r}")
        globals()[name] = value
        return value

    def __dir__():
        """Name what can be loaded too."""
        return sorted({*globals(), *__all__, *_PACKAGES, "__version__"})


register_with_transformers()
