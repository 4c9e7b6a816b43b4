"""One decoder for every attention, as Hugging Face models.

    x = body(tokens)                             see `leap.models.body`
    logits = x E^T                               the embedding again, unless untied

Nothing here asks which attention it is: each takes a state and returns the next one, and the
cache holds them.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils import can_return_tuple
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from leap.errors import FileError, InputError
from leap.layers.fused import FusedBlocks
from leap.models.body import (
    Layer,
    LeapformerBody,
    LeapformerPreTrainedModel,
    packed_at,
    real_tokens,
    records_nothing,
)
from leap.models.cache import StateCache
from leap.models.config import FastformerLMConfig, LeapConfig, LeapformerConfig
from leap.models.loss import IGNORED, head_cross_entropy, is_plain
from leap.ops import backends
from leap.ops.native import linear as native_linear


class LeapformerModel(LeapformerBody):
    """The decoder without a head."""

    form = "causal"

    def __init__(self, config: LeapformerConfig) -> None:
        super().__init__(config)
        self.fused = FusedBlocks(Layer, records_nothing)

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
        seq_idx: Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Hidden states `[b, t, hidden_size]`, and the cache.

        Args:
            input_ids: tokens, `[b, t]`; those after what the cache has read.
            attention_mask: 1 at real tokens and 0 at pads, of these tokens, or of all so far.
            position_ids: where the tokens stand; by default real tokens are counted. In a single
                row, without a mask or a past, a sequence begins where they do not go on by one.
            past_key_values: what an earlier call returned.
            inputs_embeds: in place of input_ids, `[b, t, hidden_size]`.
            use_cache: return a cache to go on from.
            cu_seq_lens_q: where sequences packed into one row begin, and the last one ends.
            seq_idx: which of them each token belongs to, to the same end.
            output_attentions: give each layer's weights too, in O(t^2), where all of a text is
                read in this call.
        """
        if past_key_values is not None and not isinstance(past_key_values, StateCache):
            raise InputError(
                f"past_key_values is a {type(past_key_values).__name__}; this model goes on from a "
                "StateCache, which it returns with use_cache=True. Of the ways to tune a prompt, "
                "those that learn embeddings work, and prefix tuning, of keys and values, does not"
            )
        if cu_seq_lens_q is None and attention_mask is None and past_key_values is None:
            cu_seq_lens_q = packed_at(position_ids, seq_idx)
        if use_cache and past_key_values is None:
            past_key_values = StateCache(self.config.n_layer)
        past, x = past_key_values, self.embedded(input_ids, inputs_embeds)
        key_mask = real_tokens(attention_mask, x.shape[1])
        with self.watch(kwargs) as watch:
            is_one = x.shape[1] == 1
            if past is not None and is_one and self.step_refusal(x, past, key_mask) is None:
                x = self._step(x, past)
            else:
                options: dict[str, Any] = {"past": past, "cu_seqlens": cu_seq_lens_q}
                x, given = self.placed(x, key_mask, position_ids, **options)
                for i, layer in enumerate(self.layers):
                    block = layer.get_submodule("block")
                    state = None if past is None else past.layers[i].before(block, x)
                    x, state = block(x, state, **given)
                    if past is not None:
                        past.layers[i].put(state, x.shape[1])
        x = self.norm(x)
        return BaseModelOutputWithPast(
            last_hidden_state=x,
            past_key_values=past_key_values if use_cache else None,
            attentions=watch.weights(),  # type: ignore[arg-type]  # Any float tensors are meant.
        )

    def step_refusal(
        self, x: Tensor, past: StateCache, key_mask: Tensor | None = None
    ) -> str | None:
        """Why tokens go through the layers one by one; None if one call takes them through all.

        Args:
            x: embeddings `[b, t, hidden_size]`, of one more token per row if it is to.
            past: to go on from.
            key_mask: true at real tokens, if there are others.
        """
        if self.embed_positions is not None:
            return "positions are added to embeddings"
        if self.dropout.training and self.dropout.p:
            return "in training it has no dropout; call model.eval()"
        states = [layer.state for layer in past.layers]
        return self.fused.refusal(self.layers, x, states, key_mask)

    def _step(self, x: Tensor, past: StateCache) -> Tensor:
        x, states = self.fused.step(x, [layer.state for layer in past.layers])
        for layer, state in zip(past.layers, states, strict=True):
            layer.put(state, 1)
        return x


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
            logits = self.head(x)
        return CausalLMOutputWithPast(
            loss=loss,  # type: ignore[arg-type]  # Hugging Face means any float tensor.
            logits=logits,  # type: ignore[arg-type]
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

    def head(self, x: Tensor) -> Tensor:
        """Logits of the next token, of hidden states."""
        head = self.lm_head
        if head is None:
            return self._adaptive.log_probabilities(x)
        if backends.named() in (None, "native") and is_plain(head, nn.Linear):
            weight, bias = head.weight, head.bias
            if native_linear.refusal(x, weight, bias) is None:
                return native_linear.linear(x, weight, bias)
        return head(x)

    @property
    def _adaptive(self) -> Any:
        """The adaptive embedding, or what peft has put around it."""
        return self.model.embed_tokens

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
            total = head_cross_entropy(x, self.lm_head, target)
        if num_items_in_batch is None:
            return total / (target != IGNORED).sum()
        return total / num_items_in_batch

    def _prepare_cache_for_generation(  # type: ignore[override]  # The rest is passed over.
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        """Begin generation with a cache of our own kind, where none is given."""
        cache = model_kwargs.get("past_key_values")
        if cache is not None:
            cache._is_user_defined = True
        elif generation_config.use_cache is not False:
            cache = model_kwargs["past_key_values"] = StateCache(self.config.n_layer)
        if cache is not None and generation_config.is_assistant:
            cache.record_draft(generation_config.max_new_tokens or 0)

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
                f"{path} holds the state of another model; give the file of a state of this one, "
                "or a new name"
            )


class LeapModel(LeapformerModel):
    """LEAP without a head."""

    config: LeapConfig


class LeapForCausalLM(LeapformerForCausalLM):
    """LEAP with a head that predicts the next token."""

    config: LeapConfig


class FastformerModel(LeapModel):
    """Causal Fastformer without a head."""

    config: FastformerLMConfig


class FastformerForCausalLM(LeapForCausalLM):
    """Causal Fastformer with a head that predicts the next token."""

    config: FastformerLMConfig
