"""The body of every model: tokens in, hidden states out, whatever the attention and its form.

    x = dropout(E[token] + P[position])          P only with learned or sinusoidal positions
    x = layer(x)  for each layer                 norm, attention, norm, feed-forward
    x = norm(x)

The attention is the config's affair (`LeapformerConfig.build_attention`), and its form the
model's: "causal" makes a decoder of the body, "bidirectional" an encoder.
"""

import contextlib
import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import output_capturing

from leap.errors import InputError
from leap.layers import Block, DecayGate, Dropout, LeapAttention, LearnedProportion
from leap.layers.attention import Form, token_positions
from leap.layers.convolution import ShortConvolution
from leap.layers.equalise import equalised
from leap.layers.gate import WEIGHT_STD, ForgetGate
from leap.layers.proportion import HeadLinear
from leap.layers.travel import UNIT_STEP, Steps
from leap.models.adaptive import AdaptiveEmbedding
from leap.models.cache import StateCache
from leap.models.config import LeapformerConfig
from leap.models.weights import Watch, wants_weights
from leap.ops.backends import traces
from leap.ops.derivatives import transformed


class Layer(GradientCheckpointingLayer, Block):
    """One block of a model, as its config describes it.

    Nothing in it may change a cache: checkpointing runs it again in the backward pass.
    """

    def __init__(self, config: LeapformerConfig, layer: int, form: Form) -> None:
        super().__init__(
            config.build_attention(layer, form),
            feed_forward_size=config.intermediate_size,
            dropout=config.hidden_dropout_prob,
            norm_eps=config.layer_norm_eps,
        )


def stacked(config: LeapformerConfig, n_layer: int, form: Form) -> nn.ModuleList:
    """Layers of a model. Each is the `block` of another module, as checkpoints call it."""
    layers = (Layer(config, i, form) for i in range(n_layer))
    return nn.ModuleList(nn.ModuleDict({"block": layer}) for layer in layers)


class LeapformerPreTrainedModel(PreTrainedModel):
    """What the models have in common: how they begin, and what Hugging Face should know."""

    config: LeapformerConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["Layer"]  # noqa: RUF012
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012
    _can_compile_fullgraph = True
    _can_record_outputs = {"hidden_states": Layer}  # noqa: RUF012

    def equalise(
        self, part: str, *text: Any, **inputs: Any
    ) -> contextlib.AbstractContextManager[None]:
        """Hold a learned part at its mean over a text, in a context, to see what it contributes.

            with model.equalise("proportions", ids):
                without = model(ids, labels=ids).loss

        Args:
            part: "proportions" (or the steps of travelled ones) or "gates".
            text, inputs: what the model is called with to find the means.
        """
        return equalised(self, part, lambda: self(*text, **inputs))

    def _initialize_weights(self, module: nn.Module, is_custom_code: bool = False) -> None:
        # Of code outside transformers, modules without parameters of their own are passed over,
        # lest what was loaded be drawn again. `init` sees to that, and some of ours have a say.
        super()._initialize_weights(module, is_custom_code=False)

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
        elif isinstance(module, DecayGate):
            for name, values in module.initial_values().items():
                init.copy_(module.get_parameter(name), values)
        elif isinstance(module, ForgetGate):
            init.normal_(module.last.weight, std=WEIGHT_STD)
            init.copy_(module.last.bias, module.fresh_bias())
        elif isinstance(module, Steps):
            if module.net is not None:
                init.constant_(module.last.bias, UNIT_STEP)
            if module.log_frequency is not None:
                init.copy_(module.log_frequency, module.fresh_log_frequency())
        elif isinstance(module, ShortConvolution):
            init.uniform_(module.weight, -module.bound, module.bound)
        elif isinstance(module, LeapAttention):
            for name in module.formulation.vectors:
                init.normal_(module.get_parameter(name), std=self.config.initializer_range)
        elif isinstance(module, Layer) and self.config.begins_quietly:
            # As in GPT-2: the more layers add to the residual stream, the less each begins with.
            std = self.config.initializer_range / math.sqrt(2 * self.config.n_layer)
            last = [module.feed_forward[3], getattr(module.attention, "o_proj", None)]
            for linear in filter(None, last):
                init.normal_(linear.weight, std=std)


class LeapformerBody(LeapformerPreTrainedModel):
    """Embeddings, layers and the last norm, which decoders and encoders have in common."""

    form: ClassVar[Form]
    """How each layer attends."""

    def __init__(self, config: LeapformerConfig) -> None:
        config.settle(self.form)
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
        self.embed_positions = position_embedding(config)
        self.dropout = Dropout(config.hidden_dropout_prob)
        self.layers = stacked(config, config.n_layer, self.form)
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    def watch(self, options: dict[str, Any]) -> Watch:
        """To look at the attentions of all layers, if a call with these options asks for them."""
        wanted = self.layers if wants_weights(self.config, options) else ()
        return Watch(layer.get_submodule("block.attention") for layer in wanted)

    def embedded(self, input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
        """Embeddings of tokens, of which either the ids `[b, t]` or the embeddings are given."""
        if (input_ids is None) == (inputs_embeds is None):
            raise InputError("give either input_ids or inputs_embeds")
        return self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds

    def placed(
        self,
        x: Tensor,
        key_mask: Tensor | None,
        position_ids: Tensor | None,
        *,
        prefix: Tensor | None = None,
        past: StateCache | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Tensor | None]]:
        """What the first layer is given: tokens `[b, t, hidden_size]`, and all else by its name.

        Args:
            x: embeddings.
            key_mask: true at real tokens; None if all are.
            position_ids: where the tokens stand; by default real tokens are counted.
            prefix: embeddings `[p, hidden_size]` of tokens that every row begins with. They have
                no position embedding, and take none from the others.
            past: to go on from.
            cu_seqlens: where sequences packed into one row begin, and the last one ends.
        """
        if position_ids is None:
            state = None if past is None else past.layers[0].state
            alike = state is None and key_mask is None  # Then one row is looked up for all.
            position_ids = token_positions(x[:1] if alike else x, state, key_mask, cu_seqlens)
        positions = position_ids.expand(x.shape[:2])
        if self.embed_positions is not None:
            self._check_positions(positions, past)
            x = x + self.embed_positions(position_ids).to(x.dtype)
        if prefix is not None:
            n = len(prefix)
            x = torch.cat([prefix.to(x.dtype).expand(len(x), -1, -1), x], dim=1)
            before = torch.arange(n, device=x.device).expand(len(x), -1)
            positions = torch.cat([before, positions + n], dim=1)
            if key_mask is not None:
                key_mask = nn.functional.pad(key_mask, (n, 0), value=True)
        given = {"key_mask": key_mask, "positions": positions, "cu_seqlens": cu_seqlens}
        return self.dropout(x), given

    def _check_positions(self, positions: Tensor, past: StateCache | None) -> None:
        if self.config.position_embedding != "learned" or traces():
            return
        limit, device = self.config.n_positions, positions.device.type
        beyond = (
            f"is beyond the n_positions={limit} that this model has learned; use a shorter text, "
            "or position_embedding='rotary' or 'none', which know no limit"
        )
        if torch.compiler.is_compiling():
            if device in ("cpu", "cuda"):  # Looking would break the graph; others cannot assert.
                torch._assert_async((positions < limit).all(), f"a position {beyond}")
            return
        n_tokens = positions.shape[1] + (0 if past is None else past.get_seq_length())
        if (device != "cpu" or transformed()) and n_tokens <= limit:
            return  # To look is to wait for the device, or to stop vmap; they are few enough.
        if positions.numel() and int(positions.max()) >= limit:
            raise InputError(f"position {int(positions.max())} {beyond}")


def records_nothing(hook: Callable[..., Any]) -> bool:
    """Whether a hook is one that transformers leaves behind, and nothing is recorded now.

    The first call with `output_hidden_states=True` hooks every layer for good. The hooks look for
    a collector, which is there during calls that ask for something.
    """
    is_theirs = hook.__module__ == output_capturing.__name__
    return is_theirs and not output_capturing._active_collector.get()


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


def packed_at(position_ids: Tensor | None, seq_idx: Tensor | None = None) -> Tensor | None:
    """Where the sequences packed into one row begin, and the last one ends; None if it is one.

    Args:
        position_ids: `[1, t]`, which go on by one within a sequence.
        seq_idx: `[1, t]`, which sequence each token belongs to; goes before positions.
    """
    given, step = (position_ids, 1) if seq_idx is None else (seq_idx, 0)
    if given is None or given.numel() != given.shape[-1] or torch.compiler.is_compiling():
        return None  # There are other rows, or looking at values would break the graph.
    starts = (given.flatten().diff() != step).nonzero().flatten() + 1
    if not len(starts):
        return None
    return torch.cat([starts.new_zeros(1), starts, starts.new_tensor([given.shape[-1]])])


def position_embedding(config: LeapformerConfig) -> nn.Module | None:
    """What is added to embeddings; None for positions that attentions see to."""
    if config.position_embedding == "learned":
        return nn.Embedding(config.n_positions, config.hidden_size)
    return SinusoidalPositions(config.hidden_size) if config.adds_sinusoids else None


def real_tokens(attention_mask: Tensor | None, n_tokens: int | None = None) -> Tensor | None:
    """True at real tokens; None where all are.

    Args:
        attention_mask: 1 at real tokens and 0 at pads, `[b, t]`.
        n_tokens: how many of the last tokens are meant; by default all.
    """
    if attention_mask is None:
        return None
    if attention_mask.ndim != 2:
        raise InputError(
            f"attention_mask is {list(attention_mask.shape)}; expected [batch, tokens] of 0 and 1"
        )
    t = attention_mask.shape[1]
    mask = attention_mask[:, t if n_tokens == 0 else -(n_tokens or t) :].bool()
    # On a GPU to look is to wait: once for the one token of a decoding step, where that costs less
    # than a mask in every layer, but not in training.
    may_look = can_look(mask) or (n_tokens == 1 and not torch.compiler.is_compiling())
    return None if may_look and bool(mask.all()) else mask


def can_look(mask: Tensor) -> bool:
    """Whether values can be looked at without breaking a graph or waiting for the device."""
    return not torch.compiler.is_compiling() and mask.device.type == "cpu"
