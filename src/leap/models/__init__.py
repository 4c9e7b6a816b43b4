"""Hugging Face models: registered with the Auto classes when this package is imported."""

from transformers import (
    AutoConfig,
    AutoFeatureExtractor,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForSpeechSeq2Seq,
    AutoProcessor,
)

from leap.models.cache import StateCache
from leap.models.causal_lm import (
    FastformerForCausalLM,
    FastformerModel,
    LeapForCausalLM,
    LeapformerForCausalLM,
    LeapformerModel,
    LeapModel,
)
from leap.models.classification import LeapformerEncoder, LeapformerForSequenceClassification
from leap.models.config import FastformerLMConfig, LeapConfig, LeapformerConfig
from leap.models.fbank import LeapformerFeatureExtractor
from leap.models.interface import with_proportions
from leap.models.mechanisms import ATTENTIONS, usable_as
from leap.models.presets import PRESETS, preset
from leap.models.processor import LeapformerProcessor
from leap.models.seq2seq import (
    LeapformerForSeq2SeqLM,
    LeapformerForSpeechSeq2Seq,
    LeapformerSeq2SeqModel,
    LeapformerSpeechModel,
)
from leap.models.seq2seq_config import LeapformerSeq2SeqConfig, LeapformerSpeechConfig
from leap.models.states import States

__all__ = [
    "ATTENTIONS",
    "PRESETS",
    "FastformerForCausalLM",
    "FastformerLMConfig",
    "FastformerModel",
    "LeapConfig",
    "LeapForCausalLM",
    "LeapModel",
    "LeapformerConfig",
    "LeapformerEncoder",
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
    "StateCache",
    "States",
    "preset",
    "usable_as",
    "with_proportions",
]

for config, model, causal_lm in (
    (LeapConfig, LeapModel, LeapForCausalLM),
    (FastformerLMConfig, FastformerModel, FastformerForCausalLM),
    (LeapformerConfig, LeapformerModel, LeapformerForCausalLM),
):
    AutoConfig.register(config.model_type, config, exist_ok=True)
    AutoModel.register(config, model, exist_ok=True)
    AutoModelForCausalLM.register(config, causal_lm, exist_ok=True)
    config.register_for_auto_class()
    model.register_for_auto_class("AutoModel")
    causal_lm.register_for_auto_class("AutoModelForCausalLM")

AutoModelForSequenceClassification.register(
    LeapformerConfig, LeapformerForSequenceClassification, exist_ok=True
)
LeapformerForSequenceClassification.register_for_auto_class("AutoModelForSequenceClassification")

for translation_config, translation_model, translator, auto in (
    (
        LeapformerSeq2SeqConfig,
        LeapformerSeq2SeqModel,
        LeapformerForSeq2SeqLM,
        AutoModelForSeq2SeqLM,
    ),
    (
        LeapformerSpeechConfig,
        LeapformerSpeechModel,
        LeapformerForSpeechSeq2Seq,
        AutoModelForSpeechSeq2Seq,
    ),
):
    AutoConfig.register(translation_config.model_type, translation_config, exist_ok=True)
    AutoModel.register(translation_config, translation_model, exist_ok=True)
    auto.register(translation_config, translator, exist_ok=True)
    translation_config.register_for_auto_class()
    translation_model.register_for_auto_class("AutoModel")
    translator.register_for_auto_class(auto.__name__)

AutoFeatureExtractor.register(LeapformerSpeechConfig, LeapformerFeatureExtractor, exist_ok=True)
LeapformerFeatureExtractor.register_for_auto_class("AutoFeatureExtractor")
AutoProcessor.register(LeapformerSpeechConfig, LeapformerProcessor, exist_ok=True)
LeapformerProcessor.register_for_auto_class("AutoProcessor")

from leap.models import modeling_leapformer  # noqa: E402  # It takes its names from here.

for kind in vars(modeling_leapformer).values():
    if isinstance(kind, type):
        # Hugging Face copies the file of a class's module beside the weights, and no other of ours.
        kind.__module__ = modeling_leapformer.__name__
