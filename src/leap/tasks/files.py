"""Files as every task reads them: where data sets lie, text and weights, or why they are none."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from leap.errors import FileError


def data_folder() -> Path:
    """Where data sets lie: the environment variable LEAP_DATA, or ../shared/data."""
    return Path(os.environ.get("LEAP_DATA", "../shared/data"))


def read_text(path: Path) -> str:
    """A text file as a string, or an error that says why it is none."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise FileError(f"cannot read {path} ({error.strerror})") from error
    if not content.strip():
        raise FileError(f"{path} is empty; give a file with text in it")
    if b"\0" in content:
        raise FileError(f"{path} is a binary file; give one with text in UTF-8")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise FileError(
            f"{path} is not text in UTF-8 (byte {error.start}); convert it, for instance with iconv"
        ) from error


def check_one_run(path: Path) -> None:
    """Refuse the folder of a comparison, which holds run folders, where one run is wanted."""
    inside = sorted(found.parent.name for found in path.glob("*/data.json"))
    if inside and not (path / "model").exists():
        raise FileError(f"{path} holds several runs ({', '.join(inside)}); give one of them")


def first_line(error: BaseException) -> str:
    """What another library's error says, short enough for ours."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def check_weights(loaded: Mapping[str, Any], folder: Path) -> None:
    """Refuse weights that `from_pretrained` could not place: they would be drawn at random.

    Args:
        loaded: what it tells with `output_loading_info`.
        folder: where they come from.
    """
    for keys, fault in (("missing_keys", "is missing"), ("unexpected_keys", "is not its own")):
        if loaded[keys]:
            raise FileError(
                f"the weights in {folder} are of another model than its config.json "
                f"({min(loaded[keys])} {fault}); put its own back"
            )
