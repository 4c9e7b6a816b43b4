"""Image: which of ten things is in a picture, read pixel by pixel? CIFAR-10 in grey.

Black is a shade like any other: no pixel is a pad.
"""

import pickle
import tarfile
from collections.abc import Callable, Iterator, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int, UInt8
from numpy._core.multiarray import _reconstruct
from PIL import Image

from leap.errors import FileError, first_line
from leap.tasks.lra.cache import Examples, Sequences
from leap.tasks.lra.sources import UNREADABLE, broken, from_library, read_lines

HUB = "uoft-cs/cifar10"
BATCHES = {"train": tuple(f"data_batch_{i}" for i in range(1, 6)), "test": ("test_batch",)}
SAMPLE = {"train": "train_batch_1", "test": "test"}
IN_A_BATCH = 10_000
SIDE = 32
PIXELS = SIDE * SIDE
GREY = (0.2989, 0.587, 0.114)
"""Weights of red, green and blue."""

Pictures = tuple[UInt8[np.ndarray, "n pixels"], list[int]]
"""Grey pictures and their classes."""


def read(source: Path | None) -> dict[str, Examples]:
    """Read the pictures to train on and to test on.

    Args:
        source: the binary or the Python version of CIFAR-10, as archive or unpacked; a folder with
            the grey sample; or None for the datasets library.
    """
    if source is None:
        instead = "give cifar-10-binary.tar.gz as source"
        parts = _from_library(from_library(HUB, instead))
    elif (source / f"{SAMPLE['train']}.png").is_file():
        parts = {part: _sheet(source, name) for part, name in SAMPLE.items()}
    else:
        parts = _from_batches(source)
    return {
        part: Examples(Sequences.rows(pixels), np.array(labels, np.uint8))
        for part, (pixels, labels) in parts.items()
    }


def to_grey(planes: UInt8[np.ndarray, "n 3 pixels"]) -> UInt8[np.ndarray, "n pixels"]:
    """Shades of grey, as TensorFlow computes them."""
    return (np.einsum("c,ncp->np", GREY, planes) * (255.5 / 255)).astype(np.uint8)


def _from_library(parts: Mapping[str, Any]) -> dict[str, Pictures]:
    found = {}
    for part in BATCHES:
        rows = parts[part]
        planes = np.stack([np.asarray(picture).reshape(PIXELS, 3).T for picture in rows["img"]])
        found[part] = to_grey(planes), list(rows["label"])
    return found


def _from_batches(source: Path) -> dict[str, Pictures]:
    wanted = {name: part for part, names in BATCHES.items() for name in names}
    found: dict[str, tuple[UInt8[np.ndarray, "n pixels"], list[int]]] = {}
    for name, path, content in _files(source):
        stem = name.removesuffix(".bin")
        if stem in wanted:
            planes, labels = (_binary if name != stem else _pickled)(path, content)
            if len(labels) != IN_A_BATCH or len(planes) != IN_A_BATCH or max(labels) > 9:
                raise broken(path, f"it must hold {IN_A_BATCH:,} pictures of ten classes")
            found[stem] = to_grey(planes), labels
    missing = [name for name in wanted if name not in found]
    if missing:
        raise FileError(
            f"{source} holds no {missing[0]}; give the folder or the archive of CIFAR-10, "
            "binary or Python version"
        )
    return {
        part: (
            np.concatenate([found[name][0] for name in names]),
            [label for name in names for label in found[name][1]],
        )
        for part, names in BATCHES.items()
    }


def _files(source: Path) -> Iterator[tuple[str, Path, bytes]]:
    """Name, path and content of each file in a folder or an archive, which stays packed."""
    try:
        if source.is_dir():
            for path in sorted(source.iterdir()):
                if path.is_file():
                    yield path.name, path, path.read_bytes()
            return
        with tarfile.open(source) as archive:
            for member in archive:
                file = archive.extractfile(member) if member.isfile() else None
                if file is not None:
                    path = source / member.name
                    yield path.name, path, file.read()
    except (tarfile.TarError, *UNREADABLE) as error:
        raise broken(source, first_line(error)) from error
    except OSError as error:
        raise FileError(f"cannot read {source} ({error.strerror or first_line(error)})") from error


def _binary(path: Path, content: bytes) -> tuple[UInt8[np.ndarray, "n 3 pixels"], list[int]]:
    """A class and three planes of colour, picture after picture."""
    size = 1 + 3 * PIXELS
    if len(content) != size * IN_A_BATCH:
        raise broken(path, f"it has {len(content):,} of {size * IN_A_BATCH:,} bytes")
    rows = np.frombuffer(content, np.uint8).reshape(-1, size)
    return rows[:, 1:].reshape(-1, 3, PIXELS), rows[:, 0].tolist()


def _pickled(path: Path, content: bytes) -> tuple[UInt8[np.ndarray, "n 3 pixels"], list[int]]:
    try:
        batch = _ArraysOnly(BytesIO(content), encoding="bytes").load()
        planes, labels = np.asarray(batch[b"data"]), [int(label) for label in batch[b"labels"]]
        if planes.dtype != np.uint8:
            raise ValueError(f"its pictures are of {planes.dtype}")
        return planes.reshape(-1, 3, PIXELS), labels
    except Exception as error:
        raise broken(path, first_line(error)) from error


class _ArraysOnly(pickle.Unpickler):
    """Reads lists, dictionaries, strings, numbers and arrays, and refuses to make anything else."""

    def find_class(self, module: str, name: str) -> Callable[..., Any]:
        allowed: dict[str, Callable[..., Any]] = {
            "numpy.core.multiarray._reconstruct": _reconstruct,
            "numpy._core.multiarray._reconstruct": _reconstruct,
            "numpy.ndarray": np.ndarray,
            "numpy.dtype": np.dtype,
        }
        try:
            return allowed[f"{module}.{name}"]
        except KeyError:
            raise pickle.UnpicklingError(
                f"it asks for {module}.{name}, which pictures do not need"
            ) from None


def _sheet(folder: Path, name: str) -> Pictures:
    """A PNG of pictures in rows and columns, and a text file with a class a line."""
    path = folder / f"{name}.png"
    labels_path = folder / f"{name}.labels.txt"
    pixels = read_sheet(path)
    try:
        labels = [range(10).index(int(line)) for line in read_lines(labels_path)]
    except ValueError as error:
        raise broken(labels_path, "a line is no class") from error
    if len(labels) != len(pixels):
        raise broken(labels_path, f"it has {len(labels):,} classes for {len(pixels):,} pictures")
    return pixels, labels


def read_sheet(path: Path) -> UInt8[np.ndarray, "n pixels"]:
    """Grey pictures of 32 x 32 pixels that stand in rows and columns on one big one."""
    try:
        with Image.open(path) as image:
            sheet: Int[np.ndarray, "h w"] = np.asarray(image.convert("L"))
    except (OSError, SyntaxError, ValueError) as error:
        raise broken(path, first_line(error)) from error
    rows, columns = (size // SIDE for size in sheet.shape)
    tiles = sheet[: rows * SIDE, : columns * SIDE].reshape(rows, SIDE, columns, SIDE)
    return tiles.swapaxes(1, 2).reshape(-1, PIXELS)
