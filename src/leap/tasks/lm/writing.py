"""What it takes to write a text, and what comes of it: with a model in torch, or with an export.

Nothing here needs torch, so that an exported model writes without it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from leap.errors import ConfigError, FileError, check_seed, refuse_given
from leap.runtime.manifest import is_export
from leap.runtime.text import check_prompt
from leap.runtime.writer import Writer

LEAST_TEMPERATURE = 1e-6
"""Logits of up to 1e32 divided by it are still finite in float32."""
Write = Callable[[str], None]
"""Takes the text in pieces, as they are made."""


@dataclass(frozen=True, kw_only=True)
class GenerateConfig:
    """Write text with a model, shown as it is made."""

    run: Path
    """Run folder of leap lm train, a folder of leap export, or one with a Hugging Face model."""
    prompt: str = ""
    """Text to continue; by default a new text begins, or the text of the state is continued."""
    tokens: int = 200
    """Tokens to write; fewer if the text ends."""
    temperature: float = 0.8
    """Sampling temperature: 0 is greedy decoding, 1 samples from the model's distribution."""
    top_k: int | None = None
    """Top-k sampling: choose among the k likeliest tokens only; by default among all."""
    top_p: float = 1.0
    """Nucleus sampling: choose among the likeliest tokens that together have this probability."""
    seed: int | None = None
    """Random seed of the choices; by default 0, or where the state's random numbers left off."""
    past_end: bool = False
    """Go on with a new text where one ends."""
    state: Path | None = None
    """File that keeps what was read and written: continued from if it is there, written in the
    end. It stays as small however long the text grows. By default nothing is kept."""

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise ConfigError(f"tokens={self.tokens} must be 1 or more")
        if not 0 <= self.temperature < math.inf:
            raise ConfigError(f"temperature={self.temperature} must be 0 or more")
        if 0 < self.temperature < LEAST_TEMPERATURE:
            raise ConfigError(
                f"temperature={self.temperature} is too near 0 to divide by; give 0 for greedy "
                f"decoding, or {LEAST_TEMPERATURE} or more"
            )
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError(f"top_k={self.top_k} must be 1 or more")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p={self.top_p} must be more than 0, and at most 1")
        if self.temperature == 0:
            greedy = "of sampling, and temperature=0 always takes the likeliest token"
            refuse_given(self, ("top_k", "top_p"), greedy)
        check_seed(self.seed)
        check_prompt(self.prompt)


@dataclass(frozen=True)
class Written:
    """What was written, and how fast."""

    text: str
    tokens: list[int]
    seconds: float
    """From the first token, after the prompt was read, to the last."""
    state_bytes: int | None
    """Size of the model's state; None if it is a KV cache, which grows."""

    @property
    def tokens_per_second(self) -> float | None:
        """Speed, not counting the prompt; None if there is but one token."""
        n = len(self.tokens) - 1
        return n / self.seconds if n > 0 and self.seconds > 0 else None


def generate(config: GenerateConfig, write: Write | None = None) -> Written:
    """Write as the config says, passing text to `write` as soon as a token completes it."""
    if is_export(config.run):
        return _with_export(config, write)
    from leap.tasks.lm.generate import write_on
    from leap.tasks.lm.model import load_model

    return write_on(*load_model(config.run), config, write)


def _with_export(config: GenerateConfig, write: Write | None) -> Written:
    writer = Writer(config.run)
    past = None
    if config.state is not None:
        if config.state.exists():
            past = writer.load(config.state)
            if not past.unread and not config.prompt:
                raise FileError(f"{config.state} does not say how its text goes on; give a prompt")
        check_folder_of(config.state)
    found = writer.generate(
        config.prompt,
        tokens=config.tokens,
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        seed=config.seed,
        past_end=config.past_end,
        past=past,
        write=write,
    )
    if config.state is not None:
        writer.save(config.state, found.past)
    return Written(found.text, found.tokens, found.seconds, found.past.n_bytes)


def check_folder_of(state: Path) -> None:
    """Refuse a state file that could not be written in the end."""
    if not state.parent.is_dir():
        raise FileError(f"no folder {state.parent} to keep the state in; make it first")
