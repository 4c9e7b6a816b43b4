"""The encoder of a translation model, which never encodes anything twice.

The source is read in chunks: each state sees those of its own chunk and of all before it. In one
call that is a staircase (see `leap.ops.staircase`); as the source arrives, each chunk is one more
call on top of what the layers keep, with the same numbers.

Axes: b batch, n source tokens or frames, s states, d hidden size.
"""

import math
from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from leap.errors import InputError
from leap.layers import Dropout
from leap.layers.attention import token_positions
from leap.models.body import (
    LeapformerPreTrainedModel,
    can_look,
    position_embedding,
    real_tokens,
    stacked,
)
from leap.models.seq2seq_config import LeapformerSeq2SeqConfig, LeapformerSpeechConfig
from leap.models.states import States
from leap.models.subsampling import LastFrame, Subsampler
from leap.models.weights import Watch, wants_weights


class Encoder(LeapformerPreTrainedModel, ABC):
    """What encoders of text and of speech have in common: all but how the source is embedded."""

    config: LeapformerSeq2SeqConfig

    def __init__(self, config: LeapformerSeq2SeqConfig) -> None:
        super().__init__(config)
        assert config.encoder_layers is not None  # settled by the config
        self.embed_positions = position_embedding(config)
        self.dropout = Dropout(config.hidden_dropout_prob)
        part, form = config.part("encoder"), config.form("encoder")
        self.layers = stacked(part, config.encoder_layers, form)
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.gradient_checkpointing = False

    def states_per_chunk(self, chunk_size: int | None) -> int:
        """States in a chunk, 0 for all that there will be; None means what the config has."""
        return self.config.chunk_size if chunk_size is None else chunk_size

    def encode(
        self,
        x: Tensor,
        key_mask: Tensor | None,
        chunk_size: int | None,
        options: dict[str, Any],
    ) -> BaseModelOutput:
        """States of a whole source that has been embedded, chunk by chunk in one call.

        Args:
            options: what else the call was given, output_attentions among them.
        """
        positions = token_positions(x, None, key_mask)
        chunk = self.states_per_chunk(chunk_size)
        inputs: dict[str, Any] = {"key_mask": key_mask, "positions": positions}
        if self.config.form("encoder") == "bidirectional" and chunk and x.shape[1] > 1:
            ends = (torch.arange(x.shape[1], device=x.device) // chunk + 1) * chunk
            if key_mask is not None and not pads_behind(key_mask):
                ends = (positions // chunk + 1) * chunk
            inputs["visible"] = read_until(ends, key_mask, x.shape[1])
        x = self._placed(x, positions)
        wanted = self.layers if wants_weights(self.config, options) else ()
        with Watch(layer.get_submodule("block.attention") for layer in wanted) as watch:
            for layer in self.layers:
                x, _ = layer.get_submodule("block")(x, **inputs)
        return BaseModelOutput(
            last_hidden_state=self.norm(x),
            attentions=watch.weights(),  # type: ignore[arg-type]  # Any float tensors are meant.
        )

    def encode_chunk(self, x: Tensor, states: States) -> tuple[Tensor, States]:
        """States of one more chunk that has been embedded, and what the layers keep of it."""
        past = states.of("encoder")
        # Layers of one model have read the same, so one of them tells how much.
        positions = token_positions(x, past[0] if past else None)  # type: ignore[arg-type]
        x = self._placed(x, positions)
        after = []
        for i, layer in enumerate(self.layers):
            block = layer.get_submodule("block")
            x, state = block(x, past[i] if past else None, positions=positions)
            after.append(state)
        return self.norm(x), states.with_part("encoder", after)

    @abstractmethod
    def read(self, source: Tensor, states: States) -> tuple[Tensor, States]:
        """Read one more chunk of the source: its states `[b, s, d]`, and what to go on with."""

    @abstractmethod
    def state_mask(self, attention_mask: Tensor | None) -> Tensor | None:
        """True at states of real tokens or frames, given 1 or true at those; None if all are."""

    def _placed(self, x: Tensor, positions: Tensor) -> Tensor:
        if self.embed_positions is not None:
            x = x + self.embed_positions(positions).to(x.dtype)
        return self.dropout(x)


class TextEncoder(Encoder):
    """The encoder of text."""

    def __init__(self, config: LeapformerSeq2SeqConfig) -> None:
        super().__init__(config)
        size = config.source_vocab_size or config.vocab_size
        self.embed_tokens = nn.Embedding(size, config.hidden_size)
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        chunk_size: int | None = None,
        **kwargs: Any,
    ) -> BaseModelOutput:
        """States `[b, n, hidden_size]` of whole sources.

        Args:
            input_ids: source tokens, `[b, n]`.
            attention_mask: 1 at real tokens and 0 at pads.
            inputs_embeds: in place of input_ids, `[b, n, hidden_size]`, as `embed_tokens` gives
                them.
            chunk_size: states read at once, 0 for all; by default the config's.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise InputError("give either input_ids or inputs_embeds")
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        return self.encode(self._scaled(x), self.state_mask(attention_mask), chunk_size, kwargs)

    def read(self, source: Tensor, states: States) -> tuple[Tensor, States]:
        """Read one more chunk of tokens `[b, n]`."""
        return self.encode_chunk(self._scaled(self.embed_tokens(source)), states)

    def state_mask(self, attention_mask: Tensor | None) -> Tensor | None:
        """True at real tokens; None if all are."""
        return real_tokens(attention_mask)

    def _scaled(self, embeddings: Tensor) -> Tensor:
        return embeddings * math.sqrt(self.config.hidden_size)


class SpeechEncoder(Encoder):
    """The encoder of speech: frames of mel bins, made fewer, then as in the encoder of text."""

    config: LeapformerSpeechConfig
    main_input_name = "input_features"

    def __init__(self, config: LeapformerSpeechConfig) -> None:
        super().__init__(config)
        self.subsampler = Subsampler(config.n_bins, config.hidden_size, config.n_subsampling)
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_features: Tensor,
        attention_mask: Tensor | None = None,
        chunk_size: int | None = None,
        **kwargs: Any,
    ) -> BaseModelOutput:
        """States `[b, s, hidden_size]` of whole sources; frames that fill no state get silence.

        Args:
            input_features: frames, `[b, n, n_bins]`.
            attention_mask: 1 at real frames and 0 at pads, which stand behind.
            chunk_size: states read at once, 0 for all; by default the config's.
        """
        mask = real_tokens(attention_mask)
        if mask is not None and can_look(mask) and not pads_behind(mask):
            raise InputError("attention_mask: pads must stand behind the frames of speech")
        x, _ = self.subsampler(self.subsampler.blocks(input_features, mask))
        return self.encode(x, self.state_mask(mask), chunk_size, kwargs)

    def read(self, source: Tensor, states: States) -> tuple[Tensor, States]:
        """Read one more chunk of frames `[b, n, n_bins]`; frames that fill no state get silence."""
        frames = self.subsampler.blocks(source, None)
        past = [state for state in states.of("frame") if isinstance(state, LastFrame)]
        x, after = self.subsampler(frames, past or None)
        return self.encode_chunk(x, states.with_part("frame", after))

    def state_mask(self, attention_mask: Tensor | None) -> Tensor | None:
        """True at states of which a frame is real; None if all are."""
        mask = real_tokens(attention_mask)
        return None if mask is None else self.subsampler.state_mask(mask)


def pads_behind(mask: Tensor) -> bool:
    """Whether all pads stand behind, as far as looking is free; else it is not known that they do.

    Where it is not, the same comes out by a longer way.
    """
    return can_look(mask) and not bool((mask[:, 1:] & ~mask[:, :-1]).any())


def read_until(n_real: Tensor, mask: Tensor | None, n_states: int) -> Tensor:
    """How many states, pads counted, hold `n_real` real ones; all of them where there are fewer.

    Args:
        n_real: real states to see, `[t]` or `[b, t]`.
        mask: true at real states, `[b, n_states]`.
        n_states: how many there are.
    """
    if mask is None or pads_behind(mask):
        return n_real.clamp_max(n_states)
    count = mask.long().cumsum(dim=1)
    wanted = n_real.expand(len(mask), n_real.shape[-1]).minimum(count[:, -1:])
    return (torch.searchsorted(count, wanted) + 1).where(wanted > 0, 0)
