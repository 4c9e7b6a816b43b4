"""Retrieval: does one of two texts belong to the other, as far as their bytes tell?

In Long Range Arena these are papers of the ACL Anthology Network, and they belong together if one
cites the other. Those texts may not be passed on, so there is a stand-in for who has not got them:
two passages of WikiText-2, of one article or of two. Its results are not to be compared with those
of the papers.
"""

import re
from pathlib import Path

import numpy as np

from leap.errors import ConfigError, FileError
from leap.tasks.files import read_text
from leap.tasks.lra.cache import SPLITS, Collector, Examples
from leap.tasks.lra.sources import broken, find_file, read_table

FILES = {
    split: f"new_aan_pairs.{name}.tsv"
    for split, name in zip(SPLITS, ("train", "eval", "test"), strict=True)
}
"""Names of the files in Long Range Arena's release."""
LABELS = {b"0": 0, b"0.0": 0, b"1": 1, b"1.0": 1}
HEADING = re.compile(r"^ = [^=\n]+ = *\n", re.MULTILINE)
"""The title of an article; those of its sections have more signs."""


def read(source: Path | None, max_length: int) -> dict[str, Examples]:
    """Read the pairs of papers.

    Args:
        source: the folder they are in, or one above it.
        max_length: bytes that are read of each text.
    """
    if source is None:
        raise FileError(
            f"no pairs of papers: give the folder with {FILES['train']} as source, or make the "
            "task retrieval-standin"
        )
    return {
        split: _read_pairs(find_file(source, name), max_length) for split, name in FILES.items()
    }


def _read_pairs(path: Path, max_length: int) -> Examples:
    """Columns are the class, the names of two papers and their texts; nothing is quoted."""
    found = Collector(max_length)
    for i, line in enumerate(read_table(path)):
        columns = line.split(b"\t")
        if len(columns) != 5 or columns[0] not in LABELS or not (columns[3] and columns[4]):
            raise broken(path, f"line {i + 1} is no class with two names and two texts")
        found.add(LABELS[columns[0]], columns[3], columns[4])
    if not found:
        raise broken(path, "it is empty")
    return found.examples()


def make_standin(
    source: Path | None, sizes: dict[str, int], max_length: int, seed: int
) -> dict[str, Examples]:
    """Pair up passages of WikiText-2: half of the pairs, class 1, are from one article.

    Args:
        source: the folder of `train.txt`, `valid.txt` and `test.txt`.
        sizes: pairs to make of each of the three.
        max_length: bytes of a passage.
        seed: of the choice.
    """
    if source is None:
        raise FileError("no WikiText-2: give the folder with its train.txt as source")
    return {
        split: _pair_up(
            source / f"{split}.txt", sizes[split], max_length, np.random.default_rng([seed, i])
        )
        for i, split in enumerate(SPLITS)
    }


def _pair_up(path: Path, count: int, max_length: int, chance: np.random.Generator) -> Examples:
    articles = _passages(path, max_length)
    n_passages = np.array([len(article) for article in articles])
    together = int((n_passages * (n_passages - 1)).sum())
    apart = int(n_passages.sum() ** 2 - (n_passages**2).sum())
    if min(together, apart) < -(-count // 2):
        raise ConfigError(
            f"{path} has {together:,} pairs of passages of one article and {apart:,} of two, too "
            f"few for {count:,} examples; ask for fewer, or for a smaller max_length"
        )
    weights = n_passages * (n_passages - 1) / together
    chosen: set[tuple[int, int, int, int]] = set()
    found = Collector(max_length)
    for label in chance.permutation(np.arange(count) % 2).tolist():
        while True:
            first = second = int(chance.choice(len(articles), p=weights))
            # Articles are as likely in one class as in the other, or they would tell it.
            while label == 0 and second == first:
                second = int(chance.choice(len(articles), p=weights))
            i, j = (int(chance.integers(n_passages[which])) for which in (first, second))
            pair = (first, i, second, j)
            if (first, i) != (second, j) and pair not in chosen:
                break
        chosen.add(pair)
        found.add(label, articles[first][i], articles[second][j])
    return found.examples()


def _passages(path: Path, max_length: int) -> list[list[bytes]]:
    """The articles of a file in two or more pieces of `max_length`; what is over is left out."""
    articles = []
    for text in HEADING.split(read_text(path)):
        content = text.encode()
        n = len(content) // max_length
        if n >= 2:
            articles.append([content[i * max_length : (i + 1) * max_length] for i in range(n)])
    return articles
