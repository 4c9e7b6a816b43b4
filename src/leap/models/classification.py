"""Sequences told apart into classes: an encoder, pooling, and a small classifier.

    x = body(tokens)                             every token sees all, see `leap.models.body`
    u = pool(x)                                  mean, first (cls) or last of the real tokens
    logits = W2 relu(W1 u + b1) + b2

With two inputs, u is [u, v, u * v, u - v] of what the same encoder makes of each.

Axes: b batch, t tokens, d hidden size.
"""

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from transformers import initialization as init
from transformers.modeling_outputs import BaseModelOutput, SequenceClassifierOutput
from transformers.utils import can_return_tuple
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from leap.errors import InputError
from leap.models.body import (
    Layer,
    LeapformerBody,
    LeapformerPreTrainedModel,
    real_tokens,
)
from leap.models.config import LeapformerConfig
from leap.ops.state import accumulator


class LeapformerClassificationModel(LeapformerPreTrainedModel):
    """How encoders and classifiers begin: every nn.Linear as torch has it, as in the authors' code.

    From weights as small as those of language models, small classifiers hardly learn at first (see
    docs/experiments.md).
    """

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, Layer):
            return  # The last of its linear layers begin like the others.
        super()._init_weights(module)
        if isinstance(module, nn.Linear):
            bound = module.in_features**-0.5
            init.uniform_(module.weight, -bound, bound)
            if module.bias is not None:
                init.uniform_(module.bias, -bound, bound)


class LeapformerEncoder(LeapformerClassificationModel, LeapformerBody):
    """The encoder without a head: every token sees all of its text."""

    form = "bidirectional"

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        prefix: Tensor | None = None,
        cu_seq_lens_q: Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutput:
        """Hidden states `[b, t, hidden_size]`.

        Args:
            input_ids: tokens, `[b, t]`.
            attention_mask: 1 at real tokens and 0 at pads. Without it all are real, whatever
                their ids.
            position_ids: where the tokens stand; by default real tokens are counted.
            inputs_embeds: in place of input_ids, `[b, t, hidden_size]`.
            prefix: embeddings `[p, hidden_size]` of tokens to put before each row, which have no
                position; what comes out at them stands first.
            cu_seq_lens_q: where sequences packed into one row begin, and the last one ends.
            output_attentions: give each layer's weights too, in O(t^2).
        """
        if prefix is not None and cu_seq_lens_q is not None:
            raise InputError("a prefix is put before rows, not before packed sequences; pad them")
        x = self.embedded(input_ids, inputs_embeds)
        key_mask = real_tokens(attention_mask, x.shape[1])
        options: dict[str, Any] = {"prefix": prefix, "cu_seqlens": cu_seq_lens_q}
        x, given = self.placed(x, key_mask, position_ids, **options)
        with self.watch(kwargs) as watch:
            for layer in self.layers:
                x, _ = layer.get_submodule("block")(x, **given)
        x = self.norm(x)
        return BaseModelOutput(
            last_hidden_state=x,
            attentions=watch.weights(),  # type: ignore[arg-type]  # Any float tensors are meant.
        )


class LeapformerForSequenceClassification(LeapformerClassificationModel):
    """The encoder with a classifier on top, for one text or for pairs of them.

    The config says how:

        pooling           "mean" of the real tokens, "last" of them, or "cls": a token of its own,
                          learned and in no vocabulary, that stands before each text
        classifier_size   hidden units of the classifier, by default 2 hidden_size
        two_inputs        classify pairs
        num_labels, problem_type    as of every Hugging Face model: one label, several, or numbers

    Only `attention_mask` says what is a pad. No token is taken for one by its id.
    """

    accepts_loss_kwargs = False  # The loss is the mean over the examples at hand.

    def __init__(self, config: LeapformerConfig) -> None:
        super().__init__(config)
        width = config.hidden_size
        hidden = config.classifier_size or 2 * width
        self.model = LeapformerEncoder(config)
        self.cls = nn.Parameter(torch.zeros(1, width)) if config.pooling == "cls" else None
        self.classifier = nn.Sequential(
            nn.Linear(4 * width if config.two_inputs else width, hidden),
            nn.ReLU(),
            nn.Linear(hidden, config.num_labels or 0),
        )
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if module is self and self.cls is not None:
            init.normal_(self.cls, std=self.config.initializer_range)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        input_ids_b: Tensor | None = None,
        attention_mask_b: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> SequenceClassifierOutput:
        """Logits `[b, num_labels]`, and with labels the loss.

        Args:
            input_ids, attention_mask, position_ids, inputs_embeds: as of `LeapformerEncoder`.
            input_ids_b, attention_mask_b: the second text of each pair, with two_inputs; it may be
                of another length.
            labels: classes `[b]`; or what else the config's problem_type asks for.
        """
        if self.config.two_inputs != (input_ids_b is not None):
            raise InputError(
                "give input_ids_b: this model has two_inputs=True and classifies pairs"
                if self.config.two_inputs
                else "input_ids_b is for models with two_inputs=True; this one takes one text"
            )
        if kwargs.get("cu_seq_lens_q") is not None:
            raise InputError(
                "cu_seq_lens_q: a class is for a row, not for each sequence packed into it; give "
                "rows with pads and attention_mask"
            )
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            prefix=self.cls,
            **kwargs,
        )
        u = self._pool(outputs.last_hidden_state, attention_mask)
        if input_ids_b is not None:
            second = self.model(
                input_ids=input_ids_b, attention_mask=attention_mask_b, prefix=self.cls
            )
            v = self._pool(second.last_hidden_state, attention_mask_b)
            u = torch.cat([u, v, u * v, u - v], dim=-1)
        logits = self.classifier(u)
        loss = None
        if labels is not None:
            loss = self.loss_function(labels=labels, pooled_logits=logits, config=self.config)
        return SequenceClassifierOutput(
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

    def _pool(
        self, x: Float[Tensor, "b t d"], attention_mask: Tensor | None
    ) -> Float[Tensor, "b d"]:
        if self.config.pooling == "cls":
            return x[:, 0]
        real = None if attention_mask is None else attention_mask.bool()
        return (mean_of if self.config.pooling == "mean" else last_of)(x, real)


def mean_of(
    x: Float[Tensor, "b t d"], real: Bool[Tensor, "b t"] | None = None
) -> Float[Tensor, "b d"]:
    """The mean over each row's real tokens, by their number; 0 where there are none."""
    # Not by `mean`, whose gradient would be written out for every token.
    if real is None:
        return (x.sum(dim=1, dtype=accumulator(x)) / max(1, x.shape[1])).to(x.dtype)
    kept = x.masked_fill(~real.unsqueeze(-1), 0).sum(dim=1, dtype=accumulator(x))
    return (kept / real.sum(dim=1, keepdim=True).clamp_min(1)).to(x.dtype)


def last_of(
    x: Float[Tensor, "b t d"], real: Bool[Tensor, "b t"] | None = None
) -> Float[Tensor, "b d"]:
    """The last of each row's real tokens, whichever side the pads are on."""
    if real is None:
        return x[:, -1]
    place = torch.arange(1, x.shape[1] + 1, device=x.device)
    last = (real * place).argmax(dim=1)
    return x[torch.arange(len(x), device=x.device), last]
