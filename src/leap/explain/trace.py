"""One reading of a text, and what every layer weighed and added in it, in linear time.

`Attention.weights` forms a row for each token, O(t^2). A trace keeps what each layer was given
instead, and answers for one token, or for all together, by one pass through the layer: a row of
weights, the exact contribution of each token, the roll-out over all layers. For LEAP and linear
attention that is O(t), however long the text.

Axes: b batch, l layers, h heads, t tokens, d hidden size.
"""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from leap.errors import InputError
from leap.layers import Attention
from leap.models import LeapformerConfig
from leap.models.weights import Watch

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Trace:
    """What each attention layer of a model was given."""

    layers: tuple[Attention, ...]
    given: tuple[dict[str, Any], ...]
    """Arguments of each, by name."""
    names: tuple[str, ...]
    """What each layer is."""
    n_tokens: int

    def rows(self, at: int | None = -1) -> Float[Tensor, "b l h t"]:
        """How much the token `at` takes of each, in each layer and head; None for all on average.

        In LEAP, these are the focus weights as seen from there.
        """
        found = []
        for layer, given in self._inputs():
            by = self._of(at, given["x"]).unsqueeze(1)
            found.append(layer.taken(by=by, **given))
        return self._own(torch.stack(found, dim=1))

    def importance(self, at: int | None = -1) -> Float[Tensor, "b l h t"]:
        """The share of each token in what the token `at` took, as `Explanation.importance`."""
        return self.rows(at).abs()

    def norms(self, at: int | None = -1) -> Float[Tensor, "b l t"]:
        """The rows, each weight times the length of what the values add to the residual stream.

        A token that much is taken of may still add nothing (Kobayashi et al. 2020, arXiv
        2004.10102).
        """
        found = []
        for layer, given in self._inputs():
            by = self._of(at, given["x"]).unsqueeze(1)
            lengths = layer.added(**given).norm(dim=-1)
            found.append((layer.taken(by=by, **given).abs() * lengths).sum(dim=1))
        return self._own(torch.stack(found, dim=1))

    def contributions(self, at: int = -1) -> Float[Tensor, "b l t d"]:
        """What each token adds to the residual stream of the token `at`, through each layer.

        Exact: they add up to what the layer gave, less its bias.
        """
        self._check(at)
        found = [
            layer.contributions(at=range(given["x"].shape[1])[at], **given)
            for layer, given in self._inputs()
        ]
        return torch.stack(found, dim=1)[:, :, -self.n_tokens :]

    def through_layers(self, at: int | None = -1) -> Float[Tensor, "b t"]:
        """How much of each token reaches the token `at` through all layers; sums to 1.

        Attention roll-out (Abnar and Zuidema, 2020): heads count the same, and half of what leaves
        a layer came past it, by the residual. A summary of the layers, not a measure of cause.
        """
        reached = self._of(at, self.given[0]["x"]).double()
        for layer, given in reversed(self._inputs()):
            reached = (reached + _passed_on(layer, given, reached)) / 2
        reached = self._own(reached)
        return (reached / reached.sum(dim=-1, keepdim=True)).float()

    def table(self, pieces: Sequence[str], at: int = -1) -> "pd.DataFrame":
        """A row per token, layer and head of the first text: its text and its weight at `at`."""
        import pandas as pd

        if len(pieces) != self.n_tokens:
            raise InputError(f"{len(pieces)} pieces are not the {self.n_tokens} tokens of the text")
        rows = self.rows(at)[0]
        index = pd.MultiIndex.from_product(
            [range(rows.shape[0]), range(rows.shape[1]), range(rows.shape[2])],
            names=["layer", "head", "token"],
        )
        table = pd.DataFrame({"weight": rows.flatten().cpu().numpy()}, index=index).reset_index()
        table.insert(3, "text", [pieces[i] for i in table["token"]])
        return table

    def _inputs(self) -> list[tuple[Attention, dict[str, Any]]]:
        return list(zip(self.layers, self.given, strict=True))

    def _of(self, at: int | None, x: Tensor) -> Float[Tensor, "b t"]:
        """1 at a token; or the same share at all real ones."""
        if at is not None:
            self._check(at)
            by = x.new_zeros(x.shape[:2])
            by[:, range(-self.n_tokens, 0)[at]] = 1
            return by
        mask = self.given[0].get("key_mask")
        by = x.new_ones(x.shape[:2]) if mask is None else mask.to(x.dtype)
        return by / by.sum(dim=1, keepdim=True).clamp_min(1)

    def _own(self, x: Float[Tensor, "*axes n"]) -> Float[Tensor, "*axes t"]:
        """Without what a model has put before the text."""
        return x[..., -self.n_tokens :]

    def _check(self, at: int | None) -> None:
        t = self.n_tokens
        if at is not None and not -t <= at < t:
            raise InputError(f"token {at} is not among the {t} of this text; give {-t} to {t - 1}")


def _passed_on(layer: Attention, given: dict[str, Any], reached: Tensor) -> Tensor:
    """How much of each token reaches on through a layer, by shares of its weights."""
    normed = isinstance(getattr(layer, "norm", None), nn.Module)
    if normed or getattr(layer, "has_own_denominator", False):
        # Weights of either sign, of which the sum says nothing.
        shares = layer.weights(**given).abs().mean(dim=1).double()
        total = shares.sum(dim=-1, keepdim=True).clamp_min(torch.finfo(shares.dtype).tiny)
        return (reached.unsqueeze(1) @ (shares / total)).squeeze(1)
    x = given["x"]
    sums, _ = layer.take(values=x.new_ones(len(x), layer.n_head, x.shape[1], 1), **given)
    total = sums.squeeze(-1).double().mean(dim=1).clamp_min(torch.finfo(sums.dtype).tiny)
    return layer.taken(by=(reached / total).unsqueeze(1), **given).double().mean(dim=1)


@torch.no_grad()
def trace(
    model: PreTrainedModel,
    input_ids: Int[Tensor, "b t"],
    *,
    attention_mask: Int[Tensor, "b t"] | None = None,
) -> Trace:
    """Let a model read some texts, and keep what each of its layers was given.

    Args:
        model: a language model or a classifier of this package.
        input_ids: tokens.
        attention_mask: 1 at real tokens and 0 at pads, whose own rows mean nothing.
    """
    check_ids(input_ids)
    copied = copy_of(model)
    layers = [module for module in copied.modules() if isinstance(module, Attention)]
    if not layers:
        raise InputError(
            f"this model ({model.config.model_type}) has no attention of leap to look at; give "
            "one of leap, or use explain(), which asks for its attentions"
        )
    with Watch(layers) as watch:
        copied(input_ids=input_ids, attention_mask=attention_mask, **reading(copied))
    given = tuple(watch.given[layer] for layer in layers)
    return Trace(tuple(layers), given, layer_names(model, len(layers)), input_ids.shape[1])


def copy_of(model: PreTrainedModel) -> Any:
    """A copy that has the same weights, to look into: others may use the model at the same time."""
    tensors = [*model.parameters(), *model.buffers()]
    copied: Any = deepcopy(model, {id(tensor): tensor for tensor in tensors})
    return copied.eval()


def reading(model: nn.Module) -> dict[str, Any]:
    """Arguments by which a model reads a text once, and keeps no state of it."""
    return {"use_cache": False} if hasattr(model, "generate") else {}


def check_ids(input_ids: Tensor) -> None:
    """Refuse what is no batch of texts."""
    if input_ids.ndim != 2 or not input_ids.numel():
        raise InputError(f"input_ids are {list(input_ids.shape)}; expected [batch, tokens]")


def layer_names(model: PreTrainedModel, n_layer: int) -> tuple[str, ...]:
    """What each layer of a model is."""
    config: Any = model.config
    if not isinstance(config, LeapformerConfig):
        return (config.model_type,) * n_layer
    return tuple(
        name if name != "leap" or window is None else f"{name}, window of {window}"
        for name, window in zip(config.attentions, config.windows, strict=True)
    )
