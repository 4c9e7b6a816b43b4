"""Files that are written whole or not at all, and JSON that is read or refused in one line."""

import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from leap.errors import FileError

DPI = 150


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise FileError(f"cannot read {path} ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise FileError(f"{path} is not a whole JSON file ({error}); remove it") from error
    if not isinstance(found, dict):
        raise FileError(f"{path} holds no JSON object; it is of another kind than was expected")
    return found


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON file whole or not at all."""
    write_whole(path, json.dumps(value, indent=1, default=str) + "\n")


def write_whole(path: Path, text: str) -> None:
    """Write a text file whole or not at all."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.{time.monotonic_ns()}.part")
    try:
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def write_report(folder: Path, files: Mapping[str, Any]) -> list[Path]:
    """Write the files of a report, and tell where they are.

    Args:
        folder: where to; it is made if it is not there. Without files it is made ahead, so that
            a wrong one shows before the work is done.
        files: what each holds, by its name: a text, bytes, an object for JSON, a figure for PNG.

    Raises:
        FileError: if the folder cannot be written to.
    """
    with writing_to(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            if isinstance(content, str):
                write_whole(folder / name, content)
            elif isinstance(content, bytes):
                (folder / name).write_bytes(content)
            elif isinstance(content, Mapping):
                write_json(folder / name, content)
            else:
                content.savefig(folder / name, dpi=DPI)
    return [folder / name for name in files]


@contextmanager
def writing_to(folder: Path) -> Iterator[None]:
    """Name the folder in what goes wrong while it is written to."""
    try:
        yield
    except OSError as error:
        raise FileError(
            f"cannot write to {folder} ({error.strerror or error}); give another output folder"
        ) from error
