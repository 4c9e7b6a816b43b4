"""What a model attended to: the weights by which each token took from the others.

They are not estimated but the model's own: a layer's values, taken by them, are what it gave.
LEAP's are the softmax of one focus per token, the same for all that see it; those of linear
attention are formed for the text at hand in O(t^2), which the model itself never does. For long
texts `leap.explain.trace` has a row of them in O(t).

Axes: b batch, l layers, h heads, t tokens.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from leap.errors import InputError
from leap.explain.trace import check_ids, copy_of, layer_names, reading
from leap.layers import Attention
from leap.models.weights import Watch


@dataclass(frozen=True)
class Explanation:
    """How much of each token every token took, in each layer and head."""

    weights: Float[Tensor, "b l h t t"]
    """Row i holds what token i took of each token j; see `Attention.weights`."""
    names: tuple[str, ...]
    """What each layer is."""

    def importance(self, at: int | None = -1) -> Float[Tensor, "b l h t"]:
        """The share of each token in what the token `at` took, by default the last; None for all.

        A summary of weights; `leap.explain.importance` tells what a prediction rests on.
        """
        if at is None:
            return self.weights.mean(dim=-2).abs()
        self._check(at)
        return self.weights[..., at, :].abs()

    def received(self) -> Float[Tensor, "b l h t"]:
        """How much of each token all tokens took together; 1 on average."""
        return self.weights.abs().sum(dim=-2)

    def through_layers(self, at: int | None = -1) -> Float[Tensor, "b t"]:
        """How much of each token reaches the token `at` through all layers; sums to 1.

        Attention roll-out (Abnar and Zuidema, 2020): heads count the same, and half of what leaves
        a layer came past it, by the residual. A summary of the layers, not a measure of cause.
        """
        shares = self.weights.abs().mean(dim=2)
        shares = shares / shares.sum(dim=-1, keepdim=True).clamp_min(torch.finfo(shares.dtype).tiny)
        reached = torch.full_like(shares[:, 0, 0], 1 / shares.shape[-1])
        if at is not None:
            self._check(at)
            reached.zero_()[:, at] = 1
        for layer in range(shares.shape[1] - 1, -1, -1):
            taken = (reached.unsqueeze(1) @ shares[:, layer]).squeeze(1)
            reached = (reached + taken) / 2
        return reached / reached.sum(dim=-1, keepdim=True)

    def _check(self, at: int) -> None:
        t = self.weights.shape[-1]
        if not -t <= at < t:
            raise InputError(f"token {at} is not among the {t} of this text; give {-t} to {t - 1}")


@torch.no_grad()
def explain(
    model: PreTrainedModel,
    input_ids: Int[Tensor, "b t"],
    *,
    attention_mask: Int[Tensor, "b t"] | None = None,
) -> Explanation:
    """Let a model read some texts, and tell what each token attended to.

    Args:
        model: any language model or classifier of this package, of one kind of attention or
            several; or another Hugging Face model that returns its attentions.
        input_ids: tokens.
        attention_mask: 1 at real tokens and 0 at pads, whose own rows mean nothing.
    """
    check_ids(input_ids)
    inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
    copied = copy_of(model)
    watched = [module for module in copied.modules() if isinstance(module, Attention)]
    found = _watch(copied, watched, inputs) if watched else _ask(copied, inputs)
    return Explanation(torch.stack(found, dim=1), layer_names(model, len(found)))


def _watch(
    model: nn.Module, layers: list[Attention], inputs: dict[str, Tensor | None]
) -> tuple[Tensor, ...]:
    """The weights of our own layers, from what each of them is given."""
    with Watch(layers) as watch:
        model(**inputs, **reading(model))
    return watch.weights() or ()


def _ask(model: PreTrainedModel, inputs: dict[str, Tensor | None]) -> tuple[Tensor, ...]:
    """The weights of a Hugging Face model, which forms them if it attends in the plain way."""
    model.set_attn_implementation("eager")
    found = getattr(model(**inputs, output_attentions=True, use_cache=False), "attentions", ())
    if not found or any(weights is None for weights in found):
        raise InputError(
            f"this model ({model.config.model_type}) does not tell what it attended to; "
            "give one of leap, or one that returns its attentions"
        )
    return tuple(found)
