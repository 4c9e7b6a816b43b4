"""What learned parts read off a text: places, steps, gates as half-lives, focus; layer by layer.

    place          of LeaPformer: p of the queries and s of the keys in (0, 1); or, travelled, the
                   sum of the steps so far
    concentration  what scores are multiplied by, w_ij: see `leap.layers.leapformer`
    half-life      tokens after which a gate has let half of the past go: log(1/2) / log g
    focus          LEAP's logit of each token

Axes: b batch, h heads, t tokens (s of a source), m clocks.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from leap.errors import InputError
from leap.explain.trace import copy_of
from leap.layers import Attention, LeapAttention, LeapformerAttention
from leap.models.weights import Watch

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Places:
    """What the parts of one layer read off the first text of a batch."""

    name: str
    """Where the layer is: `layer 0`, or of a translation model `encoder layer 0`."""
    kind: str
    """`travelled`, `learned`, `fixed` or `none` of LeaPformer's proportions, else `leap` or
    whatever the layer is."""
    query: Float[Tensor, "h t"] | None = None
    """Where queries stand."""
    key: Float[Tensor, "h s"] | None = None
    """Where keys stand."""
    steps: Float[Tensor, "h s"] | None = None
    """How far each token of what is read goes on, where places are travelled."""
    frequency: Float[Tensor, "h m"] | None = None
    """What clocks turn per unit of length, in radians, where places are compared by clocks."""
    half_life: Float[Tensor, "h t"] | None = None
    """Of gates, in tokens; of gates per channel, the geometric mean's."""
    focus: Float[Tensor, "h t"] | None = None
    """LEAP's logits."""

    def concentration(self) -> Float[Tensor, "h t s"]:
        """What the score of each pair of tokens is multiplied by; for short texts, in O(t^2)."""
        if self.query is None or self.key is None:
            raise InputError(f"{self.name} ({self.kind}) has no places that weigh scores")
        distance = self.query.unsqueeze(2) - self.key.unsqueeze(1)
        if self.frequency is None:
            return (math.pi / 2 * distance).cos()
        turned = distance.unsqueeze(-1) * self.frequency[:, None, None].to(distance)
        return ((1 + turned.cos()) / 2).mean(dim=-1)

    def spread(self) -> Float[Tensor, " h"] | None:
        """Standard deviation over tokens of what differs: steps, proportions or focus."""
        read = self.steps if self.steps is not None else self.key
        read = self.focus if read is None else read
        return None if read is None or read.shape[1] < 2 else read.std(dim=1)

    def follows_position(self) -> Float[Tensor, " h"] | None:
        """Correlation over tokens of the keys' places, or of the focus, with the position."""
        read = self.key if self.key is not None else self.focus
        if read is None or read.shape[1] < 2:
            return None
        at = torch.arange(read.shape[1], dtype=read.dtype)
        centred = read - read.mean(dim=1, keepdim=True), (at - at.mean()).expand_as(read)
        above = (centred[0] * centred[1]).sum(dim=1)
        return above / (centred[0].norm(dim=1) * centred[1].norm(dim=1)).clamp_min(1e-12)


@torch.no_grad()
def places(model: PreTrainedModel, **inputs: Any) -> list[Places]:
    """What every layer of a model reads off a text.

    Args:
        model: a language model, a classifier or a translation model of this package.
        inputs: what it is called with: input_ids, and for a translation model labels.
    """
    copied = copy_of(model)
    layers = {n: m for n, m in copied.named_modules() if isinstance(m, Attention)}
    if not layers:
        raise InputError(f"this model ({model.config.model_type}) has no attention of leap")
    with Watch(layers.values()) as watch:
        copied(**inputs)
    return [_read_off(where(name), m, watch.given[m]) for name, m in layers.items()]


def _read_off(name: str, layer: Attention, given: dict[str, Any]) -> Places:
    x = given["x"]
    found: dict[str, Any] = {}
    kind = type(layer).__name__.removesuffix("Attention").lower()
    if isinstance(layer, LeapformerAttention):
        kind = layer.proportion
        if kind != "none":
            read = {k: v for k, v in given.items() if k != "x"}
            query, key = layer.proportions(x, **read)
            found |= {"query": query, "key": key}
        if layer.steps is not None:
            read_off = x if given.get("source") is None else given["source"]
            found["steps"] = layer.steps.lengths(read_off)
            if layer.places == "undivided" and layer.steps.log_frequency is not None:
                found["frequency"] = layer.steps.log_frequency.exp().unsqueeze(0)
    gate: Any = getattr(layer, "gate", None)
    if gate is not None:
        log_gate = gate(x)
        log_gate = log_gate.mean(dim=-1) if log_gate.ndim == 4 else log_gate
        found["half_life"] = -math.log(2) / log_gate.clamp_max(-1e-12)
    if isinstance(layer, LeapAttention):
        mask, at = given.get("key_mask"), given.get("positions")
        found["focus"] = layer.focus(x, key_mask=mask, positions=at).logits
    return Places(name, kind, **{key: value[0].cpu() for key, value in found.items()})


def where(module: str) -> str:
    """A layer's place by its module's name: `layer 2`, `decoder layer 0 cross`."""
    parts = module.split(".")
    number = next((part for part in parts if part.isdigit()), "")
    side = next((part for part in parts if part in ("encoder", "decoder")), "")
    cross = "cross" if any("cross" in part for part in parts) else ""
    return " ".join(word for word in (side, f"layer {number}".strip(), cross) if word)


def places_table(found: Sequence[Places]) -> "pd.DataFrame":
    """A row per layer, head and token: place, step, half-life and focus, as far as there are."""
    import pandas as pd

    frames = []
    for each in found:
        columns = {
            "query": each.query,
            "place": each.key,
            "step": each.steps,
            "half_life": each.half_life,
            "focus": each.focus,
        }
        for name, value in columns.items():
            if value is None:
                continue
            h, t = value.shape
            frame = pd.DataFrame(value.numpy()).stack().rename("value").reset_index()
            frame.columns = ["head", "token", "value"]
            frame.insert(0, "layer", each.name)
            frame.insert(1, "part", name)
            assert len(frame) == h * t
            frames.append(frame)
    columns_ = ["layer", "part", "head", "token", "value"]
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame(columns=columns_)
