"""The classes of saved models, as `trust_remote_code` finds them.

`save_pretrained` copies this file beside the weights. The code itself is in the package leapformer,
imported as leap: this file brings it, or says what to install.
"""

try:
    from leap.models import (
        FastformerForCausalLM,
        FastformerLMConfig,
        FastformerModel,
        LeapConfig,
        LeapForCausalLM,
        LeapformerConfig,
        LeapformerFeatureExtractor,
        LeapformerForCausalLM,
        LeapformerForSeq2SeqLM,
        LeapformerForSequenceClassification,
        LeapformerForSpeechSeq2Seq,
        LeapformerModel,
        LeapformerProcessor,
        LeapformerSeq2SeqConfig,
        LeapformerSeq2SeqModel,
        LeapformerSpeechConfig,
        LeapformerSpeechModel,
        LeapModel,
    )
except ImportError as error:
    raise ImportError(
        f"this model's code is in the package leapformer, imported as leap ({error}); "
        "pip install leapformer"
    ) from error

__all__ = [
    "FastformerForCausalLM",
    "FastformerLMConfig",
    "FastformerModel",
    "LeapConfig",
    "LeapForCausalLM",
    "LeapModel",
    "LeapformerConfig",
    "LeapformerFeatureExtractor",
    "LeapformerForCausalLM",
    "LeapformerForSeq2SeqLM",
    "LeapformerForSequenceClassification",
    "LeapformerForSpeechSeq2Seq",
    "LeapformerModel",
    "LeapformerProcessor",
    "LeapformerSeq2SeqConfig",
    "LeapformerSeq2SeqModel",
    "LeapformerSpeechConfig",
    "LeapformerSpeechModel",
]
