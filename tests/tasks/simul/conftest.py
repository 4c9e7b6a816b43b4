"""A few number words in two languages, and a vocabulary of them."""

import pytest

from leap.tasks.simul.corpus import Sentence
from leap.tasks.simul.vocabulary import train_vocabulary

PAIRS = [
    ("twenty-one", "einundzwanzig"),
    ("three hundred forty-two", "dreihundertzweiundvierzig"),
    ("five thousand", "fünftausend"),
    ("seven", "sieben"),
    ("sixty-eight (again)", "achtundsechzig (noch einmal)"),
    ("one hundred and nine", "einhundertneun"),
]


@pytest.fixture(scope="session")
def sentences():
    return [Sentence(source, target, id=str(i)) for i, (source, target) in enumerate(PAIRS)]


@pytest.fixture(scope="session")
def vocabulary():
    return train_vocabulary([text for pair in PAIRS for text in pair], size=60)
