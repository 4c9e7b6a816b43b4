"""The states of a model's layers as a Hugging Face cache, of constant size for linear attention.

`generate()` reorders it for beams, repeats it for several continuations, and crops it when a
draft is rejected: all of them things that a `leap.ops.State` can do.
"""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import SequenceKey, register_pytree_node
from transformers.cache_utils import Cache, CacheLayerMixin

from leap.errors import FileError, InputError
from leap.ops.state import Recurrent, State, load_states, save_states, state

ROLLBACK_LIMIT = 128
"""How many of the last tokens a recorded cache can take back, and all of its last call."""


class StateLayer(CacheLayerMixin):
    """What one layer keeps of the past."""

    is_compileable = True
    is_croppable = True
    supports_early_init = False
    is_sliding = False

    def __init__(self) -> None:
        super().__init__()
        self.state: Recurrent | None = None
        # Pads counted, as `generate` does; of each row by itself after a join. A tensor, as a
        # compiled step must not depend on it.
        self.n_tokens = torch.zeros((), dtype=torch.long)
        self.record_past = False
        self.rollback_limit = ROLLBACK_LIMIT

    def put(self, state: State | None, n_tokens: int | Tensor) -> None:
        """Keep the state after `n_tokens` more tokens."""
        assert isinstance(state, Recurrent)  # as every causal attention returns
        self.state = state
        self.n_tokens = self.n_tokens + n_tokens
        self.is_initialized = True

    def before(self, layer: Callable[[Tensor], Any], x: Tensor) -> Recurrent | None:
        """What a layer goes on from, to read x."""
        if self.state is None and self.record_past:
            # A recording must begin before the first token, and no tokens are the way there.
            _, self.state = layer(x[:, :0])
            self.activate_past_recording()
        return self.state

    @property
    def batch_size(self) -> int:
        """Rows of the state; -1 before there are any."""
        return -1 if self.state is None else len(self.state.length)

    def get_seq_length(self) -> int:
        """Tokens read so far, pads counted; of joined rows, those of the longest."""
        return int(self.n_tokens.max()) if self.n_tokens.numel() else 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of what a mask covers: all that was read, and the query itself."""
        return self.get_seq_length() + query_length, 0

    @property
    def n_read(self) -> Tensor:
        """Tokens that each row has read, `[b]`, pads counted."""
        return self.n_tokens.expand(self.batch_size)

    def get_max_length(self) -> int:
        """-1, for no limit."""
        return -1

    def activate_past_recording(self) -> None:
        """From now on, keep what is needed to take tokens back."""
        self.record_past = True
        if self.state is not None:
            self.state = self.state.record(self.rollback_limit)

    def crop(self, tokens_to_remove: int) -> None:
        """Take the last tokens back, as many as the negative number says."""
        if tokens_to_remove > 0:
            raise InputError(
                f"crop({tokens_to_remove}): say how many tokens to take back by a negative number"
            )
        if tokens_to_remove < 0:
            self._change(lambda state: state.rollback(-tokens_to_remove))
            self.n_tokens = self.n_tokens + tokens_to_remove

    def reset(self) -> None:
        """Forget everything."""
        self.__init__()  # type: ignore[misc]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Give each beam the past of the one it continues."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep some of the rows."""
        self._change(lambda state: state.select(indices))
        if self.n_tokens.ndim:
            self.n_tokens = self.n_tokens[indices.to(self.n_tokens.device)]

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row where it stands."""
        self._change(lambda state: state.repeat(repeats))
        if self.n_tokens.ndim:
            self.n_tokens = self.n_tokens.repeat_interleave(repeats)

    def offload(self) -> None:
        """Move the state to the CPU."""
        if self.state is not None:
            self.device = next(iter(self.state.tensors().values())).device
            self.state = self.state.to("cpu")

    def prefetch(self) -> None:
        """Move the state back to its device."""
        if self.state is not None:
            self.state = self.state.to(self.device)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Not how states begin."""
        raise InputError("a StateLayer begins with the first call of its model")

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Not how states go on."""
        raise InputError("a StateLayer holds a state, not keys and values: see put")

    def _change(self, change: Callable[[Recurrent], Recurrent]) -> None:
        if self.state is not None:
            self.state = change(self.state)


class StateCache(Cache):
    """The states of all layers of a model.

    Args:
        n_layer: how many.
    """

    layers: list[StateLayer]  # type: ignore[assignment]  # A list of one kind of layer.

    def __init__(self, n_layer: int) -> None:
        super().__init__(layers=[StateLayer() for _ in range(n_layer)])

    @classmethod
    def join(cls, caches: Sequence["StateCache"]) -> "StateCache":
        """The rows of several caches of one model as one, each as far as it had read.

        Going on from it gives each row what it would get alone. Recorded tokens are not kept: none
        can be taken back. The caches themselves stay as they are.
        """
        if not caches or any(layer.state is None for cache in caches for layer in cache.layers):
            raise InputError("join takes caches that have read something, one or more")
        if len({len(cache.layers) for cache in caches}) > 1:
            raise InputError("join takes caches of one model; these have more and fewer layers")
        joined = cls(len(caches[0].layers))
        for layer, *parts in zip(joined.layers, *(x.layers for x in caches), strict=True):
            states = [part.state for part in parts if part.state is not None]
            _check_alike(states)
            layer.put(states[0].concat(states[1:]), torch.cat([x.n_read for x in parts]))
        return joined

    def select(self, rows: Sequence[int] | Tensor) -> "StateCache":
        """Some of the rows, in the given order, as a cache of their own; this one stays."""
        chosen = StateCache(len(self.layers))
        for mine, layer in zip(self.layers, chosen.layers, strict=True):
            layer.put(mine.state, mine.n_tokens)
            layer.batch_select_indices(torch.as_tensor(rows, dtype=torch.long))
        return chosen

    @property
    def lengths(self) -> Tensor:
        """Tokens that each row has read, `[b]`, pads not counted."""
        state = self.layers[0].state
        return torch.zeros(0, dtype=torch.long) if state is None else state.length

    def record_draft(self, n_tokens: int) -> None:
        """Be ready to take back `n_tokens` tokens more, that will be read one at a time."""
        for layer in self.layers:
            layer.rollback_limit = ROLLBACK_LIMIT + n_tokens
        self.activate_past_recording()

    def reserve(self) -> None:
        """Make room for all that the states can hold, so that no step changes a shape.

        Windows of LEAP grow as tokens are read. `torch.export` wants a step whose shapes stay.
        """
        for layer in self.layers:
            layer._change(lambda state: state.reserve())

    @property
    def n_bytes(self) -> int:
        """Memory that the states take."""
        return sum(0 if layer.state is None else layer.state.n_bytes for layer in self.layers)

    def save(self, path: str | Path) -> None:
        """Write all states to one safetensors file, a few kilobytes for a text of any length."""
        states: dict[str, State] = {
            str(i): layer.state for i, layer in enumerate(self.layers) if layer.state is not None
        }
        if len(states) < len(self.layers):
            raise InputError("this cache has read nothing yet; there is no state to save")
        progress = Progress(n_tokens=self.layers[0].n_tokens)
        save_states(path, states | {"progress": progress})

    @classmethod
    def load(cls, path: str | Path, device: torch.device | str = "cpu") -> "StateCache":
        """Read the states that `save` wrote."""
        states = load_states(path, device)
        progress = states.pop("progress", None)
        in_order = sorted(states) == sorted(map(str, range(len(states))))
        recurrent = all(isinstance(state, Recurrent) for state in states.values())
        if not (isinstance(progress, Progress) and in_order and recurrent):
            raise FileError(f"{path} holds states, but not those of a model's layers")
        cache = cls(len(states))
        for i, layer in enumerate(cache.layers):
            layer.put(states[str(i)], progress.n_tokens.cpu())
        return cache


def _check_alike(states: Sequence[Recurrent]) -> None:
    """Refuse states of different models."""
    first = states[0]
    for other in states[1:]:
        if type(other) is not type(first) or other.layout() != first.layout():
            raise InputError(
                f"join takes caches of one model; a layer has {type(first).__name__} "
                f"{first.layout()} in one and {type(other).__name__} {other.layout()} in another"
            )


@state
class Progress(State):
    """How far a saved cache had read, pads counted."""

    n_tokens: Tensor


def _flatten(cache: StateCache) -> tuple[list[Any], int]:
    return [x for layer in cache.layers for x in (layer.state, layer.n_tokens)], len(cache.layers)


def _flatten_with_keys(cache: StateCache) -> tuple[list[tuple[Any, Any]], int]:
    values, n_layer = _flatten(cache)
    return [(SequenceKey(i), value) for i, value in enumerate(values)], n_layer


def _unflatten(values: Iterable[Any], n_layer: int) -> StateCache:
    cache, values = StateCache(n_layer), list(values)
    for layer, past, n_tokens in zip(cache.layers, values[::2], values[1::2], strict=True):
        layer.put(past, n_tokens)
    return cache


# `torch.export` takes a cache apart into tensors and puts it together again.
register_pytree_node(
    StateCache,
    _flatten,
    _unflatten,
    flatten_with_keys_fn=_flatten_with_keys,
    serialized_type_name="leap.StateCache",
)
