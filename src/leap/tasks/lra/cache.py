"""Prepared data on disk: one folder a task, read without loading it.

    info.json             the task, what it was made from, counts, sizes and checksums
    train.tokens.npy      the tokens of all examples, one after another, in 8 bits
    train.offsets.npy     where each example begins, and last where the last one ends
    train.labels.npy      the class of each example
    train.tokens_b.npy    the second input, in tasks that have two; and its offsets
    valid..., test...     the same

A folder is filled under another name and then renamed, so what is there is whole.
"""

import hashlib
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int, UInt8

from leap.errors import FileError
from leap.reports.files import read_json, write_json, writing_to

SPLITS = ("train", "valid", "test")
INFO = "info.json"


@dataclass(frozen=True)
class Sequences:
    """Sequences of bytes of any length, one after another in one array."""

    tokens: UInt8[np.ndarray, " total"]
    offsets: Int[np.ndarray, " n_plus_1"]

    @classmethod
    def join(cls, sequences: Sequence[bytes] | Sequence[UInt8[np.ndarray, " _"]]) -> "Sequences":
        """Lay sequences one after another."""
        lengths = np.fromiter((len(one) for one in sequences), np.int64, len(sequences))
        whole = b"".join(bytes(one) for one in sequences)
        return cls(np.frombuffer(whole, np.uint8), np.concatenate([[0], lengths.cumsum()]))

    @classmethod
    def rows(cls, table: UInt8[np.ndarray, "n length"]) -> "Sequences":
        """Sequences of one length, given as the rows of a table."""
        n, length = table.shape
        return cls(table.reshape(-1), np.arange(n + 1, dtype=np.int64) * length)

    def part(self, start: int, stop: int) -> "Sequences":
        """Some neighbouring ones."""
        offsets = self.offsets[start : stop + 1]
        return Sequences(self.tokens[offsets[0] : offsets[-1]], offsets - offsets[0])

    @property
    def lengths(self) -> Int[np.ndarray, " n"]:
        """Tokens in each sequence."""
        return np.diff(self.offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> UInt8[np.ndarray, " t"]:
        return self.tokens[self.offsets[index] : self.offsets[index + 1]]


@dataclass(frozen=True)
class Examples:
    """What a split holds: inputs, in tasks on pairs a second one of each, and classes."""

    inputs: Sequences
    labels: UInt8[np.ndarray, " n"]
    inputs_b: Sequences | None = None
    cut: UInt8[np.ndarray, " n"] | None = None
    """How many inputs of each example were longer than the task allows, and lost their end."""

    @classmethod
    def join(cls, parts: "Sequence[Examples]") -> "Examples":
        """All examples of parts that have one input each, of which none was cut."""
        lengths = np.concatenate([part.inputs.lengths for part in parts])
        tokens = np.concatenate([part.inputs.tokens for part in parts])
        inputs = Sequences(tokens, np.concatenate([[0], lengths.cumsum()]))
        return cls(inputs, np.concatenate([part.labels for part in parts]))

    def part(self, start: int, stop: int) -> "Examples":
        """Some neighbouring ones."""
        return Examples(
            self.inputs.part(start, stop),
            self.labels[start:stop],
            None if self.inputs_b is None else self.inputs_b.part(start, stop),
            None if self.cut is None else self.cut[start:stop],
        )

    def __len__(self) -> int:
        return len(self.labels)


class Collector:
    """Gathers examples one by one, cutting off and counting what is longer than `max_length`."""

    def __init__(self, max_length: int) -> None:
        self.max_length = max_length
        self.inputs: list[list[bytes]] = []
        self.labels: list[int] = []
        self.cut: list[int] = []

    def add(self, label: int, *inputs: bytes) -> None:
        """Take an example of one input or of two."""
        self.inputs.append([one[: self.max_length] for one in inputs])
        self.labels.append(label)
        self.cut.append(sum(len(one) > self.max_length for one in inputs))

    def examples(self, order: Sequence[int] | None = None) -> Examples:
        """All that were added, in this order or in the one they came in."""
        order = range(len(self.labels)) if order is None else order
        first, *second = (
            Sequences.join(part) for part in zip(*(self.inputs[i] for i in order), strict=True)
        )
        return Examples(
            first,
            np.array([self.labels[i] for i in order], np.uint8),
            second[0] if second else None,
            np.array([self.cut[i] for i in order], np.uint8),
        )

    def __len__(self) -> int:
        return len(self.labels)


def write(folder: Path, splits: Mapping[str, Examples], facts: Mapping[str, Any]) -> None:
    """Write a task's data. The folder appears when all of it is written, in place of an old one.

    Args:
        folder: to make.
        splits: train, valid and test.
        facts: for `info.json`, besides the counts, sizes and checksums.
    """
    unfinished = folder.with_name(f".{folder.name}.part")
    with writing_to(folder):
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        for split, examples in splits.items():
            _write_sequences(unfinished, split, "", examples.inputs)
            if examples.inputs_b is not None:
                _write_sequences(unfinished, split, "_b", examples.inputs_b)
            np.save(unfinished / f"{split}.labels.npy", examples.labels)
        counts = {split: _count(examples) for split, examples in splits.items()}
        files = {path.name: _describe(path) for path in sorted(unfinished.iterdir())}
        write_json(unfinished / INFO, {**facts, "splits": counts, "files": files})
        shutil.rmtree(folder, ignore_errors=True)
        unfinished.rename(folder)


def read_info(folder: Path) -> dict[str, Any]:
    """What `info.json` says, once every file is found to have the size it was written with."""
    info = read_json(folder / INFO)
    try:
        sizes = {name: file["bytes"] for name, file in info["files"].items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise _broken(folder / INFO, "lists no files") from error
    for name, size in sizes.items():
        path = folder / name
        found = path.stat().st_size if path.is_file() else 0
        if found != size:
            raise _broken(path, f"has {found:,} of {size:,} bytes")
    return info


def verify(folder: Path) -> None:
    """Read every file and compare its checksum; the first that is off is named by the error."""
    for name, file in read_info(folder)["files"].items():
        if _describe(folder / name)["sha256"] != file["sha256"]:
            raise _broken(folder / name, "is not what was written, by its checksum")


def read(folder: Path, split: str) -> Examples:
    """A split, memory-mapped: only what is looked at is ever loaded."""
    info = read_info(folder)
    paired = f"{split}.tokens_b.npy" in info["files"]
    inputs = _read_sequences(folder, split, "")
    inputs_b = _read_sequences(folder, split, "_b") if paired else None
    labels = _read_array(folder / f"{split}.labels.npy", np.uint8)
    for part in filter(None, (inputs, inputs_b)):
        if len(part) != len(labels):
            path = folder / f"{split}.labels.npy"
            raise _broken(path, f"has {len(labels)} labels for {len(part)} examples")
    return Examples(inputs, labels, inputs_b)


def _write_sequences(folder: Path, split: str, which: str, sequences: Sequences) -> None:
    np.save(folder / f"{split}.tokens{which}.npy", sequences.tokens)
    np.save(folder / f"{split}.offsets{which}.npy", sequences.offsets)


def _read_sequences(folder: Path, split: str, which: str) -> Sequences:
    tokens = _read_array(folder / f"{split}.tokens{which}.npy", np.uint8)
    offsets = _read_array(folder / f"{split}.offsets{which}.npy", np.int64)
    if offsets[-1] != len(tokens):
        raise _broken(folder / f"{split}.offsets{which}.npy", "does not fit the tokens")
    return Sequences(tokens, offsets)


def _read_array(path: Path, kind: type) -> np.ndarray:
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise _broken(path, "cannot be read") from error
    if array.dtype != kind or array.ndim != 1:
        raise _broken(path, f"holds {array.dtype} of shape {list(array.shape)}")
    return array


def _count(examples: Examples) -> dict[str, Any]:
    parts: Iterable[Sequences] = filter(None, (examples.inputs, examples.inputs_b))
    lengths = np.concatenate([part.lengths for part in parts])
    return {
        "examples": len(examples),
        "of_each_class": np.bincount(examples.labels).tolist(),
        "tokens": int(lengths.sum()),
        "shortest": int(lengths.min()),
        "longest": int(lengths.max()),
        "cut": 0 if examples.cut is None else int(examples.cut.sum()),
    }


def _describe(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
    return {"bytes": path.stat().st_size, "sha256": digest.hexdigest()}


def _broken(path: Path, what: str) -> FileError:
    return FileError(f"{path} {what}; remove {path.parent} and make it again: leap lra prepare")
