"""A toy pair that needs no file: numbers in English words, to be said in German.

    three hundred and forty two, seventeen     dreihundertzweiundvierzig, siebzehn

German says the units before the tens, so one who translates while listening has to wait for them.
"""

import random
from typing import Any

from leap.errors import ConfigError
from leap.extras import install_command
from leap.tasks.simul.corpora.corpus import Corpus, Sentence


def numbers_corpus(
    n_train: int = 10_000,
    n_valid: int = 200,
    n_test: int = 200,
    *,
    largest: int = 999,
    longest: int = 3,
    seed: int = 0,
) -> Corpus:
    """Sentences of a few numbers each, no two of them the same.

    Args:
        n_train, n_valid, n_test: sentences in each part.
        largest: number; the smallest is 0.
        longest: sentence, in numbers.
        seed: the same gives the same sentences.
    """
    sizes = {"train": n_train, "valid": n_valid, "test": n_test}
    wanted = sum(sizes.values())
    possible = sum((largest + 1) ** n for n in range(1, longest + 1))
    if min(sizes.values()) < 1:
        raise ConfigError("every part of the numbers needs one sentence or more")
    if wanted * 2 > possible:
        raise ConfigError(
            f"{wanted} different sentences of {longest} numbers up to {largest} are too many; give "
            "larger or longer ones"
        )
    num2words = _num2words()
    chance = random.Random(seed)
    drawn: dict[tuple[int, ...], None] = {}
    while len(drawn) < wanted:
        count = chance.randint(1, longest)
        drawn[tuple(chance.randint(0, largest) for _ in range(count))] = None
    sentences = [
        Sentence(
            ", ".join(english(n, num2words) for n in numbers),
            ", ".join(num2words(n, lang="de") for n in numbers),
            id="-".join(map(str, numbers)),
        )
        for numbers in drawn
    ]
    parts, start = {}, 0
    for part, size in sizes.items():
        parts[part] = sentences[start : start + size]
        start += size
    return Corpus("numbers", "en", "de", parts)


def english(number: int, num2words: Any) -> str:
    """A number in English, each part of it a word of its own, as it is heard."""
    return num2words(number).replace("-", " ").replace(",", "")


def _num2words() -> Any:
    try:
        from num2words import num2words
    except ImportError as error:
        raise ConfigError(f"the numbers need num2words: {install_command('simul')}") from error
    return num2words
