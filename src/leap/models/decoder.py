"""The decoder of a translation model: what was written so far, and what may be seen of the source.

    x = x + attention(norm(x))                        causal
    x = x + cross_attention(norm(x), source)          up to where the schedule lets each token see
    x = x + feed_forward(norm(x))

Reading and writing are separate calls on one set of states, so they can take turns: what was read
is a state of the cross-attentions, and what was written one of the causal attentions.

Axes: b batch, t target tokens, s source states, d hidden size.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from transformers import EncoderDecoderCache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from leap.errors import InputError
from leap.layers import Dropout, FeedForward
from leap.layers.attention import token_positions
from leap.models.body import LeapformerPreTrainedModel, position_embedding, real_tokens
from leap.models.cache import StateCache
from leap.models.encoder import read_until
from leap.models.seq2seq_config import LeapformerSeq2SeqConfig
from leap.models.states import States
from leap.models.weights import Watch, wants_weights
from leap.ops.state import Joint, Recurrent, State, state
from leap.ops.travel import ClockState


class TranslationCache(EncoderDecoderCache):
    """What a decoder keeps of its own tokens and of the source, as a Hugging Face cache.

    Args:
        n_layer: layers of the decoder.
    """

    self_attention_cache: StateCache  # type: ignore[assignment]  # Of another kind than usual.
    cross_attention_cache: StateCache  # type: ignore[assignment]

    def __init__(self, n_layer: int) -> None:
        super().__init__(StateCache(n_layer), StateCache(n_layer))

    def check_dynamic_cache(self, method: str) -> None:
        """States can do all that is asked for by this."""

    @property
    def n_bytes(self) -> int:
        """Memory that the states take."""
        return self.self_attention_cache.n_bytes + self.cross_attention_cache.n_bytes


@state
class WrittenState(Joint):
    """The past of a decoder layer whose queries travel: its own tokens, and where they came to."""

    own: Recurrent
    asked: ClockState


class TranslationLayer(GradientCheckpointingLayer):
    """One block of the decoder."""

    def __init__(self, config: LeapformerSeq2SeqConfig, layer: int) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.layer_norm_eps
        self.attention_norm = nn.LayerNorm(width, eps=eps)
        self.attention = config.part("decoder").build_attention(layer, "causal")
        self.cross_norm = nn.LayerNorm(width, eps=eps)
        self.cross_attention = config.part("cross").build_attention(layer, "cross")
        self.feed_forward_norm = nn.LayerNorm(width, eps=eps)
        self.feed_forward = FeedForward(
            width, config.intermediate_size or 4 * width, config.hidden_dropout_prob
        )
        self.dropout = Dropout(config.hidden_dropout_prob)

    def forward(
        self,
        x: Tensor,
        written: State | None,
        read: State | None,
        source: Tensor | None = None,
        *,
        positions: Tensor,
        written_mask: Tensor | None = None,
        earlier: Sequence[State] = (),
        **seen: Any,
    ) -> tuple[Tensor, State | None, State | None, Tensor | None]:
        """Pass tokens through: what becomes of them, and of what was written and read.

        The last of what is returned tells how the cross-attention is shared out, if that is asked
        for by `earlier`.

        Args:
            x: target tokens.
            written: state of those before.
            read: state of the source as far as it was read; None if it is given.
            source: to read. Not by its name: checkpointing looks for gradients without names only.
            positions: of the tokens.
            written_mask: true at real tokens of x.
            earlier: states of the source on the way to `read`, to tell the shares of.
            seen: what else the cross-attention takes: key_mask of the source, visible.
        """
        own, asked = written, None
        if isinstance(written, WrittenState):
            own, asked = written.own, written.asked
        y, own = self.attention(
            self.attention_norm(x), own, key_mask=written_mask, positions=positions
        )
        x = x + self.dropout(y)
        cross: Any = self.cross_attention
        asking = self.cross_norm(x)
        at: dict[str, Any] = {"positions": positions}
        if cross.walks:
            at["angles"], asked = cross.walk(asking, asked, written_mask)
            assert isinstance(own, Recurrent)  # as every causal attention returns
            own = WrittenState.of(own, asked)
        shares = cross.shares(asking, read, earlier, **at) if earlier else None
        y, read = cross(asking, read, source=source, **at, **seen)
        x = x + self.dropout(y)
        return x + self.feed_forward(self.feed_forward_norm(x)), own, read, shares

    def begin(self, x: Tensor) -> tuple[None, State]:
        """The state of what was written before the first token, for tokens like x."""
        nothing = x[:, :0]
        _, own = self.attention(nothing)
        cross: Any = self.cross_attention
        return None, WrittenState.of(own, cross.walk(nothing)[1]) if cross.walks else own


class Decoder(LeapformerPreTrainedModel):
    """The decoder without a head."""

    config: LeapformerSeq2SeqConfig
    _no_split_modules = ["TranslationLayer"]  # noqa: RUF012
    _can_record_outputs = {"hidden_states": TranslationLayer}  # noqa: RUF012

    def __init__(self, config: LeapformerSeq2SeqConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.embed_positions = position_embedding(config)
        self.dropout = Dropout(config.hidden_dropout_prob)
        self.layers = nn.ModuleList(TranslationLayer(config, i) for i in range(config.n_layer))
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_mask: Tensor | None = None,
        visible: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: TranslationCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        """Hidden states `[b, t, hidden_size]`, and the cache.

        Args:
            input_ids: target tokens, `[b, t]`; those after what the cache holds.
            encoder_hidden_states: the source, `[b, s, hidden_size]`; read once, and passed over
                when the cache has read it.
            encoder_mask: true at its real states.
            visible: how many real states of the source each token sees, `[t]` or `[b, t]`, never
                fewer than the one before; all by default.
            attention_mask: 1 at real tokens and 0 at pads, of these tokens, or of all so far.
            position_ids: where the tokens stand; by default real tokens are counted.
            past_key_values: what an earlier call returned.
            inputs_embeds: in place of input_ids, as `embed_tokens` gives them.
            use_cache: return a cache to go on from.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise InputError("give either decoder_input_ids or decoder_inputs_embeds")
        x = self._scaled(self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds)
        cache = self._cache(past_key_values, use_cache)
        n = self.config.n_layer
        written = [
            None if cache is None else cache.self_attention_cache.layers[i].before(begin, x)
            for i, begin in enumerate(self._beginnings())
        ]
        read = (
            [layer.state for layer in cache.cross_attention_cache.layers] if cache else [None] * n
        )

        key_mask = real_tokens(attention_mask, x.shape[1])
        if position_ids is None:
            position_ids = token_positions(x, written[0], key_mask)
        seen: dict[str, Any] = {}
        if read[0] is None:
            if encoder_hidden_states is None:
                raise InputError(
                    "nothing to translate: give input_ids, input_features or encoder_outputs"
                )
            seen = {"source": encoder_hidden_states, "key_mask": encoder_mask}
            if visible is not None:
                n_states = encoder_hidden_states.shape[1]
                seen["visible"] = read_until(visible, encoder_mask, n_states)
        elif visible is not None:
            raise InputError(
                "visible is a schedule for tokens given all at once; to write and read in turn, "
                "use model.read and model.write"
            )
        wanted = self.layers if wants_weights(self.config, kwargs) else ()
        with (
            Watch(layer.get_submodule("attention") for layer in wanted) as own,
            Watch(layer.get_submodule("cross_attention") for layer in wanted) as cross,
        ):
            x, written_after, read_after, _ = self._run(
                x, written, read, position_ids, written_mask=key_mask, **seen
            )
        if cache is not None:
            n_source = 0 if encoder_hidden_states is None else encoder_hidden_states.shape[1]
            for i in range(n):
                cache.self_attention_cache.layers[i].put(written_after[i], x.shape[1])
                if read[i] is None:
                    cache.cross_attention_cache.layers[i].put(read_after[i], n_source)
                    cache.is_updated[i] = True
        return BaseModelOutputWithPastAndCrossAttentions(
            last_hidden_state=x,  # type: ignore[arg-type]  # Hugging Face means any float tensor.
            past_key_values=cache if use_cache else None,
            attentions=own.weights(),  # type: ignore[arg-type]
            cross_attentions=cross.weights(),  # type: ignore[arg-type]
        )

    def read(self, source: Tensor, states: States) -> States:
        """Let the cross-attentions read more of the source, `[b, s, d]`."""
        past = states.of("cross")
        nothing = source[:, :0]
        after = []
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, TranslationLayer)
            _, state = layer.cross_attention(nothing, past[i] if past else None, source=source)
            after.append(state)
        return states.with_part("cross", after)

    def write(self, tokens: Tensor, states: States) -> tuple[Tensor, States]:
        """Go on from target tokens `[b, t]`: hidden states, and what to go on with."""
        x, after, _ = self.write_with_shares(tokens, states, ())
        return x, after

    def write_with_shares(
        self, tokens: Tensor, states: States, earlier: Sequence[State]
    ) -> tuple[Tensor, States, Tensor | None]:
        """As `write`, with the last layer's attention to the source, shared out.

        Args:
            tokens: target tokens `[b, t]`.
            states: what to go on from.
            earlier: n states of the last cross-attention, from the first chunks on, of which
                `without_values` is enough.

        Returns:
            Hidden states, what to go on with, and how much of the attention of each token and head
            is on what each of the earlier states had read, `[b, h, t, n]`; None if there are none.
        """
        x = self._scaled(self.embed_tokens(tokens))
        written, read = states.of("self"), states.of("cross")
        if not read:
            raise InputError("nothing has been read to write about; call read first")
        positions = token_positions(x, written[0] if written else None)  # type: ignore[arg-type]
        x, after, _, shares = self._run(
            x, written or [None] * len(self.layers), read, positions, earlier=earlier
        )
        return x, states.with_part("self", after), shares

    def _run(
        self,
        x: Tensor,
        written: Any,
        read: Any,
        positions: Tensor,
        source: Tensor | None = None,
        earlier: Sequence[State] = (),
        **seen: Any,
    ) -> tuple[Tensor, list[Any], list[Any], Tensor | None]:
        if self.embed_positions is not None:
            x = x + self.embed_positions(positions).to(x.dtype)
        x = self.dropout(x)
        written_after, read_after, shares = [], [], None
        for i, layer in enumerate(self.layers):
            if earlier and i == len(self.layers) - 1:
                seen["earlier"] = earlier
            x, own, other, shares = layer(
                x, written[i], read[i], source, positions=positions, **seen
            )
            written_after.append(own)
            read_after.append(other)
        return self.norm(x), written_after, read_after, shares

    def _beginnings(self) -> list[Callable[[Tensor], Any]]:
        """By which each layer begins to write."""
        return [layer.begin for layer in self.layers if isinstance(layer, TranslationLayer)]

    def _scaled(self, embeddings: Tensor) -> Tensor:
        return embeddings * math.sqrt(self.config.hidden_size)

    def _cache(
        self, given: TranslationCache | None, use_cache: bool | None
    ) -> TranslationCache | None:
        if given is None:
            return TranslationCache(self.config.n_layer) if use_cache else None
        if not isinstance(given, TranslationCache):
            raise InputError(
                f"past_key_values is a {type(given).__name__}; this model goes on from a "
                "TranslationCache, which it returns with use_cache=True"
            )
        return given
