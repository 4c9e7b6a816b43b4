"""One decoder for every attention, as Hugging Face models.

    x = dropout(E[token] + P[position])          P only with learned positions
    x = block(x)  for each layer                 norm, attention, norm, feed-forward
    logits = norm(x) E^T                         the embedding again, unless untied

The attention is the config's affair (`LeapformerConfig.build_attention`). Nothing here asks which
one it is: each takes a state and returns the next one, and the cache holds them.
"""

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils import can_return_tuple
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from leap.errors import FileError, InputError
from leap.layers import Block, LeapAttention, LearnedProportion
from leap.layers.attention import token_positions
from leap.layers.proportion import HeadLinear
from leap.models.adaptive import AdaptiveEmbedding
from leap.models.cache import StateCache, StateLayer
from leap.models.config import LeapConfig, LeapformerConfig
from leap.models.loss import IGNORED, linear_cross_entropy
from leap.ops.state import State


class DecoderLayer(GradientCheckpointingLayer):
    """One block of a decoder, which keeps its past in a cache."""

    def __init__(self, config: LeapformerConfig, layer: int) -> None:
        super().__init__()
        self.block = Block(
            config.build_attention(layer),
            feed_forward_size=config.intermediate_size,
            dropout=config.hidden_dropout_prob,
            norm_eps=config.layer_norm_eps,
        )

    def forward(self, x: Tensor, *, past: StateLayer | None, **inputs: Any) -> Tensor:
        """Pass tokens through, on top of the past if there is one, and add them to it."""
        x, state = self.block(x, None if past is None else self._state(x, past), **inputs)
        if past is not None:
            past.put(state, x.shape[1])
        return x

    def _state(self, x: Tensor, past: StateLayer) -> State | None:
        if past.state is None and past.record_past:
            # A recording must begin before the first token, and no tokens are the way there.
            _, past.state = self.block(x[:, :0])
            past.activate_past_recording()
        return past.state


class LeapformerPreTrainedModel(PreTrainedModel):
    """What the models have in common: how they begin, and what Hugging Face should know."""

    config: LeapformerConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["DecoderLayer"]  # noqa: RUF012
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012
    _can_compile_fullgraph = True
    _can_record_outputs = {"hidden_states": DecoderLayer}  # noqa: RUF012

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, LearnedProportion):
            # Small normal weights would put every token at 1/2 and leave nothing to re-weight by.
            for inner in module.modules():
                if isinstance(inner, nn.Linear | HeadLinear):
                    bound = inner.weight.shape[1] ** -0.5
                    init.uniform_(inner.weight, -bound, bound)
                    init.uniform_(inner.bias, -bound, bound)
        elif isinstance(module, LeapAttention):
            for name in module.formulation.vectors:
                init.normal_(module.get_parameter(name), std=self.config.initializer_range)


class LeapformerModel(LeapformerPreTrainedModel):
    """The decoder without a head."""

    def __init__(self, config: LeapformerConfig) -> None:
        super().__init__(config)
        self.embed_tokens = (
            nn.Embedding(config.vocab_size, config.hidden_size)
            if config.adaptive_cutoffs is None
            else AdaptiveEmbedding(
                config.vocab_size,
                config.hidden_size,
                config.adaptive_cutoffs,
                config.adaptive_factor,
            )
        )
        self.embed_positions = _position_embedding(config)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.layers = nn.ModuleList(DecoderLayer(config, i) for i in range(config.n_layer))
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: StateCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        cu_seq_lens_q: Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Hidden states `[b, t, hidden_size]`, and the cache.

        Args:
            input_ids: tokens, `[b, t]`; those after what the cache has read.
            attention_mask: 1 at real tokens and 0 at pads, of these tokens, or of all so far.
            position_ids: where the tokens stand; by default real tokens are counted.
            past_key_values: what an earlier call returned.
            inputs_embeds: in place of input_ids, `[b, t, hidden_size]`.
            use_cache: return a cache to go on from.
            cu_seq_lens_q: where sequences packed into one row begin, and the last one ends.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise InputError("give either input_ids or inputs_embeds")
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if past_key_values is not None and not isinstance(past_key_values, StateCache):
            raise InputError(
                f"past_key_values is a {type(past_key_values).__name__}; this model goes on from a "
                "StateCache, which it returns with use_cache=True"
            )
        if use_cache and past_key_values is None:
            past_key_values = StateCache(self.config.n_layer)

        key_mask = _key_mask(attention_mask, x)
        if position_ids is None:
            past = None if past_key_values is None else past_key_values.layers[0].state
            position_ids = token_positions(x, past, key_mask, cu_seq_lens_q)
        position_ids = position_ids.expand(x.shape[:2])
        if self.embed_positions is not None:
            self._check_positions(position_ids)
            x = x + self.embed_positions(position_ids).to(x.dtype)

        x = self.dropout(x)
        for i, layer in enumerate(self.layers):
            x = layer(
                x,
                past=None if past_key_values is None else past_key_values.layers[i],
                key_mask=key_mask,
                positions=position_ids,
                cu_seqlens=cu_seq_lens_q,
            )
        return BaseModelOutputWithPast(
            last_hidden_state=self.norm(x), past_key_values=past_key_values if use_cache else None
        )

    def _check_positions(self, position_ids: Tensor) -> None:
        if self.config.position_embedding != "learned":
            return
        if torch.compiler.is_compiling() or position_ids.device.type != "cpu":
            return  # Looking at values would break the graph, or wait for the device.
        if position_ids.numel() and int(position_ids.max()) >= self.config.n_positions:
            raise InputError(
                f"position {int(position_ids.max())} is beyond the n_positions="
                f"{self.config.n_positions} that this model has learned; use a shorter text, or "
                "position_embedding='rotary' or 'none', which know no limit"
            )


class LeapformerForCausalLM(LeapformerPreTrainedModel, GenerationMixin):
    """The decoder with a head that predicts the next token."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: LeapformerConfig) -> None:
        super().__init__(config)
        self.model = LeapformerModel(config)
        self.lm_head = None
        if config.adaptive_cutoffs is None:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        else:
            self._tied_weights_keys = {}  # The embedding is its own head.
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: StateCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Logits of the next token, or the loss.

        Args:
            labels: tokens to predict, `[b, t]`, -100 where there is none; usually input_ids. With
                them the loss is returned, and no logits unless `config.loss_without_logits` is
                off: all at once they would take more memory than the rest of the model.
            logits_to_keep: for how many of the last tokens, or for which, to give logits.
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        x = outputs.last_hidden_state
        loss = logits = None
        if labels is not None or kwargs.get("shift_labels") is not None:
            loss = self._loss(x, labels, **kwargs)
        if loss is None or not self.config.loss_without_logits:
            last = isinstance(logits_to_keep, int)
            x = x[:, slice(-logits_to_keep, None) if last else logits_to_keep]
            logits = (
                self._adaptive.log_probabilities(x) if self.lm_head is None else self.lm_head(x)
            )
        return CausalLMOutputWithPast(
            loss=loss,  # type: ignore[arg-type]  # Hugging Face means any float tensor.
            logits=logits,  # type: ignore[arg-type]
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

    @property
    def _adaptive(self) -> AdaptiveEmbedding:
        embedding = self.model.embed_tokens
        assert isinstance(embedding, AdaptiveEmbedding)
        return embedding

    def _loss(
        self,
        x: Tensor,
        labels: Tensor | None,
        shift_labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **_: Any,
    ) -> Tensor:
        if shift_labels is None:
            assert labels is not None
            shift_labels = nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)
        target = shift_labels.flatten().to(x.device)
        x = x.flatten(0, 1)
        if self.lm_head is None:
            total = self._adaptive.cross_entropy(x, target)
        else:
            total = linear_cross_entropy(x, self.lm_head.weight, target)
        if num_items_in_batch is None:
            return total / (target != IGNORED).sum()
        return total / num_items_in_batch

    def _prepare_cache_for_generation(  # type: ignore[override]  # The rest is passed over.
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        """Begin generation with a cache of our own kind, where none is given."""
        given = model_kwargs.get("past_key_values")
        if given is None and generation_config.use_cache is not False:
            model_kwargs["past_key_values"] = StateCache(self.config.n_layer)
            if generation_config.is_assistant:
                model_kwargs["past_key_values"].activate_past_recording()
        elif given is not None:
            given._is_user_defined = True

    @staticmethod
    def create_masks_for_generate(attention_mask: Tensor | None = None, **_: Any) -> Tensor | None:
        """The mask as it is: one of pads is all that the layers need."""
        return attention_mask

    def save_state(self, path: str | Path, past_key_values: StateCache) -> None:
        """Write what the model has read to a small file, for `load_state` to go on from."""
        past_key_values.save(path)

    def load_state(self, path: str | Path) -> StateCache:
        """Read a state of this model, to pass as `past_key_values`."""
        cache = StateCache.load(path, self.device)
        self._check_fits(cache, path)
        return cache

    @torch.no_grad()
    def _check_fits(self, cache: StateCache, path: str | Path) -> None:
        """A file of another model is an error here rather than a puzzle later."""
        own = StateCache(self.config.n_layer)
        self.model(torch.zeros(1, 0, dtype=torch.long, device=self.device), past_key_values=own)
        layouts = [
            [None if layer.state is None else layer.state.layout() for layer in each.layers]
            for each in (own, cache)
        ]
        if layouts[0] != layouts[1]:
            raise FileError(
                f"{path} holds the state of another model: its layers are {layouts[1]}, "
                f"this one's {layouts[0]}"
            )


class LeapModel(LeapformerModel):
    """LEAP without a head."""

    config: LeapConfig


class LeapForCausalLM(LeapformerForCausalLM):
    """LEAP with a head that predicts the next token."""

    config: LeapConfig


class SinusoidalPositions(nn.Module):
    """Sines and cosines of the position, at wavelengths from 2 pi to 10,000 times that."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.hidden_size = hidden_size

    def forward(self, positions: Tensor) -> Tensor:
        """Embed positions `[b, t]`."""
        half = (self.hidden_size + 1) // 2
        wave = torch.arange(half, device=positions.device, dtype=torch.float32)
        angle = positions.unsqueeze(-1) * torch.exp(-math.log(1e4) * wave / max(half - 1, 1))
        return torch.cat([angle.sin(), angle.cos()], dim=-1)[..., : self.hidden_size]


def _position_embedding(config: LeapformerConfig) -> nn.Module | None:
    if config.position_embedding == "learned":
        return nn.Embedding(config.n_positions, config.hidden_size)
    if config.position_embedding == "sinusoidal":
        return SinusoidalPositions(config.hidden_size)
    return None


def _key_mask(attention_mask: Tensor | None, x: Tensor) -> Tensor | None:
    """True at the real ones of these tokens; None where all are, or where only one comes."""
    t = x.shape[1]
    if attention_mask is None or t == 1:
        return None
    if attention_mask.ndim != 2:
        raise InputError(
            f"attention_mask is {list(attention_mask.shape)}; expected [batch, tokens] of 0 and 1"
        )
    mask = attention_mask[:, -t:].bool() if t else attention_mask[:, :0].bool()
    if not torch.compiler.is_compiling() and mask.device.type == "cpu" and bool(mask.all()):
        return None
    return mask
