"""A translation that came without sentences, cut into those of its references.

Words of the translation and of the references are aligned so that those which face each other are
as like as can be in all: by the characters they share, |A and B| / |A or B|, with nothing lost for
a word that faces none. A word then belongs to the sentence of the reference word it faces. One that
faces none goes to the sentence before it, unless it, or one before it in the same gap, is more like
the next reference word than like the last.

This is SoftSegmenter ("Better Late Than Never: Evaluation of Latency Metrics for Simultaneous
Speech-to-Text Translation", Polák et al., 2025, arXiv 2509.17349). OmniSTEval has it in plain
Python, and tests find both equal; but it takes 50 times as long for a stream of 1,000 words, and
gigabytes of lists for one of 12,000, so the alignment here stays.
"""

import unicodedata
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int

from leap.errors import InputError

MARKS = frozenset(".!?,;:-()。—ー")
"""A mark on its own faces only marks; wide ones are made narrow."""
SKIP, FACE = 1, 2
"""A reference word faces none, or faces a word; otherwise a word faces none."""
MOST = 2**31
"""Pairs of words that are still aligned, in some two gigabytes."""


def resegment(words: Sequence[str], references: Sequence[str]) -> list[int]:
    """To which of the references each word belongs.

    Args:
        words: of the translation.
        references: sentences, one or more of them with words.
    """
    of_sentence = [(word, i) for i, text in enumerate(references) for word in text.split()]
    check_size(len(words), len(of_sentence))
    if not words:
        return []
    expected = [word for word, _ in of_sentence]
    scores, rows, columns = _likeness(expected, words)
    faced = _align(scores, rows, columns)
    found = []
    prefers_next = False
    for j, (last, i) in enumerate(faced):
        if i is not None:
            prefers_next = False
            found.append(of_sentence[i][1])
            continue
        following = last + 1
        if j and faced[j - 1] != (last, None):
            prefers_next = False  # Another gap.
        if last < 0:
            prefers_next = True
        elif following < len(expected):
            row = scores[:, columns[j]]
            prefers_next = prefers_next or bool(row[rows[following]] > row[rows[last]])
        found.append(of_sentence[following if prefers_next else last][1])
    return found


def check_size(n_words: int, n_expected: int) -> None:
    """Raises InputError if this number of words cannot be aligned to that of the references."""
    if not n_expected:
        raise InputError("the references have no words, so that nothing can be aligned to them")
    if n_words * n_expected > MOST:
        raise InputError(
            f"{n_words} words are too many to be aligned to {n_expected}; make shorter streams"
        )


def _likeness(
    expected: Sequence[str], words: Sequence[str]
) -> tuple[Float[np.ndarray, "a b"], Int[np.ndarray, " n"], Int[np.ndarray, " m"]]:
    """How like words are, as a table of the different ones, and where each word is in it."""
    kinds, rows = _different(expected)
    others, columns = _different(words)
    letters = {letter: i for i, letter in enumerate(sorted(set("".join(kinds + others))))}

    def spelling(texts: list[str]) -> Float[np.ndarray, "_ letters"]:
        table = np.zeros((len(texts), len(letters)))
        for i, text in enumerate(texts):
            table[i, [letters[letter] for letter in text]] = 1
        return table

    ours, theirs = spelling(kinds), spelling(others)
    common = ours @ theirs.T
    either = ours.sum(axis=1)[:, None] + theirs.sum(axis=1) - common
    scores = common / np.maximum(either, 1)
    is_mark = [np.array([text in MARKS for text in texts]) for texts in (kinds, others)]
    scores[is_mark[0][:, None] != is_mark[1]] = -np.inf
    return scores, rows, columns


def _align(
    scores: Float[np.ndarray, "a b"], rows: Int[np.ndarray, " n"], columns: Int[np.ndarray, " m"]
) -> list[tuple[int, int | None]]:
    """Of each word, the last reference word up to there, and the one it faces, if it does.

    best[i, j] = max(best[i-1, j-1] + score, best[i-1, j], best[i, j-1]), the first of those that
    are equal; the last of them is a running maximum, so that a row is computed at once.
    """
    n, m = len(rows), len(columns)
    moves = np.zeros((n + 1, m + 1), dtype=np.uint8)
    best = np.zeros(m + 1)
    for i, row in enumerate(rows, start=1):
        facing = best[:-1] + scores[row, columns]
        new = np.zeros(m + 1)
        np.maximum.accumulate(np.maximum(facing, best[1:]), out=new[1:])
        new = np.maximum(new, 0)
        moves[i, 1:] = np.where(facing >= new[1:], FACE, SKIP * (best[1:] >= new[1:]))
        best = new
    found: list[tuple[int, int | None]] = []
    i, j = n, m
    while j:
        if moves[i, j] == FACE:
            i, j = i - 1, j - 1
            found.append((i, i))
        elif moves[i, j] == SKIP:
            i -= 1
        else:
            j -= 1
            found.append((i - 1, None))
    return found[::-1]


def _different(words: Sequence[str]) -> tuple[list[str], Int[np.ndarray, " words"]]:
    """The different words, in small letters, and which of them each word is."""
    places: dict[str, int] = {}
    plain = [unicodedata.normalize("NFKC", word).lower() for word in words]
    which = [places.setdefault(word, len(places)) for word in plain]
    return list(places), np.array(which)
