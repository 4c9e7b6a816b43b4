"""How often a model is right, and how fast it says so."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from transformers import PreTrainedModel

from leap.tasks.lra.data import Collator
from leap.training import Measure, now


@dataclass(frozen=True)
class Score:
    """Results on one split."""

    accuracy: float
    loss: float
    examples: int
    seconds: float
    """Wall time of the model alone, not of reading the data."""
    cpu_seconds: float
    """This process's CPU time in that, over all its threads."""


def computing(device: torch.device, *, bf16: bool) -> torch.autocast:
    """A context to compute in as training does."""
    return torch.autocast(device.type, torch.bfloat16, enabled=bf16)


def score(
    model: PreTrainedModel,
    data: Dataset[dict[str, Tensor]],
    collate: Collator,
    batch: int,
    *,
    bf16: bool = False,
) -> Score:
    """Look at all of the data once."""
    correct = examples = 0
    loss = wall = cpu = 0.0
    was_training = model.training
    model.eval()
    with torch.inference_mode():
        for items in DataLoader(data, batch_size=batch, collate_fn=collate):
            items = {name: x.to(model.device) for name, x in items.items()}
            start = now(model.device)
            with computing(model.device, bf16=bf16):
                out = model(**items)
            wall, cpu = (
                spent + end - begun
                for spent, end, begun in zip((wall, cpu), now(model.device), start, strict=True)
            )
            n = len(items["labels"])
            correct += int((out.logits.argmax(dim=-1) == items["labels"]).sum())
            loss += n * float(out.loss)
            examples += n
    model.train(was_training)
    return Score(correct / examples, loss / examples, examples, wall, cpu)


def _accuracy(logits: Float[np.ndarray, "n c"], labels: Int[np.ndarray, " n"]) -> float:
    return float((logits.argmax(axis=-1) == labels).mean())


ACCURACY = Measure("accuracy", _accuracy)
