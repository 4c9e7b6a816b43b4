"""Configurations of translation models: an encoder, a decoder, and what it sees of the source."""

from typing import Any, Literal

from huggingface_hub.dataclasses import strict

from leap.errors import ConfigError
from leap.layers.attention import Form
from leap.models.config import LeapformerConfig, check_layers
from leap.models.mechanisms import usable_as

Part = Literal["encoder", "decoder", "cross"]

FORMS: dict[Part, Form] = {"encoder": "bidirectional", "decoder": "causal", "cross": "cross"}
"""What the attention of each part is used as, but for alibi."""
MOST_SUBSAMPLING = 10
"""Of frames that begin every 10 ms, a state is ten seconds then."""


@strict
class LeapformerSeq2SeqConfig(LeapformerConfig):
    """A translation model that can read and write in turn.

    What `LeapformerConfig` says of attentions holds for all three: those in the encoder, those in
    the decoder, and those by which the decoder sees the source. Further:

    Args:
        n_layer: layers of the decoder.
        encoder_layers: layers of the encoder; as many as the decoder's by default.
        attention: the mechanism of all parts that are given none of their own.
        encoder_attention, decoder_attention, cross_attention: of one part: a name, or one per
            layer.
        cross_window: how many states of the source softmax cross-attention sees, and keeps: the
            last of those that a token may see; all by default. What has left the window before
            it is written about is lost, so that a model that reads everything first, as `generate`
            does, wants one as long as its sources. Linear attention needs none.
        position_embedding: "sinusoidal", "rotary" (within each language), or "none". Learned
            positions would end somewhere, and a stream may not. With "alibi", what the encoder and
            the decoder see of their own language fades with distance, and positions are sinusoidal
            besides, for the decoder to find its place in the source.
        gate, convolution: of the decoder's own attention, and of the encoder's where that looks
            back alone, with alibi.
        window_sizes: of the decoder's own attention.
        chunk_size: how many source states the encoder reads at once: each sees those of its own
            chunk and of all before. 1 is a unidirectional encoder, and 0 one that waits for the
            end and sees everything. Any model runs with any; this is what it does unless told.
            With alibi states see no further than themselves, and chunks are but read at once.
        source_vocab_size: number of source tokens; by default both languages share one vocabulary.
        tie_word_embeddings: one table for the decoder, its head and, with one vocabulary, the
            encoder.
        label_smoothing: share of the target spread over all words, in training.
        ctc_weight: of the loss of reading the transcript off the encoder's states (CTC, its blank
            being pad_token_id); 0 for a model without that head.
        initializer_range: deviation of fresh weights; by default 1 / sqrt(hidden_size).
    """

    model_type = "leapformer-seq2seq"

    is_encoder_decoder: bool = True
    encoder_layers: int | None = None
    encoder_attention: str | list[str] | None = None
    decoder_attention: str | list[str] | None = None
    cross_attention: str | list[str] | None = None
    cross_window: int | None = None
    position_embedding: str = "sinusoidal"
    proportion: str = "learned"
    chunk_size: int = 0
    source_vocab_size: int | None = None
    label_smoothing: float = 0.0
    ctc_weight: float = 0.0
    initializer_range: float | None = None  # type: ignore[assignment]  # Until it is settled.
    bos_token_id: int | None = 0
    pad_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    decoder_start_token_id: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if self.decoder_start_token_id is None:
            self.decoder_start_token_id = self.bos_token_id
        if self.initializer_range is None:
            self.initializer_range = max(self.hidden_size, 1) ** -0.5
        super().__post_init__(**kwargs)

    @property
    def adds_sinusoids(self) -> bool:
        """Whether embeddings get sinusoidal positions: with alibi too, for the cross-attention."""
        return self.position_embedding in ("sinusoidal", "alibi")

    @property
    def begins_quietly(self) -> bool:
        """No: weights begin at 1 / sqrt(hidden_size), which allows for the residuals."""
        return False

    def part(self, name: Part) -> LeapformerConfig:
        """The config that the attentions of one part are built by."""
        settings = {each: getattr(self, each) for each in LeapformerConfig.__annotations__}
        settings |= {"attention": getattr(self, f"{name}_attention"), "layer_types": None}
        if name == "encoder":
            settings["n_layer"] = self.encoder_layers
        if self.form(name) != "causal":
            settings |= {"gate": None, "convolution": None}
        if name != "decoder":
            settings["window_sizes"] = None
        if name == "encoder" and self.position_embedding == "selective":
            settings["position_embedding"] = "rotary"  # Turns add up along one direction alone.
        if name == "cross" and self.position_embedding in ("rotary", "selective", "alibi"):
            # Words of two languages that belong together do not stand at the same position.
            settings["position_embedding"] = "none"
        if name == "cross" and self.cross_window is not None:
            of_softmax = self.attention_options.get("softmax", {}) | {"window": self.cross_window}
            settings["attention_options"] = self.attention_options | {"softmax": of_softmax}
        return LeapformerConfig(**settings)

    def form(self, name: Part) -> Form:
        """What the attention of a part is used as."""
        if name == "encoder" and self.position_embedding == "alibi":
            return "causal"
        return FORMS[name]

    def _check_sizes(self) -> None:
        super()._check_sizes()
        for name in ("encoder_layers", "source_vocab_size", "cross_window"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value} must be 1 or more")
        if self.encoder_layers is not None:
            check_layers("encoder_layers", self.encoder_layers)
        if self.chunk_size < 0:
            raise ConfigError(f"chunk_size={self.chunk_size} must be 1 or more, or 0 for all")
        if not 0 <= self.label_smoothing < 1:
            raise ConfigError(f"label_smoothing={self.label_smoothing} is a share, from 0 to 1")
        if self.ctc_weight < 0:
            raise ConfigError(f"ctc_weight={self.ctc_weight} must be 0 or more")
        if self.position_embedding == "learned":
            raise ConfigError(
                "position_embedding='learned' ends at n_positions, and a stream may not; "
                "use 'sinusoidal', 'alibi', 'rotary' or 'none'"
            )
        if self.adaptive_cutoffs is not None:
            raise ConfigError("adaptive_cutoffs are for language models; leave them out here")

    def _settle_attention(self) -> None:
        if self.encoder_layers is None:
            self.encoder_layers = self.n_layer
        for name in FORMS:
            form = self.form(name)
            given = getattr(self, f"{name}_attention")
            if given is None:
                given = self.attention
                setattr(self, f"{name}_attention", given)
            able = usable_as(form)
            if form == "bidirectional":  # It reads in chunks, as cross-attention does.
                able = [mechanism for mechanism in able if mechanism in usable_as("cross")]
            for mechanism in [given] if isinstance(given, str) else given:
                if mechanism not in able:
                    raise ConfigError(
                        f"{name}_attention={given!r}: {mechanism} cannot be used as {form} "
                        f"attention{' in chunks' * (form == 'bidirectional')}; "
                        f"those that can are {', '.join(able)}"
                    )
            self.part(name)  # Which checks all else.
        if self.cross_window is not None and "softmax" not in self.part("cross").attentions:
            raise ConfigError(
                f"cross_window={self.cross_window} is for cross_attention='softmax'; "
                f"{self.cross_attention} keeps a state of one size without any"
            )
        self.layer_types = self.part("decoder").layer_types


@strict
class LeapformerSpeechConfig(LeapformerSeq2SeqConfig):
    """A translation model that hears its source.

    Args:
        n_bins: mel bins of a frame of `input_features`.
        n_subsampling: convolutions in front of the encoder, each of which halves the number of
            frames: 2 make a state of four.
    """

    model_type = "leapformer-speech"

    n_bins: int = 80
    n_subsampling: int = 2

    @property
    def frames_per_state(self) -> int:
        """How many frames become one state of the encoder."""
        return 2**self.n_subsampling

    def _check_sizes(self) -> None:
        super()._check_sizes()
        for name in ("n_bins", "n_subsampling"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be 1 or more")
        if self.n_subsampling > MOST_SUBSAMPLING:
            raise ConfigError(
                f"n_subsampling={self.n_subsampling} would make one state of "
                f"2^{self.n_subsampling} frames; give {MOST_SUBSAMPLING} or fewer"
            )
