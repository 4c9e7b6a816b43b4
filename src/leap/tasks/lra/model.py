"""The models of the LeaPformer paper's Long Range Arena, and how they are trained there.

Every task has the same encoder: 2 layers of width 64 with 2 heads, feed-forward layers of 128,
learned positions, a classifier of 128 hidden units. The rest is in `PAPER`.
"""

from dataclasses import dataclass
from typing import Any

from leap.models import LeapformerConfig
from leap.tasks.lra.data import TaskInfo


@dataclass(frozen=True, kw_only=True)
class Paper:
    """What the authors' code has for one task."""

    vocab_size: int
    """Embeddings, more than there are tokens."""
    batch: int
    learning_rate: float
    warmup: int
    """Steps."""
    steps: int


PAPER = {
    "listops": Paper(vocab_size=32, batch=32, learning_rate=1e-4, warmup=1000, steps=20_000),
    "text": Paper(vocab_size=512, batch=32, learning_rate=1e-4, warmup=80, steps=20_000),
    "retrieval": Paper(vocab_size=512, batch=16, learning_rate=2e-4, warmup=800, steps=50_000),
    "pathfinder": Paper(vocab_size=512, batch=128, learning_rate=2e-4, warmup=312, steps=50_000),
    "image": Paper(vocab_size=256, batch=256, learning_rate=1e-4, warmup=175, steps=30_000),
}
EPSILON = 1e-6
"""Of AdamW, in all tasks."""


def paper(task: str) -> Paper:
    """What the paper has for a task; a variant, as `pathfinder-easy`, is like the task itself."""
    return PAPER[task.partition("-")[0]]


def encoder_config(info: TaskInfo, attention: str, **changes: Any) -> LeapformerConfig:
    """The paper's model for a task, with some attention.

    Args:
        info: of the task.
        attention: its name in `leap.models.ATTENTIONS`.
        changes: of the config, as `proportion_hidden=8`.
    """
    given: dict[str, Any] = {
        "attention": attention,
        "proportion": "learned",
        "vocab_size": max(info.vocab_size, paper(info.name).vocab_size),
        # As many as the next power of 2.
        "n_positions": 1 << (info.max_length - 1).bit_length(),
        "hidden_size": 64,
        "n_layer": 2,
        "n_head": 2,
        "intermediate_size": 128,
        "classifier_size": 128,
        "num_labels": info.n_classes,
        "two_inputs": info.two_inputs,
        "hidden_dropout_prob": 0.1,
        "pad_token_id": info.pad_id,
    }
    return LeapformerConfig(**given | changes)
