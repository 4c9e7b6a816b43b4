"""Writing on: a model continues a text, token by token, each at the same cost.

What the model has read can be kept in a small file and taken up again, today or elsewhere, as if it
had never stopped. Beside the states of the layers such a file names the last token, which has been
written but not read yet, and the tokenizer, and holds the state of the random numbers.
"""

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, set_seed
from transformers.generation.streamers import BaseStreamer

from leap.errors import ConfigError, FileError, first_line
from leap.models import LeapformerForCausalLM, StateCache
from leap.runtime.text import Continuation
from leap.tasks.lm.model import max_length
from leap.tasks.lm.tokenizer import TextTokenizer
from leap.tasks.lm.writing import GenerateConfig, Write, Written, check_folder_of

TAG = "leap.lm"
RANDOM = "random.{device}"
"""Name of the tensor that holds the random generator's state of a kind of device."""


@torch.no_grad()
def write_on(
    model: PreTrainedModel,
    tokenizer: TextTokenizer,
    config: GenerateConfig,
    write: Write | None = None,
) -> Written:
    """Write with a model that is at hand; `config.run` is not looked at."""
    set_seed(config.seed or 0)
    cache, unread = _begin(model, tokenizer, config)
    prompt = tokenizer.encode(config.prompt).long()
    new = torch.cat([torch.tensor(unread, dtype=torch.long), prompt]).unsqueeze(0).to(model.device)
    n_read = 0 if cache is None else cache.get_seq_length()
    _check_length(model, n_read + new.shape[1], config.tokens)

    ends = tokenizer.spells_line_ends and not config.past_end
    sampled = config.temperature > 0
    settings = GenerationConfig(
        max_new_tokens=config.tokens,
        do_sample=sampled,
        temperature=config.temperature if sampled else None,
        top_k=config.top_k or 0 if sampled else None,
        top_p=config.top_p if sampled else None,
        eos_token_id=tokenizer.eos_id if ends else None,
        pad_token_id=tokenizer.eos_id,
        return_dict_in_generate=True,
    )
    streamer = _Streamer(tokenizer, config.prompt, write)
    own, model.generation_config = model.generation_config, settings  # Else it fills in the end.
    try:
        outputs: Any = model.generate(  # type: ignore[operator]
            new,
            attention_mask=new.new_ones(1, n_read + new.shape[1]),
            streamer=streamer,
            **({} if cache is None else {"past_key_values": cache}),
        )
    finally:
        model.generation_config = own
    cache = outputs.past_key_values if isinstance(outputs.past_key_values, StateCache) else None
    if config.state is not None:
        assert cache is not None
        random = {model.device.type: _generator(model.device).get_state()}
        save_text(config.state, cache, tokenizer, streamer.tokens[-1:], random)
    return Written(
        text="".join(streamer.pieces),
        tokens=streamer.tokens,
        seconds=streamer.seconds,
        state_bytes=None if cache is None else cache.n_bytes,
    )


class _Streamer(BaseStreamer):
    """Takes tokens as `generate` makes them, and passes on the text they complete."""

    def __init__(self, tokenizer: TextTokenizer, prompt: str, write: Write | None) -> None:
        self.tokenizer = tokenizer
        self.prompt = prompt
        self.write = write
        self.tokens: list[int] = []
        self.pieces: list[str] = []
        self.text: Continuation | None = None
        self.first = self.last = 0.0

    @property
    def seconds(self) -> float:
        return self.last - self.first

    def put(self, value: Tensor) -> None:
        if self.text is None:
            self.text = Continuation(self.tokenizer, self.prompt, value.flatten().tolist())
            return
        for token in value.flatten().tolist():
            self.last = time.perf_counter()
            self.first = self.first or self.last
            self.tokens.append(token)
            piece = self.text.take(token)
            if piece:
                self.pieces.append(piece)
                if self.write is not None:
                    self.write(piece)

    def end(self) -> None:
        pass


def _begin(
    model: PreTrainedModel, tokenizer: TextTokenizer, config: GenerateConfig
) -> tuple[StateCache | None, list[int]]:
    """What was read before, and tokens that were not: an end of text where nothing was."""
    if config.state is None:
        return None, [tokenizer.eos_id]
    if not isinstance(model, LeapformerForCausalLM):
        raise ConfigError(
            f"state={config.state}: this model ({model.config.model_type}) keeps all it has read, "
            "and no state; drop it"
        )
    if not config.state.exists():
        check_folder_of(config.state)
        return None, [tokenizer.eos_id]
    cache, unread, random = load_text(config.state, model, tokenizer)
    if config.seed is None and random is not None:
        with _explained(config.state):
            _generator(model.device).set_state(random)
    if not unread and not config.prompt:
        raise FileError(f"{config.state} does not say how its text goes on; give a prompt")
    return cache, unread


def load_text(
    path: Path, model: LeapformerForCausalLM, tokenizer: TextTokenizer
) -> tuple[StateCache, list[int], Tensor | None]:
    """A text that `save_text` wrote: what was read, tokens that were not, and random numbers."""
    cache = model.load_state(path)
    name = RANDOM.format(device=model.device.type)
    with _explained(path), safe_open(path, framework="pt") as file:
        kept = json.loads((file.metadata() or {}).get(TAG, "{}"))
        random = file.get_tensor(name) if name in file.keys() else None  # noqa: SIM118
        unread = [int(token) for token in kept.get("unread", [])]
    if not all(0 <= token < tokenizer.vocab_size for token in unread):
        raise FileError(f"{path} goes on from a token that there is not; give another")
    if kept.get("tokenizer", tokenizer.fingerprint) != tokenizer.fingerprint:
        raise FileError(f"{path} was written with another tokenizer; give its own model")
    return cache, unread, random


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except (ValueError, TypeError, AttributeError, RuntimeError) as error:
        raise FileError(
            f"{path} does not say how its text goes on ({first_line(error)})"
        ) from error


def save_text(
    path: Path,
    cache: StateCache,
    tokenizer: TextTokenizer,
    unread: list[int],
    random: Mapping[str, Tensor] | None = None,
) -> None:
    """Write what was read of a text, and how it goes on.

    Args:
        path: of the file, which appears when it is complete.
        cache: what was read, in one row.
        tokenizer: its own.
        unread: the last token, which has been written but not read.
        random: states of random generators, by the kind of their device.
    """
    unfinished = path.with_name(f".{path.name}.part")
    try:
        cache.save(unfinished)
        with safe_open(unfinished, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            metadata = file.metadata() or {}
        for device, state in (random or {}).items():
            tensors[RANDOM.format(device=device)] = state
        kept = {"tokenizer": tokenizer.fingerprint, "unread": unread}
        unfinished.write_bytes(save(tensors, metadata=metadata | {TAG: json.dumps(kept)}))
        unfinished.replace(path)
    except (OSError, SafetensorError) as error:
        unfinished.unlink(missing_ok=True)
        raise FileError(
            f"cannot write {path} ({first_line(error)}); make room, or give another file"
        ) from error


def _generator(device: torch.device) -> torch.Generator:
    """The random generator that a model's tokens are drawn by."""
    if device.type == "cuda":
        return torch.cuda.default_generators[device.index or 0]
    return (
        torch.mps._get_default_mps_generator() if device.type == "mps" else torch.default_generator
    )


def _check_length(model: PreTrainedModel, n_before: int, n_new: int) -> None:
    limit = max_length(model)
    if limit is not None and n_before + n_new - 1 > limit:
        raise ConfigError(
            f"{n_before} tokens read and {n_new} to write are more than the {limit} positions this "
            "model has learned; use a shorter prompt, or fewer tokens, or a model with "
            "position_embedding alibi or none, which know no limit"
        )
