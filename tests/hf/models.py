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
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
    MODEL_MAPPING_NAMES,
)

from leap.models import (
    FastformerForCausalLM,
    FastformerLMConfig,
    FastformerModel,
    LeapConfig,
    LeapForCausalLM,
    LeapformerConfig,
    LeapformerEncoder,
    LeapformerForCausalLM,
    LeapformerForSeq2SeqLM,
    LeapformerForSequenceClassification,
    LeapformerForSpeechSeq2Seq,
    LeapformerModel,
    LeapformerSeq2SeqConfig,
    LeapformerSeq2SeqModel,
    LeapformerSpeechConfig,
    LeapformerSpeechModel,
    LeapModel,
    StateCache,
)
from leap.models.decoder import TranslationCache

sys.path.insert(0, str(Path(os.environ["HF_TESTS"]).absolute()))
from tests.generation.test_utils import GenerationTesterMixin
from tests.test_modeling_common import ModelTesterMixin

if getattr(GenerationTesterMixin, "is_stand_in", False):

    class GenerationTest(unittest.TestCase):
        """Says that a part of the suite is not there, where nothing else would."""

        @unittest.skip("no tests of generation in the source archive; give HF=checkout for them")
        def test_generation(self) -> None:
            """Nothing to run."""


# The tests look into these lists for which classes take labels, and which have no loss to train by.
for names, models in (
    (
        MODEL_MAPPING_NAMES,
        (
            LeapModel,
            FastformerModel,
            LeapformerModel,
            LeapformerEncoder,
            LeapformerSeq2SeqModel,
            LeapformerSpeechModel,
        ),
    ),
    (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        (LeapForCausalLM, FastformerForCausalLM, LeapformerForCausalLM),
    ),
    (MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES, (LeapformerForSequenceClassification,)),
    # The second one too: their speech models are given no labels.
    (
        MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        (LeapformerForSeq2SeqLM, LeapformerForSpeechSeq2Seq),
    ),
    (MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES, (LeapformerForSpeechSeq2Seq,)),
):
    for model in models:
        names[f"leap-{model.__name__}"] = model.__name__

SMALL = {
    "vocab_size": 99,
    "hidden_size": 32,
    "n_layer": 2,
    "n_head": 4,
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
        self.num_attention_heads = config.n_head
        self.is_training = True

    def get_config(self):
        return type(self.config)(**self.config.to_dict())

    def prepare_config_and_inputs_for_common(self):
        ids = torch.randint(3, self.config.vocab_size, (self.batch_size, self.seq_length))
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if self.config.is_encoder_decoder:
            inputs |= {
                "decoder_input_ids": ids.flip(1),
                "decoder_attention_mask": inputs["attention_mask"],
            }
        if isinstance(self.config, LeapformerSpeechConfig):
            n_frames = self.seq_length * self.config.frames_per_state
            inputs["input_features"] = torch.randn(self.batch_size, n_frames, self.config.n_bins)
            inputs["attention_mask"] = torch.ones(self.batch_size, n_frames, dtype=torch.long)
            del inputs["input_ids"]
        return self.get_config(), inputs


class ModelTests(ModelTesterMixin):
    """All of them, for one of our configs."""

    config = None

    # It is left out for models from before 2023, as which it takes files without a year in them.
    test_can_init_all_missing_weights_before_2023 = True

    def setUp(self):
        self.model_tester = Tester(self.config)

    def test_retain_grad_hidden_states_attentions(self):
        """Without weights: formed beside what comes out, they take no gradient back from it."""
        self.has_attentions = False
        super().test_retain_grad_hidden_states_attentions()


class GeneratorTests(ModelTests, GenerationTesterMixin):
    """Those of generation too."""

    def _check_past_key_values_for_generate(self, batch_size, past_key_values, seq_length, config):
        """States in place of keys and values: their shape does not tell how much was read."""
        if isinstance(past_key_values, TranslationCache):
            past_key_values = past_key_values.self_attention_cache
        self.assertIsInstance(past_key_values, StateCache)
        for layer in past_key_values.layers:
            self.assertEqual(layer.batch_size, batch_size)
            self.assertEqual(layer.get_seq_length(), seq_length)


class LeapTest(GeneratorTests, unittest.TestCase):
    """LEAP: windows and a global layer."""

    config = LeapConfig(**SMALL)
    all_model_classes = (LeapModel, LeapForCausalLM)


class FastformerTest(GeneratorTests, unittest.TestCase):
    """Causal Fastformer, by the original's names."""

    config = FastformerLMConfig(**SMALL)
    all_model_classes = (FastformerModel, FastformerForCausalLM)


class LeapformerTest(GeneratorTests, unittest.TestCase):
    """LeaPformer, with rotary positions and gates."""

    config = LeapformerConfig(**SMALL, position_embedding="rotary", gate="channel")
    all_model_classes = (LeapformerModel, LeapformerForCausalLM)


class DefaultTest(GeneratorTests, unittest.TestCase):
    """LeaPformer as it is unless told otherwise."""

    config = LeapformerConfig(**SMALL)
    all_model_classes = (LeapformerModel, LeapformerForCausalLM)


class HybridTest(GeneratorTests, unittest.TestCase):
    """A windowed LEAP layer, in the formulation with the most parameters, and a softmax layer."""

    config = LeapformerConfig(
        **SMALL, attention=["leap", "softmax"], window_sizes=[4, None], formulation="fastformer"
    )
    all_model_classes = (LeapformerModel, LeapformerForCausalLM)


class ClassifierTest(ModelTests, unittest.TestCase):
    """The encoder and the classifier."""

    config = LeapformerConfig(**SMALL)
    all_model_classes = (LeapformerEncoder, LeapformerForSequenceClassification)


class TranslationTests(GeneratorTests):
    """What translation models have in common."""

    is_encoder_decoder = True

    @unittest.skip("The loss is made from hidden states, not from logits; ours test its alignment.")
    def test_encoder_decoder_loss_no_double_shift(self):
        """Set aside."""


class TranslationTest(TranslationTests, unittest.TestCase):
    """Translation of text."""

    config = LeapformerSeq2SeqConfig(**SMALL)
    all_model_classes = (LeapformerSeq2SeqModel, LeapformerForSeq2SeqLM)


class SpeechTest(TranslationTests, unittest.TestCase):
    """Translation of speech."""

    config = LeapformerSpeechConfig(**SMALL, n_bins=8)
    all_model_classes = (LeapformerSpeechModel, LeapformerForSpeechSeq2Seq)

    @unittest.skip("Frames of speech are no tokens to embed.")
    def test_inputs_embeds(self):
        """Set aside."""

    @unittest.skip("Frames of speech are no tokens to embed.")
    def test_inputs_embeds_matches_input_ids(self):
        """Set aside."""

    @unittest.skip("It looks for source tokens; ours test tables of target tokens.")
    def test_resize_tokens_embeddings(self):
        """Set aside."""

    @unittest.skip("It looks for source tokens; ours test tables of target tokens.")
    def test_resize_embeddings_untied(self):
        """Set aside."""
