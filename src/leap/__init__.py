"""Transformers that cost O(N) to train and O(1) a token to run.

Where to look:

    leap.ops      the mechanisms, functions of tensors `[batch, heads, tokens, width]`
    leap.layers   the same with their parameters, as torch modules
    leap.models   language models and classifiers, registered with Hugging Face's Auto classes
    leap.explain  what a model attended to; `leap lm explain` on the command line
    leap.bench    speed and memory, measured; `leap bench` on the command line
"""

from importlib.metadata import version

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

__version__ = version("leapformer")
