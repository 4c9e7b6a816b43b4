"""A stream explained while it runs: which tokens reach the newest one, in constant memory.

Attention roll-out, as `Trace.through_layers` has it for a whole text, is a sum that each layer can
take as it takes values: a token's row says how much of each earlier token it is made of, and the
layer's weights average such rows. So every layer has a second state, of rows in place of values,
and a step costs the same however long the stream is.

A row has a column for each of `keep` tokens, and one for the rest. When a new token finds no free
column, the one whose share in the newest token is smallest joins the rest. That is exact: shares of
the tokens that are kept are what they would be with all columns.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from leap.errors import ConfigError
from leap.explain.trace import copy_of
from leap.layers import Attention, LeapAttention, LeapformerAttention
from leap.ops.additive import FocusState, WindowState
from leap.ops.linear import LinearState
from leap.ops.state import Recurrent

COLUMNS = {FocusState: "sum", WindowState: "v", LinearState: "kv"}
"""Which tensor of a state has values, in its last axis."""


@dataclass(frozen=True)
class Shares:
    """What the newest token of a stream is made of, through all layers."""

    tokens: list[int]
    """Places in the stream of those that are kept, the largest share first."""
    shares: list[float]
    rest: float
    """Share of all others together; with the shares, 1."""


class StreamExplainer:
    """Reads a stream token by token, and tells which tokens reach the newest one.

    Args:
        model: a language model whose attentions are LEAP or linear with weights that are not
            negative.
        keep: how many tokens to tell apart.
    """

    def __init__(self, model: PreTrainedModel, keep: int = 64) -> None:
        if keep < 1:
            raise ConfigError(f"keep={keep} must be 1 or more")
        self.model = copy_of(model)
        self.layers = [m for m in self.model.modules() if isinstance(m, Attention)]
        for layer in self.layers:
            _check(layer)
        if not self.layers:
            raise ConfigError("this model has no attention of leap to look at")
        self.keep = keep
        self.owners: list[int | None] = [None] * keep
        """The token of each column."""
        self.cache: Any = None
        self.states: list[Recurrent | None] = [None] * len(self.layers)
        self.n_read = 0
        self.last: Tensor | None = None
        self.given: dict[nn.Module, dict[str, Any]] = {}
        for layer in self.layers:
            layer.register_forward_pre_hook(self._note, with_kwargs=True)

    @property
    def n_bytes(self) -> int:
        """Memory of the rows, all that an explanation keeps beside the model's own state."""
        return sum(state.n_bytes for state in self.states if state is not None)

    @torch.no_grad()
    def read(self, token: int) -> tuple[Shares, Tensor]:
        """Read one more token: what it is made of, and the logits of the next one."""
        ids = torch.tensor([[token]], device=self.model.device)
        out = self.model(input_ids=ids, past_key_values=self.cache, use_cache=True)
        self.cache = out.past_key_values
        row = torch.zeros(self.keep + 1, dtype=torch.double, device=ids.device)
        row[self._column()] = 1
        for i, layer in enumerate(self.layers):
            given = self.given[layer]
            values = row.expand(1, layer.n_head, 1, -1).to(given["x"].dtype)
            taken, state = layer.take(values=values, state=self.states[i], **given)
            assert isinstance(state, Recurrent)  # as every causal attention returns
            self.states[i] = state
            mean = taken.double().mean(dim=1)[0, 0]
            row = (row + mean / mean.sum().clamp_min(torch.finfo(taken.dtype).tiny)) / 2
        self.last = row / row.sum()
        self.n_read += 1
        return self._shares(), out.logits[0, -1]

    def _shares(self) -> Shares:
        assert self.last is not None
        *kept, rest = self.last.tolist()
        found = [
            (x, owner) for x, owner in zip(kept, self.owners, strict=True) if owner is not None
        ]
        found.sort(reverse=True)
        return Shares([owner for _, owner in found], [x for x, _ in found], rest)

    def _column(self) -> int:
        """A column for the newest token, freed by the one that counts least if there is none."""
        if None in self.owners:
            column = self.owners.index(None)
        else:
            assert self.last is not None
            column = int(self.last[:-1].argmin())
            self.states = [
                None if state is None else _changed(state, lambda x: _joined(x, column))
                for state in self.states
            ]
        self.owners[column] = self.n_read
        return column

    def _note(self, layer: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        self.given[layer] = {"x": args[0], "positions": options.get("positions")}


def _joined(x: Tensor, column: int) -> Tensor:
    """With what is in a column added to the last one."""
    y = x.clone()
    y[..., -1] += x[..., column]
    y[..., column] = 0
    return y


def _changed(state: Recurrent, change: Callable[[Tensor], Tensor]) -> Recurrent:
    """A state whose columns have changed, those of states within it."""
    name = COLUMNS.get(type(state))
    if name is not None:
        changed: Any = {name: change(getattr(state, name))}
        return replace(state, **changed)
    parts: dict[str, Any] = {f.name: getattr(state, f.name) for f in fields(state)}
    inner: Any = {k: _changed(v, change) for k, v in parts.items() if isinstance(v, Recurrent)}
    return replace(state, **inner)


def _check(layer: Attention) -> None:
    linear = isinstance(layer, LeapformerAttention) and layer.normalise
    leap = isinstance(layer, LeapAttention) and not layer.formulation.nests
    if not (linear or leap) or getattr(layer, "form", None) != "causal":
        raise ConfigError(
            f"{type(layer).__name__} cannot be explained while it streams: that takes causal LEAP, "
            "or linear attention with a denominator and weights that are not negative; use trace()"
        )
