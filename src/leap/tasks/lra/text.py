"""Text: is a film review, read byte by byte, for or against the film? IMDb, Maas et al. (2011)."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from leap.errors import FileError
from leap.tasks.lra.cache import Collector, Examples
from leap.tasks.lra.sources import broken, check_count, from_library, read_lines

HUB = "stanfordnlp/imdb"
PARTS = ("train", "test")
ARCHIVE = "aclImdb"
"""The folder in the original archive."""
IN_A_FOLDER = 12_500
"""Reviews of each class in either part of it."""


def read(source: Path | None, max_length: int, seed: int) -> dict[str, Examples]:
    """Read the reviews to train on and to test on, each in an order drawn from `seed`.

    Args:
        source: a folder with `train.jsonl.xz` and `test.jsonl.xz`, or with `train/pos`,
            `train/neg`, `test/pos` and `test/neg` as in the original archive; or None for the
            datasets library.
        max_length: bytes that are read of a review.
        seed: of the order.
    """
    library: Any = None if source else from_library(HUB, "give an aclImdb folder as source")
    chance = np.random.default_rng(seed)
    parts = {}
    for part in PARTS:
        found = Collector(max_length)
        if source is None:
            reviews = zip(library[part]["text"], library[part]["label"], strict=True)
            for text, label in reviews:
                found.add(label, text.encode())
        elif (source / part).is_dir():
            _read_folder(source / part, found)
        else:
            _read_jsonl(source, part, found)
        parts[part] = found.examples(chance.permutation(len(found)).tolist())
    return parts


def _read_folder(folder: Path, found: Collector) -> None:
    for label, name in enumerate(("neg", "pos")):
        paths = sorted((folder / name).glob("*.txt"))
        if not paths:
            raise FileError(f"no reviews in {folder / name}; unpack the archive of IMDb again")
        check_count(folder / name, len(paths), IN_A_FOLDER, ARCHIVE)
        for path in paths:
            content = b"\n".join(read_lines(path))
            if not content:
                raise broken(path, "it is empty")
            found.add(label, content)


def _read_jsonl(folder: Path, part: str, found: Collector) -> None:
    paths = [folder / f"{part}{ending}" for ending in (".jsonl.xz", ".jsonl")]
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        raise FileError(f"no reviews in {folder}: neither {part}/pos nor {paths[0].name} is there")
    for i, line in enumerate(read_lines(path)):
        try:
            review = json.loads(line)
            found.add((0, 1).index(review["label"]), review["text"].encode())
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise broken(path, f"line {i + 1} is no review") from error
    if not found:
        raise broken(path, "it is empty")
