"""PyTorch models as the engine takes them: ours with constant states, others with a KV cache."""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from leap.errors import ConfigError, FileError
from leap.models import LeapformerForCausalLM, StateCache
from leap.runtime.text import Continuation
from leap.serve.protocol import Kept, Logits, Spell
from leap.tasks.lm.generate import load_text, save_text
from leap.tasks.lm.model import load_model, max_length
from leap.tasks.lm.tokenizer import TextTokenizer


def load(run: Path) -> "StateModel | KeyValueModel":
    """The model of a run folder of leap lm train, or of a folder with a Hugging Face model."""
    model, tokenizer = load_model(run)
    name = run.resolve().name
    if isinstance(model, LeapformerForCausalLM):
        return StateModel(model, tokenizer, name)
    return KeyValueModel(model, tokenizer, name)


class TorchModel:
    """What both kinds have in common."""

    is_constant: bool

    def __init__(self, model: PreTrainedModel, tokenizer: TextTokenizer, name: str) -> None:
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.name = name
        self.vocab_size = tokenizer.vocab_size
        self.end = tokenizer.eos_id if tokenizer.spells_line_ends else None
        self.max_length = max_length(model)

    def encode(self, text: str) -> list[int]:
        """Tokens of a text."""
        tokens: list[int] = self.tokenizer.encode(text).tolist()
        return tokens

    def begin(self) -> list[int]:
        """An end of text, as `leap lm generate` begins."""
        return [self.tokenizer.eos_id]

    def speller(self, prompt: str, read: Sequence[int]) -> Spell:
        """Spells what follows a prompt, of which the last tokens are `read`."""
        return Continuation(self.tokenizer, prompt, read).take

    def _batch(self, tokens: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor | None]:
        """Tokens `[b, t]`, shorter rows padded on the left, and a mask where there are pads."""
        width = max(map(len, tokens))
        ids = torch.tensor([[0] * (width - len(row)) + list(row) for row in tokens])
        mask = None
        if any(len(row) < width for row in tokens):
            lengths = torch.tensor([len(row) for row in tokens])
            mask = torch.arange(width) >= width - lengths[:, None]
        device = self.model.device
        return ids.to(device), None if mask is None else mask.to(device)


class StateModel(TorchModel):
    """A model of this package: a `StateCache`, of constant size but for softmax layers."""

    model: LeapformerForCausalLM

    def __init__(self, model: LeapformerForCausalLM, tokenizer: TextTokenizer, name: str) -> None:
        super().__init__(model, tokenizer, name)
        self.is_constant = "softmax" not in model.config.attentions

    @torch.inference_mode()
    def empty(self) -> StateCache:
        """The state of one row that has read nothing."""
        cache = StateCache(self.model.config.n_layer)
        nothing = torch.zeros(1, 0, dtype=torch.long, device=self.model.device)
        self.model.model(nothing, past_key_values=cache)
        return cache

    @torch.inference_mode()
    def read(self, tokens: Sequence[Sequence[int]], state: StateCache) -> tuple[Logits, StateCache]:
        """Read one token or more in each row: the logits after the last, and the new state."""
        ids, mask = self._batch(tokens)
        after = StateCache(len(state.layers))
        for old, new in zip(state.layers, after.layers, strict=True):
            new.put(old.state, old.n_tokens)
        output = self.model(
            ids, attention_mask=mask, past_key_values=after, use_cache=True, logits_to_keep=1
        )
        return output.logits[:, -1].float().cpu().numpy(), after

    @torch.inference_mode()
    def join(self, states: Sequence[StateCache]) -> StateCache:
        """The rows of all these states as one."""
        return StateCache.join(states)

    @torch.inference_mode()
    def select(self, state: StateCache, rows: Sequence[int]) -> StateCache:
        """Some of the rows."""
        return state.select(rows)

    def n_bytes(self, state: StateCache) -> int:
        """Memory that a state takes."""
        return state.n_bytes

    def save(self, kept: Kept, path: Path) -> None:
        """Write a text to a file that `leap lm generate --state` can go on from."""
        save_text(path, kept.state, self.tokenizer, list(kept.tail[-1:]))

    def load(self, path: Path) -> Kept:
        """Read what `save` or `leap lm generate --state` wrote."""
        cache, unread, _ = load_text(path, self.model, self.tokenizer)
        if len(cache.lengths) != 1 or not unread:
            raise FileError(f"{path} holds no single text to go on with; save one by this server")
        return Kept(cache, tuple(unread), int(cache.lengths[0]))


@dataclass(frozen=True)
class KeyValues:
    """Keys and values of all tokens, rows of fewer padded on the left."""

    cache: DynamicCache
    mask: Tensor
    """True at real tokens, `[b, n]`."""


class KeyValueModel(TorchModel):
    """Any other decoder of Hugging Face, with the KV cache that its `generate()` uses."""

    is_constant = False

    @torch.inference_mode()
    def empty(self) -> KeyValues:
        """The state of one row that has read nothing."""
        mask = torch.ones(1, 0, dtype=torch.bool, device=self.model.device)
        return KeyValues(DynamicCache(config=self.model.config), mask)

    @torch.inference_mode()
    def read(self, tokens: Sequence[Sequence[int]], state: KeyValues) -> tuple[Logits, KeyValues]:
        """Read one token or more in each row: the logits after the last, and the new state."""
        ids, new = self._batch(tokens)
        mask = torch.cat([state.mask, torch.ones_like(ids, dtype=torch.bool)], dim=1)
        if new is not None:
            mask = torch.cat([state.mask, new], dim=1)
        cache = copy(state.cache)  # Its layers replace the tensors they hold, and never write.
        cache.layers = [copy(layer) for layer in state.cache.layers]
        positions = (mask.long().cumsum(1) - 1).clamp_min(0)[:, -ids.shape[1] :]
        output: Any = self.model(
            input_ids=ids,
            attention_mask=mask.long(),
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1].float().cpu().numpy(), KeyValues(cache, mask)

    @torch.inference_mode()
    def join(self, states: Sequence[KeyValues]) -> KeyValues:
        """The rows of all these states as one, with pads in front of those that are shorter."""
        width = max(state.mask.shape[1] for state in states)
        mask = torch.cat([F.pad(x.mask, (width - x.mask.shape[1], 0)) for x in states])
        joined = DynamicCache(config=self.model.config)
        held = [state for state in states if state.mask.shape[1]]
        first: list[Any] = list(held[0].cache.layers) if held else []
        for i, like in enumerate(layer.keys for layer in first):
            parts = []
            for state in states:
                if state.mask.shape[1]:
                    layer: Any = state.cache.layers[i]
                    more = width - layer.keys.shape[2]
                    parts.append([F.pad(x, (0, 0, more, 0)) for x in (layer.keys, layer.values)])
                else:
                    zeros = like.new_zeros(len(state.mask), like.shape[1], width, like.shape[3])
                    parts.append([zeros, zeros])
            keys, values = (torch.cat(rows) for rows in zip(*parts, strict=True))
            joined.update(keys, values, i)
        return KeyValues(joined, mask)

    @torch.inference_mode()
    def select(self, state: KeyValues, rows: Sequence[int]) -> KeyValues:
        """Some of the rows, and no more places than the longest of them fills."""
        chosen = torch.as_tensor(rows, dtype=torch.long, device=state.mask.device)
        mask = state.mask[chosen]
        # Rows that read fewer tokens than others beside them have pads amidst their text. In order,
        # real places come after all pads, and those before the longest row's first hold none.
        n_kept = int(mask.sum(1).max()) if mask.numel() else 0
        order = mask.long().argsort(dim=1, stable=True)[:, mask.shape[1] - n_kept :]
        cache = copy(state.cache)
        layers: list[Any] = [copy(layer) for layer in state.cache.layers]
        for layer in layers if mask.shape[1] else ():
            index = order[:, None, :, None].expand(-1, layer.keys.shape[1], -1, 1)
            layer.keys, layer.values = (
                x[chosen].gather(2, index.expand(-1, -1, -1, x.shape[3]))
                for x in (layer.keys, layer.values)
            )
        cache.layers = layers
        return KeyValues(cache, mask.gather(1, order))

    def n_bytes(self, state: KeyValues) -> int:
        """Memory that a state takes."""
        if not state.mask.shape[1]:
            return 0
        layers: list[Any] = list(state.cache.layers)
        return sum(x.nbytes for layer in layers for x in (layer.keys, layer.values))

    def save(self, kept: Kept, path: Path) -> None:
        """Refused: what it keeps grows with the text."""
        raise ConfigError(
            f"{self.name} keeps all it has read, and no state to save; only models of this package "
            "have one"
        )

    def load(self, path: Path) -> Kept:
        """Refused, as `save` is."""
        raise ConfigError(f"{self.name} goes on from no state file; serve a model of this package")
