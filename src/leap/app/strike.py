"""What striking words out does to the prediction of a language model that can only be read."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from leap.serve.protocol import Model
from leap.serve.sampling import log_probabilities

ROWS = 16
"""Rows that are read at once."""


def predictions(
    reader: Model, tokens: Sequence[int], without: Sequence[Sequence[int]]
) -> NDArray[np.float64]:
    """Log-probabilities of what follows `[n, vocabulary]`, each time without some of the tokens.

    Args:
        reader: the model.
        tokens: of the text, with those that every text begins with.
        without: places of the tokens to strike out, each time; none for the whole text.
    """
    found = np.zeros((len(without), reader.vocab_size))
    lengths: dict[int, list[int]] = {}
    for i, places in enumerate(without):
        lengths.setdefault(len(tokens) - len(set(places)), []).append(i)
    for rows in lengths.values():
        for start in range(0, len(rows), ROWS):
            part = rows[start : start + ROWS]
            kept = [[x for j, x in enumerate(tokens) if j not in set(without[i])] for i in part]
            begun = reader.join([reader.empty()] * len(part))
            logits, _ = reader.read(kept, begun)
            for i, row in zip(part, logits, strict=True):
                found[i] = log_probabilities(row)
    return found


def words(pieces: Sequence[str]) -> list[list[int]]:
    """Places of the pieces of each word, with the white space before it."""
    found: list[list[int]] = []
    word = ""
    for i, piece in enumerate(pieces):
        is_said = bool(word.strip())
        if not found or (is_said and (piece[:1].isspace() or word[-1].isspace())):
            found.append([])
            word = ""
        found[-1].append(i)
        word += piece
    return found
