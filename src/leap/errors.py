"""What can go wrong that the caller can put right: one sentence, saying what would work."""

import re
from collections.abc import Collection
from dataclasses import fields
from errno import EDQUOT, EFBIG, ENOSPC
from typing import Any

NO_MEMORY = (
    "can't allocate memory",
    "not enough memory",
    "out of memory",
    "bad_alloc",
    "Invalid buffer size",
    "Storage size calculation overflowed",
)
"""What torch's errors say when there is no memory for a tensor."""
NO_ROOM = ("PytorchStreamWriter failed writing", "file write failed")
"""What torch's errors say when a disk is full."""


class LeapError(Exception):
    """Base of every error this package raises on purpose; the command line shows it as one line."""


class ConfigError(LeapError, ValueError):
    """A setting that does not fit: an unknown mechanism, widths that do not divide, ..."""


class InputError(LeapError, ValueError):
    """A tensor that does not fit the call: its shape, dtype or values."""


class FileError(LeapError, ValueError):
    """A file that is missing, broken or of another kind than was asked for."""


class TrainingError(LeapError, ArithmeticError):
    """A training that has come to nothing: its loss is no longer a number."""


def lacking(error: Exception) -> str | None:
    """What the machine or its files lack, in one line; None if that is not what is wrong."""
    said = str(error)
    first = (said.strip() or type(error).__name__).splitlines()[0]
    if isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(sign in said for sign in NO_MEMORY)
    ):
        return (
            f"there is not enough memory ({first}); give a smaller batch, shorter sequences or a "
            "smaller model"
        )
    number = error.errno if isinstance(error, OSError) else None
    if in_rust := re.search(r"\(os error (\d+)\)", said):  # Of safetensors and tokenizers.
        number = int(in_rust[1])
    if number in (ENOSPC, EDQUOT, EFBIG) or any(sign in said for sign in NO_ROOM):
        return (
            f"there is no room to write ({first}); make some, and give the same command again: "
            "what was written before is whole"
        )
    return None if number is None else first


def check_seed(seed: int | None) -> None:
    """Refuse a random seed that NumPy's generators do not take; torch's take more."""
    if seed is not None and not 0 <= seed < 2**32:
        raise ConfigError(f"seed={seed} must be from 0 to {2**32 - 1}")


def refuse_given(config: Any, names: Collection[str], reason: str) -> None:
    """Refuse settings that would be ignored, where they are given: other than by default.

    Args:
        config: a dataclass of settings.
        names: of those that this run has no use for.
        reason: what goes on after "name=value is", as "of translation".
    """
    for field in fields(config):
        value = getattr(config, field.name)
        if field.name in names and value != field.default:
            raise ConfigError(f"{field.name}={value} is {reason}; leave it out")


def first_line(error: BaseException) -> str:
    """What another library's error says, short enough for ours."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
