"""The model of a run, by its settings: any attention of this package, or Hugging Face's GPT-2."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
)

from leap.errors import ConfigError, FileError
from leap.models import (
    LeapConfig,
    LeapForCausalLM,
    LeapformerConfig,
    LeapformerForCausalLM,
    presets,
    usable_as,
)
from leap.models.config import PositionEmbedding, default_window
from leap.models.mechanisms import check_options
from leap.tasks.files import check_logits, check_one_run, check_weights, reading_model
from leap.tasks.lm.tokenizer import TextTokenizer, load_tokenizer
from leap.tasks.mechanism import AttentionOptions
from leap.training import DeviceName, check_size, quiet
from leap.training.checkpoints import Checkpoints

BASELINE = "gpt2"
SIZES = {"hidden_size": 128, "n_layer": 6, "n_head": 4}
"""What a model measures unless told otherwise: LEAP's own experiments."""


@dataclass(frozen=True, kw_only=True)
class SizeConfig:
    """What models to be compared have in common."""

    position_embedding: PositionEmbedding | None = None
    """How positions are known; without learned ones, texts may be of any length. Unless a preset
    says otherwise (140m and 247m), none for LeaPformer and gated-delta, alibi for other linear
    attentions and for LeaPformer whose proportion is given, learned for the rest, and for gpt2
    always."""
    preset: str | None = None
    """Sizes by name, see leap lm presets; explicit sizes override it. By default none."""
    hidden_size: int | None = None
    """Width; 128 unless a preset says otherwise."""
    n_layer: int | None = None
    """Layers; 6 unless a preset says otherwise."""
    n_head: int | None = None
    """Heads in each layer; 4 unless a preset says otherwise."""
    dropout: float | None = None
    """Share of activations dropped in training; 0.1 unless a preset says otherwise."""


@dataclass(frozen=True, kw_only=True)
class MechanismConfig(AttentionOptions):
    """What models to be compared differ in."""

    attention: str = "leapformer"
    """Attention: leapformer, leap, cosformer, linear, gated-delta, softmax; gpt2 for Hugging Face's
    GPT-2; or several with commas, cycled over the layers (leap,leapformer)."""
    formulation: str | None = None
    """Formulation of LEAP layers: leap-mixed, leap-1.0, leap-0.1, leap-elu, additive, fastformer;
    by default the first, which did best."""
    windows: str = "doubling"
    """Windows of LEAP layers: doubling (4, 8, 16, ... below the length of training, then global,
    as the last layer is), global, or one per layer (4,8,global)."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig(SizeConfig, MechanismConfig):
    """What a language model is made of."""


@runtime_checkable
class Vocabulary(Protocol):
    """What a model is told of its tokens; a `TextTokenizer` knows it."""

    @property
    def vocab_size(self) -> int:
        """Number of different tokens."""

    @property
    def eos_id(self) -> int:
        """The token that ends a text."""

    @property
    def fingerprint(self) -> str:
        """Tells vocabularies apart."""


def check_attention(names: str) -> None:
    """Refuse an attention, or one of several, that a language model cannot have."""
    known = usable_as("causal")
    for name in names.split(","):
        if name not in known and names != BASELINE:
            raise ConfigError(
                f"attention={name!r} is none that a language model can have; there are "
                f"{', '.join([*known, BASELINE])}"
            )


def build_config(config: ModelConfig, tokenizer: Vocabulary, length: int) -> Any:
    """The Hugging Face config of a model for sequences of `length` tokens."""
    base = SIZES if config.preset is None else presets.preset(config.preset).to_dict()
    given = {
        "hidden_size": config.hidden_size,
        "n_layer": config.n_layer,
        "n_head": config.n_head,
        "position_embedding": config.position_embedding,
        "hidden_dropout_prob": config.dropout,
    }
    changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    changes |= config.given()
    changes |= {
        "vocab_size": tokenizer.vocab_size,
        "n_positions": length,
        "bos_token_id": tokenizer.eos_id,
        "eos_token_id": tokenizer.eos_id,
        "pad_token_id": tokenizer.eos_id,
        "tokenizer_fingerprint": tokenizer.fingerprint,
    }
    n_layer = changes.get("n_layer", base["n_layer"])
    if config.attention == BASELINE:
        return _gpt2(config, base | changes)
    names = config.attention.split(",")
    attentions = [names[layer % len(names)] for layer in range(n_layer)]
    changes["attention"] = attentions[0] if len(set(attentions)) == 1 else attentions
    if "leap" in attentions:
        changes["window_sizes"] = windows(config.windows, n_layer, length)
        if config.formulation is not None:
            changes["formulation"] = config.formulation
    elif config.formulation is not None or config.windows != "doubling":
        raise ConfigError(
            f"formulation={config.formulation} and windows={config.windows} are of LEAP layers, "
            f"and attention={config.attention} has none"
        )
    if changes["attention"] == "leap" and config.gate is not None:
        raise ConfigError(f"gate={config.gate}: LEAP layers have no gates to forget by; drop it")
    if changes["attention"] == "leap" and all(w is None for w in changes["window_sizes"]):
        changes |= {"window_sizes": None, "use_local_att": False}
    if config.preset is not None:
        built = presets.preset(config.preset, **changes)
    else:
        kind = LeapConfig if changes["attention"] == "leap" else LeapformerConfig
        built = kind(**SIZES | changes)
    check_options(config.given(), built.attentions, built.proportion, divides=False)
    return built


def build_model(config: ModelConfig, tokenizer: Vocabulary, length: int) -> PreTrainedModel:
    """A new model, its weights drawn at random."""
    built = build_config(config, tokenizer, length)
    if isinstance(built, GPT2Config):
        model: PreTrainedModel = GPT2LMHeadModel(built)
        model.loss_type = "ForCausalLM"  # What it computes; its name does not tell.
        return model
    kind = LeapForCausalLM if isinstance(built, LeapConfig) else LeapformerForCausalLM
    return kind(built)


@dataclass(frozen=True)
class AnyVocabulary:
    """A vocabulary for models that are made to see whether they can be."""

    vocab_size: int = 32_000
    eos_id: int = 0
    fingerprint: str = ""


def check_model(config: ModelConfig, length: int, device: DeviceName | None = None) -> None:
    """Refuse settings that make no model, before there is a text or a tokenizer."""
    check_size(lambda: build_model(config, AnyVocabulary(), length), device)


@dataclass(frozen=True)
class PresetSize:
    """What a model of a preset measures."""

    name: str
    parameters: int
    state_bytes: int
    """What it keeps of a text of any length, in float32."""
    config: LeapformerConfig


def preset_sizes() -> list[PresetSize]:
    """Every preset with its size, found without making its weights."""
    found = []
    for name in presets.PRESETS:
        config = presets.preset(name)
        with torch.device("meta"):
            parameters = LeapformerForCausalLM(config).num_parameters()
        found.append(PresetSize(name, parameters, _state_bytes(config), config))
    return found


@torch.no_grad()
def _state_bytes(config: LeapformerConfig) -> int:
    """What all layers keep, from one layer of each kind."""
    kinds = list(zip(config.attentions, config.windows, strict=True))
    sizes = {}
    for kind in set(kinds):
        attention = config.build_attention(kinds.index(kind))
        _, state = attention(torch.zeros(1, kind[1] or 1, config.hidden_size))
        sizes[kind] = state.n_bytes
    return sum(sizes[kind] for kind in kinds)


def windows(text: str, n_layer: int, length: int) -> list[int | None]:
    """The window of each layer, None for all, from its short form, for sequences of `length`."""
    if text == "doubling":
        return [default_window(layer, length) for layer in range(n_layer - 1)] + [None]
    if text == "global":
        return [None] * n_layer
    try:
        found = [None if entry == "global" else int(entry) for entry in text.split(",")]
    except ValueError as error:
        raise ConfigError(
            f"windows={text!r} is not known; give doubling, global, or one per layer, as 4,8,global"
        ) from error
    if len(found) != n_layer:
        raise ConfigError(f"windows={text!r} has {len(found)} entries for {n_layer} layers")
    if any(window is not None and window < 1 for window in found):
        raise ConfigError(f"windows={text!r}: a token sees itself at least; give 1 or more")
    return found


def load_model(path: Path) -> tuple[PreTrainedModel, TextTokenizer]:
    """The model of a run folder, or of a folder of `save_pretrained`, and its tokenizer.

    A run that is not finished gives the best model so far.

    Raises:
        FileError: if there is none, its files are broken, or its weights or its tokenizer are not
            its own.
    """
    folder = _model_folder(path)
    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    with reading_model(folder), quiet():
        config = AutoConfig.from_pretrained(str(folder), **options)
        _check_kind(config, folder)
        found: Any = AutoModelForCausalLM.from_pretrained(
            str(folder), config=config, use_safetensors=True, output_loading_info=True, **options
        )
        model, loaded = found
        check_weights(model, loaded, folder)
        with torch.no_grad():
            check_logits(model.eval()(input_ids=torch.zeros(1, 1, dtype=torch.long)).logits)
    with_tokenizer = next(
        (f for f in (folder, path / "tokenizer") if (f / "tokenizer_config.json").exists()), folder
    )
    tokenizer = load_tokenizer(with_tokenizer)
    expected = getattr(config, "tokenizer_fingerprint", tokenizer.fingerprint)
    if tokenizer.fingerprint != expected or tokenizer.vocab_size > config.vocab_size:
        raise FileError(
            f"the tokenizer in {with_tokenizer} is not the one this model was trained with "
            f"({tokenizer.vocab_size} tokens against {config.vocab_size}); put its own back"
        )
    return model, tokenizer


def max_length(model: PreTrainedModel) -> int | None:
    """How many tokens a model can read in a row; None where there is no limit."""
    config: Any = model.config
    return getattr(config, "max_position_embeddings", None)


def _check_kind(config: Any, folder: Path) -> None:
    """Refuse a model of another task, which could be loaded but for its head."""
    for name in getattr(config, "architectures", None) or ():
        if not name.endswith(("ForCausalLM", "LMHeadModel", "Model")):
            raise FileError(
                f"{folder} holds no language model, but a {name}; give a run of leap lm train"
            )


def _model_folder(path: Path) -> Path:
    """Where the model is: in a run folder, finished or not, or right here."""
    if not path.is_dir():
        raise FileError(f"no run folder at {path}; train a model with leap lm train")
    check_one_run(path)
    if (path / "model" / "config.json").exists():
        return path / "model"
    if (path / "checkpoints").is_dir() or (path / "data.json").exists():
        checkpoints = Checkpoints(path / "checkpoints")
        whole = checkpoints.whole()
        if not whole:
            raise FileError(f"the run in {path} has no checkpoint yet; wait for its first one")
        best = checkpoints.state(whole[-1])["best_global_step"]
        return checkpoints.at(best if best in whole else whole[-1])
    if not (path / "config.json").exists():
        raise FileError(f"{path} holds no model; train one with leap lm train")
    return path


def _gpt2(config: ModelConfig, settings: Mapping[str, Any]) -> GPT2Config:
    if config.formulation is not None or config.windows != "doubling":
        raise ConfigError("formulation and windows are of LEAP layers, and gpt2 has none")
    for name, value in config.given().items():
        raise ConfigError(f"gpt2 has no {name}={value}; use attention=softmax, or leave it out")
    if config.position_embedding not in (None, "learned"):
        raise ConfigError(
            f"gpt2 has learned positions, not {config.position_embedding}; leave them out"
        )
    sizes = ("hidden_size", "n_layer", "n_head", "n_positions", "hidden_dropout_prob")
    ours = LeapformerConfig(
        attention="softmax", **{name: settings[name] for name in sizes if name in settings}
    )
    ours.build_attention(0)  # GPT-2 and its config would take sizes that make no model.
    dropout = settings.get("hidden_dropout_prob", 0.1)
    same = ("vocab_size", "n_positions", "n_layer", "bos_token_id", "eos_token_id", "pad_token_id")
    built: Any = GPT2Config(
        n_embd=settings["hidden_size"],
        n_head=settings["n_head"],
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=0.0,  # As in our layers, which drop no attention weights.
        **{name: settings[name] for name in same},
    )
    built.tokenizer_fingerprint = settings["tokenizer_fingerprint"]
    return built
