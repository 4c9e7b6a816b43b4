"""Files as every task reads them: where data sets lie, text and weights, or why they are none."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from leap.errors import FileError, first_line
from leap.runtime.manifest import is_export

SECONDS_TO_REACH = 5.0
"""How long to wait for an answer of Hugging Face's hub."""


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
    """Refuse an export, or the folder of a comparison, where one run is wanted."""
    if is_export(path):
        raise FileError(f"{path} holds an exported model; give the run that it was made of")
    inside = sorted(found.parent.name for found in path.glob("*/checkpoints"))
    if inside and not any((path / name).exists() for name in ("model", "data.json")):
        raise FileError(f"{path} is no run, but holds some ({', '.join(inside)}); give one of them")


@contextmanager
def offline_unless_reached(datasets: Any) -> Iterator[None]:
    """Keep the datasets library from trying again and again where there is no network.

    What it has on disk from before it finds all the same.
    """
    from huggingface_hub import constants, get_session

    before = constants.HF_HUB_OFFLINE
    try:
        if not before:
            get_session().head(constants.ENDPOINT, timeout=SECONDS_TO_REACH)
        is_reached = True
    except Exception:  # That of whichever library it uses.
        is_reached = False
    constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = before or not is_reached
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = before


@contextmanager
def reading_model(folder: Path) -> Iterator[None]:
    """Name the folder in whatever goes wrong while a model is made of its files and first used.

    A config that was changed by hand, or is another program's, can go wrong anywhere.
    """
    try:
        yield
    except FileError:
        raise
    except Exception as error:
        raise FileError(
            f"no model can be read from {folder} ({first_line(error)}); put its own files back"
        ) from error


def check_logits(logits: torch.Tensor) -> None:
    """Refuse a model that gives no numbers, while it is read: its config may see to that."""
    if not bool(logits.isfinite().all()):
        raise ValueError("what it gives is not finite")


def check_weights(model: torch.nn.Module, loaded: Mapping[str, Any], folder: Path) -> None:
    """Refuse weights that are no numbers, or that `from_pretrained` could not place.

    Args:
        model: as it was loaded.
        loaded: what `from_pretrained` tells with `output_loading_info`; what is missing would be
            drawn at random.
        folder: where they come from.
    """
    for keys, fault in (("missing_keys", "is missing"), ("unexpected_keys", "is not its own")):
        if loaded[keys]:
            raise FileError(
                f"the weights in {folder} are of another model than its config.json "
                f"({min(loaded[keys])} {fault}); put its own back"
            )
    for name, weight in model.named_parameters():
        if not bool(weight.isfinite().all()):
            raise FileError(
                f"the weights in {folder} hold NaN or infinite numbers ({name}); put others there"
            )
