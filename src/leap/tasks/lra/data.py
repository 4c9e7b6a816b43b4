"""The tasks, and their examples as PyTorch wants them.

    valid = load_task("text", "data/lra", "valid")
    batch = Collator(valid.info)([valid[0], valid[1]])

`leap lra prepare` makes what is read here. An example is a dictionary:

    input_ids         [t] its tokens; of one length in tasks without padding
    attention_mask    [t] true: in a batch false at the pads; absent in tasks without padding
    labels            []  its class
    input_ids_b, attention_mask_b    the second text, in tasks on pairs
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.data import Dataset

from leap.errors import ConfigError, FileError
from leap.tasks.lra import cache
from leap.tasks.lra.cache import INFO, SPLITS, Examples

DATA = Path("data/lra")
"""Where prepared data is kept, unless told otherwise."""
INPUTS = ("", "_b")
"""What the names of the first and of the second input end with."""


@dataclass(frozen=True, kw_only=True)
class TaskInfo:
    """What a model has to know of a task."""

    name: str
    vocab_size: int
    """Ids in use, with that of the pad if there is one; the paper's models have more of them."""
    n_classes: int
    max_length: int
    """Tokens of the longest input there can be."""
    pad_id: int | None = 0
    """Id that fills a batch up, and that no token has; None if all inputs are equally long."""
    two_inputs: bool = False
    """Whether an example is a pair of texts."""


TASKS = {
    info.name: info
    for info in (
        TaskInfo(name="listops", vocab_size=16, n_classes=10, max_length=2000),
        TaskInfo(name="listops-intermediate", vocab_size=16, n_classes=10, max_length=500),
        TaskInfo(name="listops-easy", vocab_size=16, n_classes=10, max_length=128),
        TaskInfo(name="text", vocab_size=257, n_classes=2, max_length=4000),
        TaskInfo(name="retrieval", vocab_size=257, n_classes=2, max_length=4000, two_inputs=True),
        TaskInfo(
            name="retrieval-standin", vocab_size=257, n_classes=2, max_length=4000, two_inputs=True
        ),
        TaskInfo(name="image", vocab_size=256, n_classes=10, max_length=1024, pad_id=None),
        TaskInfo(name="pathfinder", vocab_size=256, n_classes=2, max_length=1024, pad_id=None),
        TaskInfo(
            name="pathfinder-intermediate",
            vocab_size=256,
            n_classes=2,
            max_length=1024,
            pad_id=None,
        ),
        TaskInfo(name="pathfinder-easy", vocab_size=256, n_classes=2, max_length=1024, pad_id=None),
    )
}
"""Every task as Long Range Arena has it, and easier levels: it has `listops` and `pathfinder`."""


def load_task(name: str, folder: str | Path = DATA, split: str = "train") -> "TaskDataset":
    """Open a task's examples, as `leap lra prepare` left them.

    Args:
        name: of the task, one of `TASKS`.
        folder: that all tasks are in: what was given to `prepare` as output.
        split: train, valid or test.
    """
    if name not in TASKS:
        raise ConfigError(f"task={name!r} is not known; there are {', '.join(TASKS)}")
    if split not in SPLITS:
        raise ConfigError(f"split={split!r} is not known; there are {', '.join(SPLITS)}")
    if not (Path(folder) / name / INFO).is_file():
        task, _, level = name.rpartition("-")
        if level in ("easy", "intermediate"):
            task += f" --difficulty {level}"
        else:
            task = name
        raise FileError(
            f"no {name} data in {folder}; make it with leap lra prepare --task {task} "
            f"--output {folder}"
        )
    return TaskDataset(Path(folder) / name, split)


class TaskDataset(Dataset[dict[str, Tensor]]):
    """The examples of one split of a task, read from disk as they are asked for.

    Args:
        folder: of the one task.
        split: train, valid or test.
    """

    info: TaskInfo
    """The task, with the lengths that these examples were cut to."""
    facts: dict[str, Any]
    """All that `info.json` tells: where the examples come from, how many there are and were cut."""

    def __init__(self, folder: Path, split: str) -> None:
        self.folder = folder
        self.split = split
        self._open()

    def _open(self) -> None:
        self.facts = cache.read_info(self.folder)
        try:
            self.info = TaskInfo(**self.facts["task"])
        except (KeyError, TypeError) as error:
            raise FileError(
                f"{self.folder / INFO} describes no task; remove {self.folder} and make it again"
            ) from error
        self._examples = cache.read(self.folder, self.split)

    @property
    def examples(self) -> Examples:
        """The arrays on disk. In tasks with padding, a token there is less by 1 than its id."""
        return self._examples

    @property
    def lengths(self) -> Int[np.ndarray, " n"]:
        """Tokens of each example; of a pair, those of the longer text."""
        inputs, second = self._examples.inputs, self._examples.inputs_b
        return inputs.lengths if second is None else np.maximum(inputs.lengths, second.lengths)

    def __len__(self) -> int:
        return len(self._examples)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        item = {}
        parts = (self._examples.inputs, self._examples.inputs_b)
        for name, part in zip(INPUTS, parts, strict=True):
            if part is not None:
                # Pads come first among the ids, and are not on disk.
                ids = torch.from_numpy(part[index].astype("int64"))
                if self.info.pad_id is not None:
                    ids += 1
                    item[f"attention_mask{name}"] = torch.ones_like(ids, dtype=torch.bool)
                item[f"input_ids{name}"] = ids
        item["labels"] = torch.tensor(int(self._examples.labels[index]))
        return item

    def __getstate__(self) -> dict[str, Any]:
        # A process that loads data opens the files itself, rather than be sent what is in them.
        return {"folder": self.folder, "split": self.split}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open()


class Collator:
    """Makes a batch, filling up its inputs to the longest of them.

    Args:
        info: of the task.
        multiple: fill up further, until the length divides by this.
    """

    def __init__(self, info: TaskInfo, multiple: int = 1) -> None:
        if multiple < 1:
            raise ConfigError(f"multiple={multiple} must be 1 or more")
        if info.pad_id is None and info.max_length % multiple:
            raise ConfigError(
                f"multiple={multiple} does not divide the {info.max_length} tokens of "
                f"{info.name}, which has no padding"
            )
        self.info = info
        self.multiple = multiple

    def __call__(self, items: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
        """Join examples, each as a `TaskDataset` gives it, into `[b, t]` and labels `[b]`."""
        batch = {"labels": torch.stack([item["labels"] for item in items])}
        for name in INPUTS[: 1 + self.info.two_inputs]:
            ids = [item[f"input_ids{name}"] for item in items]
            if self.info.pad_id is None:
                batch[f"input_ids{name}"] = torch.stack(ids)
            else:
                masks = [item[f"attention_mask{name}"] for item in items]
                batch[f"input_ids{name}"] = self._fill(ids, self.info.pad_id)
                batch[f"attention_mask{name}"] = self._fill(masks, False)
        return batch

    def _fill(
        self, rows: Sequence[Int[Tensor, " _"] | Bool[Tensor, " _"]], value: int
    ) -> Int[Tensor, "b t"] | Bool[Tensor, "b t"]:
        longest = max(len(row) for row in rows)
        length = -(-longest // self.multiple) * self.multiple
        return torch.stack([pad(row, (0, length - len(row)), value=value) for row in rows])
