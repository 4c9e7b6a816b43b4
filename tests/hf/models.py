"""Transformers' own model tests, pointed at our models: `make hf-tests`.

They come with its source archive, or with a checkout of its repository, which has those of
generation too (see `obtain.py`). A test that is set aside here says why.
"""

import os
import sys
import unittest
from pathlib import Path

import torch
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_MAPPING_NAMES,
)

from leap import (
    LeapConfig,
    LeapForCausalLM,
    LeapformerConfig,
    LeapformerForCausalLM,
    LeapformerModel,
    LeapModel,
)

sys.path.insert(0, str(Path(os.environ["HF_TESTS"]).absolute()))
from tests.generation.test_utils import GenerationTesterMixin
from tests.test_modeling_common import ModelTesterMixin

# The tests look into these lists for which classes take labels, and which have no loss to train by.
for config, model, causal_lm in (
    (LeapConfig, LeapModel, LeapForCausalLM),
    (LeapformerConfig, LeapformerModel, LeapformerForCausalLM),
):
    MODEL_MAPPING_NAMES[config.model_type] = model.__name__
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type] = causal_lm.__name__

SMALL = {
    "vocab_size": 99,
    "hidden_size": 32,
    "n_layer": 2,
    "n_heads": 4,
    "n_positions": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    # These tests compare logits, which a model with labels otherwise does without.
    "loss_without_logits": False,
}


class Tester:
    """What the tests ask of a model: its config, inputs, and what these measure."""

    def __init__(self, config):
        self.config = config
        self.batch_size = 4
        self.seq_length = 7
        self.hidden_size = config.hidden_size
        self.num_hidden_layers = config.n_layer
        self.num_attention_heads = config.n_heads
        self.is_training = True

    def get_config(self):
        return type(self.config)(**self.config.to_dict())

    def prepare_config_and_inputs_for_common(self):
        ids = torch.randint(3, self.config.vocab_size, (self.batch_size, self.seq_length))
        return self.get_config(), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


class CausalLMTests(ModelTesterMixin, GenerationTesterMixin):
    """All of them, for one of our configs."""

    config = None
    has_attentions = False  # Attention weights are never formed; `leap.explain` forms them.

    # It is left out for models from before 2023, as which it takes files without a year in them.
    test_can_init_all_missing_weights_before_2023 = True

    def setUp(self):
        self.model_tester = Tester(self.config)


class LeapTest(CausalLMTests, unittest.TestCase):
    """LEAP: windows and a global layer."""

    config = LeapConfig(**SMALL)
    all_model_classes = (LeapModel, LeapForCausalLM)


class LeapformerTest(CausalLMTests, unittest.TestCase):
    """LeaPformer, with rotary positions and gates."""

    config = LeapformerConfig(**SMALL, position_embedding="rotary", gate="channel")
    all_model_classes = (LeapformerModel, LeapformerForCausalLM)


class HybridTest(CausalLMTests, unittest.TestCase):
    """A windowed LEAP layer, in the formulation with the most parameters, and a softmax layer."""

    config = LeapformerConfig(
        **SMALL, attention=["leap", "softmax"], window_sizes=[4, None], formulation="fastformer"
    )
    all_model_classes = (LeapformerModel, LeapformerForCausalLM)
