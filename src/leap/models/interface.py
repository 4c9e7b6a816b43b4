"""Our attention inside other people's Hugging Face models: `attn_implementation="leapformer"`.

After `import leap`, a BERT or Llama takes it like "sdpa":

    model = AutoModel.from_config(config, attn_implementation="leapformer")
    model = leap.with_proportions(model)        # optional: learn proportions too

Without the second line scores are relu(q) . relu(k); with it they are re-weighted by proportions
that small nets in each attention layer learn, which is LeaPformer. The model keeps its own cache
of keys and values, so training and prefill are linear, and decoding costs what it did.

`from_pretrained` does not know of the nets, and passes over what they have learned. So make the
model, give it nets, and only then load its weights:

    config = AutoConfig.from_pretrained(folder)
    model = AutoModel.from_config(config, attn_implementation="leapformer")
    safetensors.torch.load_model(leap.with_proportions(model), folder / "model.safetensors")

Axes: b batch, h heads, t queries, n keys, d width of a head.
"""

from typing import Any, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import flash_attention_mask

from leap.errors import ConfigError, InputError
from leap.layers import LearnedProportion
from leap.models.body import packed_at
from leap.ops import linear_attention, staircase_linear_attention
from leap.ops.features import proportional

NAME = "leapformer"
M = TypeVar("M", bound=nn.Module)


def with_proportions(model: M, *, hidden: int = 16) -> M:
    """Give each attention layer of a model two nets to learn proportions by; the model itself.

    They begin at random. Of a saved model they are loaded afterwards, as the file's head shows.

    Args:
        model: one made with `attn_implementation="leapformer"`.
        hidden: hidden units of the nets.
    """
    found = [m for m in model.modules() if hasattr(m, "head_dim") or _is_bert_like(m)]
    if not found:
        raise ConfigError(
            f"no attention layer of {type(model).__name__} was recognised: none has a head_dim"
        )
    like = next(model.parameters())
    for layer in found:
        width: Any = getattr(layer, "head_dim", None) or layer.attention_head_size
        for name in ("q_proportion", "k_proportion"):
            net = LearnedProportion(width, hidden=hidden).to(like)
            layer.add_module(name, net)
    return model


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
    **_: Any,
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
    if attention_mask is None and query.shape[2] == key.shape[2] and cu_seq_lens_q is None:
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
    (t, n) = query.shape[2], key.shape[2]
    causal = getattr(module, "is_causal", False) if is_causal is None else is_causal
    if causal:
        visible = torch.arange(n - t + 1, n + 1, device=q.device)
        o = staircase_linear_attention(q, k, v, visible, key_mask=mask)
    else:
        o = linear_attention(q, k, v, key_mask=mask)
    return o.transpose(1, 2), None


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, flash_attention_mask)
