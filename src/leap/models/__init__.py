"""Hugging Face models: registered with the Auto classes when this package is imported."""

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
)

from leap.models.cache import StateCache
from leap.models.causal_lm import (
    LeapForCausalLM,
    LeapformerForCausalLM,
    LeapformerModel,
    LeapModel,
)
from leap.models.classification import LeapformerEncoder, LeapformerForSequenceClassification
from leap.models.config import LeapConfig, LeapformerConfig
from leap.models.interface import with_proportions
from leap.models.mechanisms import ATTENTIONS, usable_as
from leap.models.presets import PRESETS, preset

__all__ = [
    "ATTENTIONS",
    "PRESETS",
    "LeapConfig",
    "LeapForCausalLM",
    "LeapModel",
    "LeapformerConfig",
    "LeapformerEncoder",
    "LeapformerForCausalLM",
    "LeapformerForSequenceClassification",
    "LeapformerModel",
    "StateCache",
    "preset",
    "usable_as",
    "with_proportions",
]

for config, model, causal_lm in (
    (LeapConfig, LeapModel, LeapForCausalLM),
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
