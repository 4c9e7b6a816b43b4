"""The model of a run, by its settings, and a run's model and vocabulary read back."""

from collections.abc import Sequence, Sized
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoConfig

from leap.errors import ConfigError, FileError, refuse_given
from leap.models import (
    LeapformerForSeq2SeqLM,
    LeapformerForSpeechSeq2Seq,
    LeapformerSeq2SeqConfig,
    LeapformerSpeechConfig,
)
from leap.models.fbank import LeapformerFeatureExtractor
from leap.models.mechanisms import check_options
from leap.models.seq2seq_config import Part
from leap.reports.files import read_json
from leap.runtime.streaming.vocabulary import BOS, EOS, PAD
from leap.tasks.files import check_logits, check_one_run, check_weights, reading_model
from leap.tasks.mechanism import AttentionOptions
from leap.tasks.simul.vocabulary import Vocabulary, load_vocabulary
from leap.training import DeviceName, check_size, quiet

Translator = LeapformerForSeq2SeqLM | LeapformerForSpeechSeq2Seq


@dataclass(frozen=True, kw_only=True)
class ModelConfig(AttentionOptions):
    """What a translation model is made of."""

    attention: str = "leapformer"
    """Attention of all parts that are given none of their own: leapformer, softmax, elu-linear,
    cosformer, ...; or several with commas, one per layer."""
    encoder_attention: str | None = None
    """Attention of the encoder; by default that of all."""
    decoder_attention: str | None = None
    """Attention of the decoder to what it has written; by default that of all."""
    cross_attention: str | None = None
    """Attention of the decoder to the source; by default that of all."""
    cross_window: int | None = None
    """With softmax as cross-attention: how many states of the source are seen, and kept: as many as
    a source has that is read as a whole, or that the longest wait takes, and more. By default all
    are."""
    feature: str = "relu"
    """Feature map of LeaPformer, cosFormer and linear: relu, exp, square, ...; see
    `leap.ops.features`."""
    position_embedding: Literal["sinusoidal", "alibi", "rotary", "none"] = "sinusoidal"
    """How positions are known; with alibi, what is seen of one's own language fades with distance
    besides, and the encoder looks back only."""
    hidden_size: int = 128
    """Width."""
    feed_forward_size: int = 512
    """Width of the feed-forward layers."""
    n_layer: int = 2
    """Layers of the decoder."""
    encoder_layers: int = 2
    """Layers of the encoder."""
    n_head: int = 4
    """Heads of each attention."""
    dropout: float = 0.1
    """Share of activations dropped in training."""
    label_smoothing: float = 0.1
    """Label smoothing: share of a label that is spread over all subwords in training."""
    subsampling: int = 3
    """Of speech: convolutions that halve the number of frames; 3 make a state of 80 ms."""
    ctc_weight: float = 0.3
    """Of speech: weight of the CTC loss on the transcript, where there is one."""


WANTED = "give the run folder of leap simul train"
LONGEST = 512
"""Subwords that `generate` writes at most, unless told otherwise; Hugging Face's own 20 are few."""


def check_model(config: ModelConfig, device: DeviceName | None = None) -> None:
    """Refuse settings that make no model, before there are sentences or a vocabulary."""
    check_size(lambda: build_model(config, range(1000)), device)


def build_model(config: ModelConfig, vocabulary: Sized, n_bins: int | None = None) -> Translator:
    """A new model, its weights drawn at random.

    Args:
        config: sizes and attentions.
        vocabulary: of both languages.
        n_bins: mel bins of a frame, for a model of speech; None for one of text.
    """
    options: dict[str, Any] = {
        "vocab_size": len(vocabulary),
        "hidden_size": config.hidden_size,
        "intermediate_size": config.feed_forward_size,
        "n_layer": config.n_layer,
        "encoder_layers": config.encoder_layers,
        "n_head": config.n_head,
        "cross_window": config.cross_window,
        "feature": config.feature,
        "position_embedding": config.position_embedding,
        "hidden_dropout_prob": config.dropout,
        "label_smoothing": config.label_smoothing,
        "bos_token_id": BOS,
        "pad_token_id": PAD,
        "eos_token_id": EOS,
        **config.given(),
    }
    for part, n_layer in (
        ("encoder", config.encoder_layers),
        ("decoder", config.n_layer),
        ("cross", config.n_layer),
    ):
        name = getattr(config, f"{part}_attention") or config.attention
        options[f"{part}_attention"] = _one_a_layer(name, n_layer)
    model: Translator
    if n_bins is None:
        text = LeapformerSeq2SeqConfig(**options)
        _check_read(config, text)
        model = LeapformerForSeq2SeqLM(text)
    else:
        speech: dict[str, Any] = {
            "n_bins": n_bins,
            "n_subsampling": config.subsampling,
            "ctc_weight": config.ctc_weight,
        }
        spoken = LeapformerSpeechConfig(**options, **speech)
        _check_read(config, spoken)
        model = LeapformerForSpeechSeq2Seq(spoken)
    model.generation_config.max_new_tokens = LONGEST
    return model


def _check_read(given: ModelConfig, config: LeapformerSeq2SeqConfig) -> None:
    """Refuse settings that no part of the model would read."""
    parts: dict[Part, list[str]] = {
        name: config.part(name).attentions for name in ("encoder", "decoder", "cross")
    }
    looking_back = [each for name in parts for each in parts[name] if config.form(name) == "causal"]
    every = [each for names in parts.values() for each in names]
    divides = config.form("encoder") != "causal" and "leapformer" in parts["encoder"]
    for name, value in given.given().items():
        having = looking_back if name in ("gate", "convolution") else every
        check_options({name: value}, having, config.proportion, divides=divides)
    if "softmax" not in parts["cross"]:
        named = ",".join(dict.fromkeys(parts["cross"]))
        refuse_given(given, ("cross_window",), f"of softmax, and cross_attention={named}")
    if not {"leapformer", "cosformer", "linear"} & set(every):
        named = " and ".join(dict.fromkeys(every))
        refuse_given(
            given, ("feature",), f"of leapformer, cosformer and linear, and not of {named}"
        )


COMMON_SETTINGS = (
    "hidden_size",
    "intermediate_size",
    "n_head",
    "feature",
    "position_embedding",
    *(f.name for f in fields(AttentionOptions)),
)
ENCODER_SETTINGS = (
    *COMMON_SETTINGS,
    "encoder_layers",
    "encoder_attention",
    "n_bins",
    "n_subsampling",
)
"""What two models must have in common for one to begin with the other's encoder."""
DECODER_SETTINGS = (*COMMON_SETTINGS, "n_layer", "decoder_attention", "cross_attention")
"""What they must for its decoder, besides the subwords."""


def take_encoder(model: Translator, vocabulary: Vocabulary, run: Path) -> None:
    """Give a new model the encoder of a run, and its head for transcripts where both have one.

    Args:
        model: changed in place.
        vocabulary: of the new model. One that reads text, or tells transcripts, must have the
            run's subwords to take what knows them.
        run: the run folder, of recognition for one.

    Raises:
        ConfigError: if the encoders are not of one size and kind.
    """
    other, its_vocabulary = load_run(run)
    if type(other) is not type(model):
        raise ConfigError(
            f"encoder_from={run} reads {_source(other)}, and this model {_source(model)}"
        )
    _check_same(model, other, ENCODER_SETTINGS, f"encoder_from={run}")
    same_pieces = its_vocabulary.pieces == vocabulary.pieces
    if not same_pieces and _source(model) == "text":
        raise ConfigError(
            f"encoder_from={run} knows other subwords; prepare the data with "
            f"--use-vocabulary {run}/model"
        )
    model.model.encoder.load_state_dict(other.model.encoder.state_dict())
    if same_pieces and model.ctc_head is not None and other.ctc_head is not None:
        model.ctc_head.load_state_dict(other.ctc_head.state_dict())


def take_decoder(model: Translator, vocabulary: Vocabulary, run: Path) -> None:
    """Give a new model the decoder of a run, with its subwords; the run may read text or speech.

    Args:
        model: changed in place.
        vocabulary: of the new model.
        run: the run folder, of text for one, of which there is more than of speech.

    Raises:
        ConfigError: if the decoders are not of one size and kind, or know other subwords.
    """
    other, its_vocabulary = load_run(run)
    _check_same(model, other, DECODER_SETTINGS, f"decoder_from={run}")
    if its_vocabulary.pieces != vocabulary.pieces:
        raise ConfigError(
            f"decoder_from={run} knows other subwords; prepare the data with "
            f"--use-vocabulary {run}/model"
        )
    model.model.decoder.load_state_dict(other.model.decoder.state_dict())


def _check_same(model: Translator, other: Translator, settings: Sequence[str], given: str) -> None:
    for name in settings:
        theirs, ours = (getattr(each.config, name, None) for each in (other, model))
        if theirs != ours:
            raise ConfigError(
                f"{given} has {name}={theirs}, and this model {ours}; train both with the same"
            )


def load_run(path: Path) -> tuple[Translator, Vocabulary]:
    """The model of a run folder, ready to translate, and its vocabulary.

    Args:
        path: the run folder, or the folder of its model.
    """
    check_one_run(path)
    folder = path / "model" if (path / "model").is_dir() else path
    if (folder / "data.json").is_file():  # That of a run, which has no model yet.
        if "sentences" not in read_json(folder / "data.json"):
            raise FileError(f"{path} is of another command; {WANTED}")
        raise FileError(
            f"the run in {path} is not finished; give its leap simul train again, to go on with it"
        )
    if not (folder / "config.json").is_file():
        raise FileError(
            f"no finished run at {path}; make one with leap simul train --output {path}"
        )
    with reading_model(folder), quiet():
        config = AutoConfig.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
        kind = {
            LeapformerSeq2SeqConfig.model_type: LeapformerForSeq2SeqLM,
            LeapformerSpeechConfig.model_type: LeapformerForSpeechSeq2Seq,
        }.get(config.model_type)
        if kind is None:
            raise FileError(
                f"{path} holds no translation model, but a {config.model_type} of another "
                f"task; {WANTED}"
            )
        found: Any = kind.from_pretrained(
            str(folder), use_safetensors=True, output_loading_info=True
        )
        model, loaded = found
        check_weights(model, loaded, folder)
        _try(model.eval())
    vocabulary = load_vocabulary(folder)
    vocabulary.check_fits(model.config.vocab_size, str(folder))
    return model, vocabulary


@torch.no_grad()
def _try(model: Translator) -> None:
    """Let a model read and write a little: what its config has wrong may show only then."""
    written = torch.tensor([[BOS]])
    if isinstance(model, LeapformerForSpeechSeq2Seq):
        frames = torch.zeros(1, 2 ** (model.config.n_subsampling + 1), model.config.n_bins)
        outputs = model(input_features=frames, decoder_input_ids=written)
    else:
        outputs = model(input_ids=torch.tensor([[EOS]]), decoder_input_ids=written)
    check_logits(outputs.logits)


def save_model(
    model: Translator,
    vocabulary: Vocabulary,
    extractor: LeapformerFeatureExtractor | None,
    folder: Path,
) -> None:
    """Write what `load_run`, or Hugging Face's Auto classes, read."""
    with quiet():
        model.save_pretrained(str(folder))
        if extractor is not None:
            extractor.save_pretrained(str(folder))
    vocabulary.save(folder)


def _source(model: Translator) -> str:
    return "speech" if isinstance(model, LeapformerForSpeechSeq2Seq) else "text"


def _one_a_layer(names: str, n_layer: int) -> str | list[str]:
    given = names.split(",")
    if len(given) == 1:
        return names
    if len(given) != n_layer:
        raise ConfigError(f"attention {names!r} has {len(given)} names for {n_layer} layers")
    return given
