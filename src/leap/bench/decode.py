"""How long a model takes for one more token, against how many it has read.

Our models next to Hugging Face's GPT-2 of the same sizes with its key-value cache, all with random
weights, which take as long as trained ones. Our models really read the context. For GPT-2 that
would take time in the square of its length, so its cache is filled with random keys and values
instead: a step costs the same whatever they hold. The cache is a `DynamicCache`, what `generate()`
uses by default, and it copies the keys and values it holds as it takes the new ones in; that is
part of the time.

What is timed is the forward of one token on top of the cache, with the logits of the next, or a
few tokens by `generate()`, whose own cost is the same for all. Every turn begins from the same
cache, so the context does not grow.

All models are measured in one run, by turns (see `leap.bench.run`).
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
)

from leap.bench.run import Report, Steps, Timed, TurnsConfig, report_on, time_by_turns
from leap.errors import ConfigError, LeapError
from leap.models import LeapformerConfig, StateCache, preset, usable_as
from leap.ops.tolerance import relative_error
from leap.reports.progress import Progress, silent

GPT2 = "gpt2"
N_TOKENS_CHECKED = 150  # Past two chunks of 64, and past the widest window of `small`.
LARGEST_ERROR = 1e-4  # Of the largest logit: float32, through every layer of a model.


@dataclass(frozen=True, kw_only=True)
class DecodeConfig(TurnsConfig):
    """Measure the time of one more token after short and long contexts, beside GPT-2.

    Our models read the context. GPT-2, of the same sizes and with Hugging Face's KV cache,
    gets its cache filled with random numbers, as reading would take it quadratic time. Each
    model's step is first compared with its forward over all tokens at once. Prints tables; writes
    results.json, results.md and decode.png.
    """

    contexts: tuple[int, ...] = (1024, 16384, 100_000)
    """Numbers of tokens read before the one that is timed."""
    models: tuple[str, ...] = ("leapformer", "leap", GPT2)
    """Models to measure: gpt2, or ours by the name of their attention. LEAP's has windows."""
    preset: str = "small"
    """Sizes of all models: tiny, small, 140m, 247m or 350m."""
    batch: int = 1
    """Rows that are written at once."""
    generate: int = 0
    """Tokens to write by generate(), whose mean time is told; 0 for the bare step."""
    chunk: int = 2048
    """Tokens our models read at once; no matter to what is timed."""
    repeats: int = 30
    """Repetitions of each model at each context, of which the fastest counts."""
    output: Path = Path("runs/bench-decode")
    """Folder to write the results to."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_at_least_one("contexts", "chunk", "batch")
        if self.generate < 0:
            raise ConfigError(f"generate={self.generate} tokens cannot be written; give 0 or more")
        if not self.contexts or not self.models:
            raise ConfigError("nothing to measure: give at least one context and one model")
        known = (*usable_as("causal"), GPT2)
        for name in self.models:
            if name not in known:
                raise ConfigError(f"no model is called {name!r}; there are {', '.join(known)}")
        self.sizes()

    def sizes(self, **changes: Any) -> LeapformerConfig:
        """The preset, for the longest context."""
        longest = max(*self.contexts, N_TOKENS_CHECKED) + 1 + self.generate
        return sizes(self.preset, longest, **changes)


@dataclass(frozen=True, kw_only=True)
class DecodeResult(Timed):
    """What one model took for a token after one context."""

    model: str
    context: int
    state_bytes: int
    """Memory of what the model keeps of the contexts of all rows."""
    way: str
    """How a token goes through the layers: fused, or why it is not."""


DecodeReport = Report[DecodeConfig, DecodeResult]


@torch.no_grad()
def measure(config: DecodeConfig, progress: Progress = silent) -> DecodeReport:
    """Compare each model's step with its whole forward, then measure them all."""
    return report_on(config, _results(config, progress))


def _results(config: DecodeConfig, progress: Progress) -> Iterator[DecodeResult]:
    contexts = sorted(set(config.contexts))
    stages = list(pairwise([0, *contexts]))
    decoders = {name: _decoder(name, config) for name in dict.fromkeys(config.models)}
    parts = [len(d.parts(*stage)) for d in decoders.values() for stage in stages]
    steps = Steps(progress, total=len(decoders) * (1 + len(stages)) + sum(parts))
    for name, decoder in decoders.items():
        steps.begin(f"checking {name}")
        check_step(name, decoder)
        decoder.forget()
        steps.end()
    yield from _after_each(decoders, stages, steps, config)


def measure_models(
    models: Mapping[str, PreTrainedModel], contexts: Sequence[int], progress: Progress = silent
) -> list[DecodeResult]:
    """Measure models that are at hand, which keep what they read in a `StateCache`."""
    config = DecodeConfig(contexts=tuple(contexts))
    stages = list(pairwise([0, *sorted(set(contexts))]))
    decoders = {name: Decoder(model, config) for name, model in models.items()}
    parts = sum(len(decoders) * len(range(*stage, config.chunk)) for stage in stages)
    steps = Steps(progress, total=len(decoders) * len(stages) + parts)
    with torch.no_grad():
        return report_on(config, _after_each(decoders, stages, steps, config)).results


def _after_each(
    decoders: Mapping[str, "Decoder"],
    stages: Sequence[tuple[int, int]],
    steps: Steps,
    config: DecodeConfig,
) -> Iterator[DecodeResult]:
    """Read on from context to context, and time a token after each."""
    for before, context in stages:
        for name, decoder in decoders.items():
            for n_tokens in decoder.parts(before, context):
                steps.begin(f"context of {context}: read by {name}")
                decoder.read(n_tokens)
                steps.end()
        # GPT-2's long cache leaves nothing of the next model's weights in the processor's, which
        # is not how a text is written: there a step follows a step of the same model.
        calls: dict[str, Any] = {
            name: partial(decoder.write, config.generate) if config.generate else decoder.step
            for name, decoder in decoders.items()
        }
        for name, timed in time_by_turns(calls, steps, f"context of {context}", config).items():
            n_tokens = max(config.generate, 1)
            yield DecodeResult(
                model=name,
                context=context,
                state_bytes=decoders[name].state_bytes,
                way=decoders[name].way,
                seconds=timed.seconds / n_tokens,
                turns=tuple(each / n_tokens for each in timed.turns),
            )


class Decoder:
    """A model that reads random tokens, and can take one more after them as often as asked."""

    def __init__(self, model: Any, config: DecodeConfig) -> None:
        self.model = model.eval().to(config.chosen_device())
        self.chunk, self.batch = config.chunk, config.batch
        self.random = torch.Generator().manual_seed(config.seed)
        self.token = self.tokens(1)
        self.forget()

    def forget(self) -> None:
        """Begin again, before the first token."""
        self.cache: Any = self.empty_cache()
        self.n_read = 0

    def empty_cache(self) -> Any:
        """The cache before the first token."""
        return StateCache(self.model.config.n_layer)

    def tokens(self, n: int) -> Tensor:
        """Random ones, `[b, n]`."""
        size = (self.batch, n)
        drawn = torch.randint(self.model.config.vocab_size, size, generator=self.random)
        return drawn.to(self.model.device)

    def parts(self, before: int, context: int) -> list[int]:
        """By how many tokens at a time to go on from `before` to `context` of them."""
        n_whole, rest = divmod(context - before, self.chunk)
        return [self.chunk] * n_whole + [rest] * (rest > 0)

    def read(self, n_tokens: int) -> None:
        """Read on."""
        self.feed(self.tokens(n_tokens))

    def feed(self, tokens: Tensor) -> None:
        """Read these tokens on top of the cache."""
        self.n_read += tokens.shape[1]
        self.model(tokens, past_key_values=self.cache, use_cache=True, logits_to_keep=1)

    def step(self, token: Tensor | None = None) -> Tensor:
        """Logits `[b, 1, vocabulary]` after one more token, which the cache then forgets."""
        with self._forgetting():
            token = self.token if token is None else token
            return self.model(token, past_key_values=self.cache, use_cache=True).logits

    def write(self, n_tokens: int) -> None:
        """Write tokens by `generate()`, greedily, which the cache then forgets."""
        # `generate` wants all tokens, and passes on those that the cache has not read.
        tokens = self.token.expand(-1, self.n_read + 1)
        with self._forgetting():
            self.model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                past_key_values=self.cache,
                max_new_tokens=n_tokens,
                min_new_tokens=n_tokens,
                do_sample=False,
                pad_token_id=0,
            )

    @contextmanager
    def _forgetting(self) -> Iterator[None]:
        kept = self.cache.layers
        # Layers of both kinds of cache replace the tensors they hold and never write into them.
        self.cache.layers = [copy(layer) for layer in kept]
        try:
            yield
        finally:
            self.cache.layers = kept

    @property
    def way(self) -> str:
        """How one more token goes through the layers."""
        body: Any = self.model.model
        reason = body.step_refusal(body.embed_tokens(self.token), self.cache)
        return "fused" if reason is None else f"not fused: {reason}"

    @property
    def state_bytes(self) -> int:
        """Memory of the cache."""
        return self.cache.n_bytes


class GPT2Decoder(Decoder):
    """GPT-2, whose cache is filled with random keys and values in place of reading."""

    def empty_cache(self) -> DynamicCache:
        """The cache before the first token."""
        return DynamicCache(config=self.model.config)

    def parts(self, before: int, context: int) -> list[int]:
        """All of them at once."""
        return [context - before]

    def read(self, n_tokens: int) -> None:
        """Put random keys and values into the cache."""
        self.n_read += n_tokens
        config = self.model.config
        shape = (self.batch, config.n_head, n_tokens, config.n_embd // config.n_head)
        for i in range(config.n_layer):
            keys, values = (torch.randn(shape, generator=self.random) for _ in "kv")
            self.cache.update(keys.to(self.model.device), values.to(self.model.device), i)

    @property
    def way(self) -> str:
        """How one more token goes through the layers."""
        return "not fused: it is not ours"

    @property
    def state_bytes(self) -> int:
        """Memory of the cache."""
        return sum(x.nbytes for layer in self.cache.layers for x in (layer.keys, layer.values))


def _decoder(name: str, config: DecodeConfig) -> Decoder:
    kind = GPT2Decoder if name == GPT2 else Decoder
    n_positions = config.sizes().n_positions
    return kind(random_model(name, config.preset, n_positions, config.seed), config)


def sizes(preset_name: str, n_positions: int, **changes: Any) -> LeapformerConfig:
    """A preset, without positions and with a whole softmax, which GPT-2 has as well."""
    fixed: dict[str, Any] = {"position_embedding": "none", "adaptive_cutoffs": None}
    return preset(preset_name, n_positions=n_positions, **fixed, **changes)


def random_model(name: str, preset_name: str, n_positions: int, seed: int) -> Any:
    """A model of random weights: ours by the name of its attention, or GPT-2 of the same sizes."""
    torch.manual_seed(seed)
    if name != GPT2:
        ours = sizes(preset_name, n_positions, attention=name)
        return AutoModelForCausalLM.from_config(ours)  # type: ignore[no-untyped-call]
    gpt2 = gpt2_of_sizes(sizes(preset_name, n_positions))
    return GPT2LMHeadModel(gpt2)  # type: ignore[no-untyped-call]


def gpt2_of_sizes(same: LeapformerConfig, **changes: Any) -> GPT2Config:
    """GPT-2 as wide and deep as one of our models."""
    return GPT2Config(
        vocab_size=same.vocab_size,
        n_embd=same.hidden_size,
        n_layer=same.n_layer,
        n_head=same.n_head,
        n_inner=same.intermediate_size,
        n_positions=same.n_positions,
        activation_function=same.hidden_act,  # Its own is slower, and not what is compared.
        bos_token_id=None,
        eos_token_id=None,
        **changes,
    )


@torch.no_grad()
def check_step(name: str, decoder: Decoder) -> None:
    """Raise an error unless a step's logits are those of a forward over all tokens at once.

    A fast wrong answer is worth no measurement.
    """
    tokens = decoder.tokens(N_TOKENS_CHECKED)
    decoder.forget()
    for part in tokens[:, :-1].split(math.ceil(N_TOKENS_CHECKED / 2), dim=1):
        decoder.feed(part)
    expected = decoder.model(tokens, use_cache=False).logits[:, -1:]
    for _ in range(2):  # The second time shows whether the first one was forgotten.
        error = relative_error(decoder.step(tokens[:, -1:]).cpu(), expected.cpu())
        if not error <= LARGEST_ERROR:
            raise LeapError(
                f"{name} decodes wrongly: the logits of a step are off by {error:.1e} of the "
                f"largest, where {LARGEST_ERROR:.1e} is allowed; its speed was not measured"
            )
