"""What a language model must do to be served: read tokens into rows, join rows, select rows.

A state is a value with a row for each text. Nothing changes it in place, so one state may go on
in many ways, and keeping it is a snapshot. The engine knows models by this protocol alone.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

Logits = NDArray[np.float32]
"""Of the next token, `[rows, vocabulary]`."""
Spell = Callable[[int], str]
"""Takes one token after another, and gives the text that each one completes."""


@dataclass(frozen=True)
class Kept:
    """A text as far as it was read, to go on from."""

    state: Any
    """Of one row."""
    tail: tuple[int, ...]
    """The last tokens, of which the very last has been written but not read."""
    n_read: int
    """Tokens that the state has read."""


@runtime_checkable
class Model(Protocol):
    """A language model with its tokenizer."""

    name: str
    vocab_size: int
    end: int | None
    """The token that ends a text; None where none does."""
    max_length: int | None
    """Tokens that a text may have; None where there is no limit."""
    is_constant: bool
    """Whether a state keeps its size as it reads."""

    def encode(self, text: str) -> list[int]:
        """Tokens of a text."""

    def begin(self) -> list[int]:
        """Tokens that every new text begins with."""

    def speller(self, prompt: str, read: Sequence[int]) -> Spell:
        """Spells what follows a prompt, of which the last tokens are `read`."""

    def empty(self) -> Any:
        """The state of one row that has read nothing."""

    def read(self, tokens: Sequence[Sequence[int]], state: Any) -> tuple[Logits, Any]:
        """Read one token or more in each row: the logits after the last, and the new state."""

    def join(self, states: Sequence[Any]) -> Any:
        """The rows of all these states as one."""

    def select(self, state: Any, rows: Sequence[int]) -> Any:
        """Some of the rows."""

    def n_bytes(self, state: Any) -> int:
        """Memory that a state takes."""

    def save(self, kept: Kept, path: Path) -> None:
        """Write a text to a file."""

    def load(self, path: Path) -> Kept:
        """Read what `save` wrote."""
