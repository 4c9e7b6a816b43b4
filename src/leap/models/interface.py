"""Our attention inside other people's Hugging Face models: `attn_implementation="leapformer"`.

After `import leap`, a BERT or Llama takes it like "sdpa":

    model = AutoModel.from_config(config, attn_implementation="leapformer")
    model = leap.with_proportions(model)        # optional: learn proportions too

Without the second line scores are relu(q) . relu(k); with it they are re-weighted by proportions
that small nets in each attention layer learn, which is LeaPformer. The model keeps its own cache
of keys and values, so training and prefill are linear, and decoding costs what it did.

The config keeps that there are nets, so that a saved model has them, and this attention, again:

    model.save_pretrained(folder)
    model = AutoModel.from_pretrained(folder)   # after `import leap`

For that every model of transformers looks at its config, at the end of its making.

What a layer asks for beyond queries, keys and values is refused where it cannot be had: windows,
packed sequences, biases of pairs (T5), caps and sinks of a softmax. Where positions turn queries
and keys (Llama), relu comes after, and so they are not relative, as they are with a softmax: it
matters where a text begins, and positions that count pads are refused.

Axes: b batch, h heads, t queries, n keys, d width of a head.
"""

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import flash_attention_mask

from leap.errors import ConfigError, InputError
from leap.layers import LearnedProportion
from leap.models.body import packed_at
from leap.ops import linear_attention, staircase_linear_attention
from leap.ops.features import proportional

NAME = "leapformer"
SAVED_AS = "leap_proportion_hidden"
"""Under this name a config keeps that its model has nets."""
M = TypeVar("M", bound=nn.Module)


def with_proportions(model: M, *, hidden: int = 16) -> M:
    """Give each attention layer of a model two nets to learn proportions by; the model itself.

    They begin at random. A model that was saved with them has them already.

    Args:
        model: one made with `attn_implementation="leapformer"`.
        hidden: hidden units of the nets.
    """
    if not _add_nets(model, hidden):
        raise ConfigError(
            f"no attention layer of {type(model).__name__} was recognised: none has a head_dim"
        )
    config: Any = getattr(model, "config", None)
    if config is not None:
        setattr(config, SAVED_AS, hidden)
    return model


def _add_nets(model: nn.Module, hidden: int) -> bool:
    """Whether there was a layer to give nets to; those that a layer has are left alone."""
    found = [m for m in model.modules() if hasattr(m, "head_dim") or _is_bert_like(m)]
    for layer in found:
        if hasattr(layer, "q_proportion"):
            continue
        width: Any = getattr(layer, "head_dim", None) or layer.attention_head_size
        for name in ("q_proportion", "k_proportion"):
            net = LearnedProportion(width, hidden=hidden).to(next(model.parameters()))
            layer.add_module(name, net)
    return bool(found)


def _restoring(post_init: Callable[[PreTrainedModel], None]) -> Callable[[PreTrainedModel], None]:
    """What models do at the end of their making, and nets before it if their config has them."""

    @wraps(post_init)
    def restore(self: PreTrainedModel) -> None:
        hidden = getattr(self.config, SAVED_AS, None)
        if hidden is not None:
            _add_nets(self, hidden)
            self.config._attn_implementation = NAME
        post_init(self)

    return restore


def _is_bert_like(module: nn.Module) -> bool:
    return hasattr(module, "attention_head_size") and hasattr(module, "query")


def attend(
    module: nn.Module,
    query: Float[Tensor, "b h t d"],
    key: Float[Tensor, "b g n d"],
    value: Float[Tensor, "b g n e"],
    attention_mask: Tensor | None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    position_ids: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    **others: Any,
) -> tuple[Float[Tensor, "b t h e"], None]:
    """What Hugging Face's layers call, with each group of queries sharing a key if there are fewer.

    The layers' scaling cancels in the normaliser, and dropout of scores has no scores to drop.
    """
    if attention_mask is not None and attention_mask.ndim != 2:
        raise InputError(
            f"attention_mask is {list(attention_mask.shape)}; with attn_implementation='leapformer'"
            " it must be [batch, tokens]: masks of pairs have no place in linear attention"
        )
    if sliding_window is not None:
        raise ConfigError(
            f"sliding_window={sliding_window} has no place in attn_implementation='leapformer', "
            "which sees everything; set it in the model's config to None"
        )
    _check_scores(others, n_keys=key.shape[2])
    (t, n) = query.shape[2], key.shape[2]
    causal = getattr(module, "is_causal", False) if is_causal is None else is_causal
    rotary = hasattr(getattr(module, "config", None), "rope_parameters")
    if attention_mask is not None and rotary and (causal or t == n):
        _check_positions(position_ids, attention_mask, t)
    if attention_mask is None and t == n and cu_seq_lens_q is None:
        cu_seq_lens_q = packed_at(position_ids)
    if cu_seq_lens_q is not None:
        raise InputError(
            f"cu_seq_lens_q={cu_seq_lens_q.tolist()}: with attn_implementation='leapformer' packed "
            "sequences would see one another; pad them instead"
        )
    shared = query.shape[1] // key.shape[1]
    q = query.relu()
    k, v = (x.repeat_interleave(shared, dim=1) for x in (key.relu(), value))
    if hasattr(module, "q_proportion"):
        q = proportional(q, module.get_submodule("q_proportion")(q))
        k = proportional(k, module.get_submodule("k_proportion")(k))
    mask = None if attention_mask is None else attention_mask.bool()
    if causal:
        visible = torch.arange(n - t + 1, n + 1, device=q.device)
        o = staircase_linear_attention(q, k, v, visible, key_mask=mask)
    else:
        o = linear_attention(q, k, v, key_mask=mask)
    return o.transpose(1, 2), None


def _check_scores(others: Mapping[str, Any], n_keys: int) -> None:
    """Scores of pairs are never formed here, so nothing can be done to them."""
    for name, value in others.items():
        of_pairs = isinstance(value, Tensor) and value.ndim == 4 and value.shape[-1] == n_keys
        if of_pairs or (name in ("softcap", "s_aux") and value is not None):
            raise ConfigError(
                f"{name} is for scores of pairs of tokens, which attn_implementation='leapformer' "
                "never forms; use a model without it, or 'eager'"
            )


def _check_positions(position_ids: Tensor | None, mask: Tensor, n_queries: int) -> None:
    """Real tokens must be where they would be without pads."""
    if torch.compiler.is_compiling():
        return  # Looking at values would break the graph.
    real = mask.bool()
    expected = (real.long().cumsum(dim=1) - 1)[:, -n_queries:]
    at = torch.arange(mask.shape[1], device=mask.device)[-n_queries:]
    given = at if position_ids is None else position_ids
    if bool(((given != expected) & real[:, -n_queries:]).any()):
        raise InputError(
            "position_ids count pads, and with attn_implementation='leapformer' it matters where a "
            "text begins: relu follows the rotation; give "
            "position_ids=(attention_mask.cumsum(1) - 1).clamp(0), or pad on the right"
        )


PreTrainedModel.post_init = _restoring(PreTrainedModel.post_init)  # type: ignore[method-assign]
AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, flash_attention_mask)
