"""Configurations, checked when they are made.

`LeapformerConfig` describes any decoder or encoder of this package. `LeapConfig` is the same with
the names and defaults of the original LEAP. What attentions there are is in `mechanisms`.
"""

from collections.abc import Iterable
from copy import copy
from dataclasses import field
from typing import Any, Literal, get_args

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from leap.errors import ConfigError
from leap.layers import Attention
from leap.layers.additive import FORMULATIONS
from leap.layers.attention import Form, one_of
from leap.models.mechanisms import ATTENTIONS, build_attention
from leap.ops.features import FEATURES

PositionEmbedding = Literal["learned", "sinusoidal", "rotary", "selective", "alibi", "none"]
Pooling = Literal["mean", "cls", "last"]

LAYER_TYPES = {
    "linear_attention": None,
    "full_attention": "softmax",
    "sliding_attention": "leap",
}
"""Hugging Face's words for kinds of layers, and the mechanism that they ask for."""
ALIASES = {
    "n_heads": "n_head",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
    "max_position_embeddings": "n_positions",
}
"""Other names under which settings may be given."""
FIRST_WINDOW = 4
"""Window of a first layer that is not told its own; each layer above sees twice as far."""


BEST: dict[str, Any] = {
    "proportion": "travelled",
    "gate": "head",
    "convolution": 4,
    "output_gate": True,
}
"""What decoders of LeaPformer have where `proportion` is not given: what learned best
(docs/experiments.md)."""
PAPER: dict[str, Any] = {
    "proportion": "learned",
    "gate": None,
    "convolution": None,
    "output_gate": False,
}
"""What other models have."""


MOST_LAYERS = 1000
"""As deep as transformers have been trained (DeepNet, 2022). To make one of 100,000 layers takes
minutes, and would be begun by who mistyped a number."""


def check_layers(name: str, n_layer: int) -> None:
    """Refuse more layers than can be meant."""
    if n_layer > MOST_LAYERS:
        raise ConfigError(
            f"{name}={n_layer} is more than the {MOST_LAYERS:,} layers that a model may have here"
        )


def default_window(layer: int, n_positions: int) -> int | None:
    """The window of a LEAP layer that is not told its own, None where it sees everything.

    It doubles with every layer as far as there is something to see: one that holds the n_positions
    of training shows all of them, as no window does, whose state is a mean instead of that many
    tokens. So all layers together keep less than 2 n_positions tokens, however many they are.
    """
    window = FIRST_WINDOW * 2**layer
    return window if window < n_positions else None


@strict
class LeapformerConfig(PreTrainedConfig):
    """A pre-norm transformer with any attention.

    Args:
        vocab_size: number of tokens.
        hidden_size: width of the residual stream.
        n_positions: learned positions; a sequence cannot be longer. Without learned positions it
            is what models are trained at, and no limit.
        n_layer, n_head: layers, and heads in each (`n_heads` means the same).
        intermediate_size: width of the feed-forward layers; 4 hidden_size by default.
        attention: name of the mechanism in `ATTENTIONS`, or one name a layer for a hybrid.
        attention_options: further arguments of a mechanism's layer, by the mechanism's name, as
            {"linformer": {"n_mixture": 64}}.
        attention_dropout: share of scores, or of attended values, that attentions drop.
        layer_types: the same in Hugging Face's words: "linear_attention" for `attention`,
            "full_attention" for softmax, "sliding_attention" for LEAP over the layer's window.
        window_sizes: window of each LEAP layer; None, for one or for all, sees everything. Layers
            of type "sliding_attention" have 4, 8, 16, ... by their depth, if it is None for all,
            as far as n_positions: see `default_window`.
        position_embedding: "learned" or "sinusoidal", added to embeddings; "rotary", turning the
            queries and keys of attentions that have them; "selective", turning them by angles
            that tokens choose (Selective RoPE), in decoders; "alibi", by which scores fade with
            distance, in decoders; or "none". By default what learned best of those measured: see
            `default_positions`.
        feature: feature map of linear attentions, in `leap.ops.features.FEATURES`.
        proportion: how attention="leapformer" knows where tokens stand: "travelled", or "learned"
            as in the paper. Where it is not given, a decoder whose layers are all LeaPformer's is
            made of what learned best, `BEST`: travelled places, a gate per head, a convolution and
            an output gate, each unless given otherwise; other models have the paper's.
        proportion_hidden, proportion_step_down, proportion_per_head, proportion_bins,
            constant_steps, clocks, places, normaliser, attention_eps: see `LeapformerAttention`.
        gate: how decoders learn to forget: "head", or in linear attentions "channel"; not in LEAP.
        convolution: taps of a short convolution over the projections of attentions, in decoders;
            usually 4.
        output_gate: multiply what leaves attentions by a learned gate of each channel; not in LEAP,
            and gated-delta always has one.
        formulation, rescale: see `LeapAttention`.
        attention_bias: whether projections of attentions have a bias.
        hidden_dropout_prob: after embeddings, attentions and feed-forward layers.
        loss_without_logits: with labels, return the loss alone, computed a few tokens at a time.
        adaptive_cutoffs: sizes at which the vocabulary is cut into clusters of rarer and rarer
            tokens with narrower and narrower embeddings (adaptive input and softmax).
        adaptive_factor: by how much each cluster is narrower than the one before.
        pooling, classifier_size, two_inputs: see `LeapformerForSequenceClassification`.
    """

    model_type = "leapformer"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012
    attribute_map = {  # noqa: RUF012
        alias: name for alias, name in ALIASES.items() if alias != "max_position_embeddings"
    }

    # Sizes.
    vocab_size: int = 32100
    hidden_size: int = 256
    n_positions: int = 1024
    n_layer: int = 4
    n_head: int = 4
    intermediate_size: int | None = None
    # Which attention, and how it knows positions.
    attention: str | list[str] = "leapformer"
    attention_options: dict[str, dict[str, Any]] = field(default_factory=dict)
    layer_types: list[str] | None = None
    position_embedding: str | None = None
    # Every attention.
    attention_bias: bool = True
    attention_dropout: float = 0.0
    attention_eps: float = 1e-6
    gate: str | None = None
    convolution: int | None = None
    output_gate: bool | None = None
    # LeaPformer and other linear attentions.
    feature: str = "relu"
    normaliser: str = "denominator"
    proportion: str | None = None
    proportion_hidden: int | None = None
    proportion_step_down: int | None = None
    proportion_per_head: bool | None = None
    proportion_bins: int | None = None
    constant_steps: bool = False
    clocks: int = 1
    places: str = "undivided"
    # LEAP.
    window_sizes: list[int | None] | None = None
    formulation: str = "leap-mixed"
    rescale: float | str | None = "default"
    # Blocks and their initialisation.
    hidden_act: str = "gelu"
    hidden_dropout_prob: float = 0.1
    layer_norm_eps: float = 1e-5
    initializer_range: float = 0.02
    # Language models.
    tie_word_embeddings: bool = True
    loss_without_logits: bool = True
    adaptive_cutoffs: list[int] | None = None
    adaptive_factor: int = 4
    use_cache: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None
    # Classifiers.
    pooling: str = "mean"
    classifier_size: int | None = None
    two_inputs: bool = False

    def __new__(cls, *args: Any, **kwargs: Any) -> "LeapformerConfig":
        """A config yet to be filled in; here alone one can see what was given."""
        given = [(alias, name) for alias, name in ALIASES.items() if {alias, name} <= set(kwargs)]
        for alias, name in given:
            if kwargs[alias] != kwargs[name]:
                raise ConfigError(
                    f"{name}={kwargs[name]} and {alias}={kwargs[alias]} are two names of one "
                    "setting; give one of them"
                )
        return super().__new__(cls)

    def __post_init__(self, **kwargs: Any) -> None:
        for alias, name in ALIASES.items():
            if alias in kwargs:  # Before anything is derived from them.
                setattr(self, name, kwargs.pop(alias))
        self.by_default: dict[str, Any] = kwargs.pop("by_default", {})  # See `settle`.
        self._check_sizes()
        self._settle_attention()
        super().__post_init__(**kwargs)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """The config of a saved model; one that names no proportions has the paper's."""
        return super().from_dict({"proportion": "learned"} | config_dict, **kwargs)

    def to_dict(self) -> dict[str, Any]:
        """All settings; the heads under their usual name too, by which peft looks for them."""
        return {**super().to_dict(), "num_attention_heads": self.n_head}

    def to_diff_dict(self) -> dict[str, Any]:
        """What a saved config holds: each setting once."""
        left_out = {*self.attribute_map, "by_default"}
        saved = super().to_diff_dict()
        return {name: value for name, value in saved.items() if name not in left_out}

    @property
    def max_position_embeddings(self) -> int | None:
        """The longest sequence, None where there is no limit; `generate()` warns beyond it."""
        return self.n_positions if self.position_embedding == "learned" else None

    @property
    def adds_sinusoids(self) -> bool:
        """Whether embeddings get sinusoidal positions."""
        return self.position_embedding == "sinusoidal"

    @property
    def begins_quietly(self) -> bool:
        """Whether layers begin by adding the less to the residual stream the more of them are."""
        return True

    @property
    def attentions(self) -> list[str]:
        """Name of the mechanism of each layer."""
        if isinstance(self.attention, str):
            return [self.attention] * self.n_layer
        return list(self.attention)

    @property
    def windows(self) -> list[int | None]:
        """Window of each layer, None where it sees everything."""
        return self.window_sizes or [None] * self.n_layer

    def build_attention(self, layer: int, form: Form = "causal") -> Attention:
        """The attention of one layer."""
        config = copy(self)
        config.settle(form)
        return build_attention(config, layer, form)

    def settle(self, form: Form) -> None:
        """Settle what was not given as is best for models of this form, or settle it anew.

        `by_default` has what was settled: what is still so was not given, and may change.
        """
        settled: dict[str, Any] = {}
        best = self._is_open("proportion") and self._can_be_best(form)
        for name, value in (BEST if best else PAPER).items():
            if self._is_open(name):
                settled[name] = value
        if self._is_open("position_embedding"):
            settled["position_embedding"] = "none" if best else self.default_positions(form)
        self.by_default = settled
        for name, value in settled.items():
            setattr(self, name, value)

    def default_positions(self, form: Form = "causal") -> str:
        """How positions are known in models other than the best, unless the config is told.

        Decoders of linear attention learn best where scores fade with distance, "alibi": it gives
        them the sense of what is near that they lack (docs/experiments.md), but for the delta rule,
        which learns to forget and needs "none". Others have "learned"
        ones: encoders, as there is no distance to fade by in both directions; LEAP, whose windows
        tell what is near; softmax, as GPT-2 has them; and hybrids with either. Translation models
        have "sinusoidal" ones, as the decoder finds its place in the source by them.
        """
        if form != "causal" or any(
            name in ("leap", "softmax") or "causal" not in ATTENTIONS[name].forms
            for name in self.attentions
        ):
            return "learned"
        return "alibi" if any(ATTENTIONS[name].alibi for name in self.attentions) else "none"

    def _can_be_best(self, form: Form) -> bool:
        return form == "causal" and set(self.attentions) == {"leapformer"}

    def _is_open(self, name: str) -> bool:
        """Whether a setting was not given, and has not been changed since it was settled."""
        value = getattr(self, name)
        settled = self.by_default
        return value is None or (name in settled and value == settled[name])

    def _check_sizes(self) -> None:
        for name in ("vocab_size", "hidden_size", "n_positions", "n_layer", "n_head", "clocks"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be 1 or more")
        check_layers("n_layer", self.n_layer)
        for name in ("intermediate_size", "classifier_size"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be 1 or more")
        if self.convolution is not None and self.convolution < 2:
            raise ConfigError(
                f"convolution={self.convolution} would meet no other token; give 2 taps or more, "
                "or None"
            )
        for name in ("hidden_dropout_prob", "attention_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} is a share, from 0 to below 1")
        choices: tuple[tuple[str, Iterable[str]], ...] = (
            ("position_embedding", get_args(PositionEmbedding)),
            ("pooling", get_args(Pooling)),
            ("feature", FEATURES),
            ("formulation", FORMULATIONS),
            ("hidden_act", ("gelu",)),
        )
        for name, known in choices:
            if getattr(self, name) is not None:  # Else it is settled later.
                one_of(name, getattr(self, name), tuple(known))

    def _settle_attention(self) -> None:
        """One mechanism, window and type a layer, whichever of them were given."""
        for name in self.attentions:
            one_of("attention", name, tuple(ATTENTIONS))
        for name in self.attention_options:
            one_of("attention_options", name, tuple(ATTENTIONS))
        kinds = self.layer_types
        if kinds is None:
            kinds = [ATTENTIONS[name].layer_type for name in self.attentions]
        for kind in kinds:
            one_of("layer_types", kind, tuple(LAYER_TYPES))
        lists: tuple[tuple[str, list[Any]], ...] = (
            ("attention", self.attentions),
            ("layer_types", kinds),
            ("window_sizes", self.windows),
        )
        for option, given in lists:
            if len(given) != self.n_layer:
                raise ConfigError(
                    f"{option}={given} has {len(given)} entries for n_layer={self.n_layer} layers"
                )
        if isinstance(self.attention, str):
            names = [LAYER_TYPES[kind] or self.attention for kind in kinds]
            if set(names) != {self.attention}:
                self.attention = names
        for layer, (name, kind) in enumerate(zip(self.attentions, kinds, strict=True)):
            if name != LAYER_TYPES[kind] and kind != ATTENTIONS[name].layer_type:
                raise ConfigError(
                    f"layer {layer} has attention={name!r} and layer_types={kind!r}; "
                    "leave one out, or make them agree"
                )
        self._settle_windows([kind == "sliding_attention" for kind in kinds])
        self.settle("causal")
        self._check_positions()
        self.layer_types = [ATTENTIONS[name].layer_type for name in self.attentions]

    def _settle_windows(self, sliding: list[bool]) -> None:
        """A window for each layer that slides, if none were given."""
        if self.window_sizes is None and any(sliding):
            self.window_sizes = [
                default_window(layer, self.n_positions) if slides else None
                for layer, slides in enumerate(sliding)
            ]
        for window in self.windows:
            if window is not None and window < 1:
                raise ConfigError(f"window_sizes={self.windows} holds {window}; give 1 or more")
        if any(self.windows) and "leap" not in self.attentions:
            raise ConfigError(
                f"window_sizes={self.windows} are windows of LEAP layers, and attention="
                f"{self.attention!r} has none; leave them out"
            )

    def _check_positions(self) -> None:
        given = self.position_embedding
        turns = "queries and keys to turn"
        needs = {
            "rotary": ("rotary", turns),
            "selective": ("rotary", turns),
            "alibi": ("alibi", "scores that fade at a fixed rate"),
        }
        if given not in needs:
            return
        has, what = needs[given]
        if not any(getattr(ATTENTIONS[name], has) for name in self.attentions):
            raise ConfigError(
                f"position_embedding={given!r} needs {what}, and attention="
                f"{self.attention!r} has none; use 'learned', 'sinusoidal' or 'none'"
            )


@strict
class LeapConfig(LeapformerConfig):
    """LEAP's decoder, by the names of the original `leap-transformer`.

    Args:
        use_local_att: let layers see windows; else all see everything.
        window_sizes: window of each layer. By default 4, 8, 16, ... below n_positions, with the
            last layer, and those that would see n_positions or more, global.
    """

    model_type = "leap"

    attention: str | list[str] = "leap"
    attention_bias: bool = False
    use_local_att: bool = True

    def _settle_windows(self, sliding: list[bool]) -> None:
        if self.use_local_att and not any(sliding):
            sliding = [name == "leap" for name in self.attentions[:-1]] + [False]
        elif not self.use_local_att and (any(sliding) or self.window_sizes is not None):
            given = "layer_types='sliding_attention'"
            if self.window_sizes is not None:
                given = f"window_sizes={self.window_sizes}"
            raise ConfigError(f"{given} with use_local_att=False: drop one of them")
        super()._settle_windows(sliding)


@strict
class FastformerLMConfig(LeapConfig):
    """Causal Fastformer, by the name that it has beside LEAP in `leap-transformer`."""

    model_type = "fastformer"

    formulation: str = "fastformer"
