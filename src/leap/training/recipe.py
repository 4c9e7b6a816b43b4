"""How to train: the settings that every task has in common."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from leap.errors import ConfigError, check_seed

DEFAULT_STEPS = 2000

DeviceName = Literal["cpu", "cuda", "mps"]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Steps, batches, the learning rate, and how often to evaluate."""

    steps: int | None = None
    """Optimiser steps; 2000 unless epochs are given."""
    epochs: float | None = None
    """Epochs over the training text, in place of steps; by default steps count."""
    batch: int = 8
    """Sequences in each step, over all processes and accumulated parts together."""
    accumulate: int = 1
    """Parts each batch is computed in: less memory, the same result."""
    learning_rate: float = 1e-3
    """Peak learning rate of AdamW."""
    schedule: Literal["linear", "cosine", "constant"] = "cosine"
    """Learning-rate schedule after the warm-up."""
    warmup: float = 0.05
    """Share of the steps in which the learning rate rises to its peak; above 1, their number."""
    weight_decay: float = 0.0
    """Weight decay of AdamW."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW betas."""
    epsilon: float = 1e-8
    """AdamW epsilon."""
    clip: float = 1.0
    """Gradient clipping: the largest norm of the gradient."""
    bf16: bool = False
    """Compute in bfloat16 where that is safe."""
    device: DeviceName | None = None
    """Where to compute: cpu, cuda or mps; by default a GPU if there is one."""
    seed: int = 0
    """Random seed of the weights and of the order of the data."""
    evaluate_every: int = 200
    """Steps between evaluations on held-out text, each with a checkpoint to resume from."""
    log_every: int = 10
    """Steps between points of the learning curve."""
    average: int = 1
    """Checkpoint averaging: how many of the last ones; their mean is taken if it does best."""

    def __post_init__(self) -> None:
        if self.steps is not None and self.epochs is not None:
            raise ConfigError(f"steps={self.steps} and epochs={self.epochs}: give one of them")
        for name in ("steps", "epochs", "batch", "accumulate", "learning_rate", "clip", "epsilon"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"{name}={value} must be more than 0")
        for name in ("evaluate_every", "log_every", "average"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be 1 or more")
        if self.batch % self.accumulate:
            raise ConfigError(
                f"batch={self.batch} does not divide into accumulate={self.accumulate} parts"
            )
        if self.evaluate_every % self.log_every:
            # A checkpoint between two points of the curve would give another curve when resumed.
            raise ConfigError(
                f"evaluate_every={self.evaluate_every} is no multiple of "
                f"log_every={self.log_every}; make it one"
            )
        if not 0 <= self.warmup < math.inf or (self.warmup > 1 and self.warmup % 1):
            raise ConfigError(
                f"warmup={self.warmup} is a share of the steps, from 0 to 1, or a whole number "
                "of them"
            )
        if not 0 <= self.weight_decay < math.inf:
            raise ConfigError(f"weight_decay={self.weight_decay} must be 0 or more")
        check_seed(self.seed)
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(f"betas={self.betas} must be from 0 to less than 1")

    def n_steps(self, n_items: int) -> int:
        """Optimiser steps over `n_items` sequences."""
        if self.epochs is None:
            return DEFAULT_STEPS if self.steps is None else self.steps
        return max(1, math.ceil(self.epochs * n_items / self.batch))

    def extends(self, settings: Mapping[str, Any]) -> bool:
        """Whether this takes more steps, or more epochs, than a recipe with those settings."""
        steps, epochs = settings.get("steps"), settings.get("epochs")
        if self.epochs is not None:
            return isinstance(epochs, int | float) and epochs < self.epochs
        if epochs is not None or not (steps is None or isinstance(steps, int)):
            return False
        return (replace(self, steps=None).n_steps(0) if steps is None else steps) < self.n_steps(0)

    def n_warmup(self, n_steps: int) -> int:
        """Steps of the warm-up, of `n_steps` in all."""
        return int(self.warmup) if self.warmup > 1 else round(self.warmup * n_steps)
