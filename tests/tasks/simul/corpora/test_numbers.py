import pytest

from leap.errors import ConfigError
from leap.tasks.simul.corpora.numbers import numbers_corpus


def small(**settings):
    return numbers_corpus(**{"n_train": 60, "n_valid": 5, "n_test": 5} | settings)


def test_no_sentence_occurs_twice():
    parts = small().parts
    sources = [sentence.source for part in parts.values() for sentence in part]
    assert {part: len(found) for part, found in parts.items()} == {
        "train": 60,
        "valid": 5,
        "test": 5,
    }
    assert len(set(sources)) == 70


def test_the_seed_decides():
    assert small(seed=3) == small(seed=3)
    assert small(seed=3) != small(seed=4)


def test_german_says_the_units_before_the_tens():
    seen = 0
    for sentence in small(largest=99).parts["train"]:
        german = sentence.target.split(", ")
        for number, english, words in zip(
            map(int, sentence.id.split("-")), sentence.source.split(", "), german, strict=True
        ):
            if number % 100 == 42:
                assert english.endswith("forty two") and words.endswith("zweiundvierzig")
                seen += 1
    assert seen


def test_words_are_those_that_are_heard():
    for sentence in small(largest=99).parts["train"]:
        assert "-" not in sentence.source
        assert sentence.source.count(",") == sentence.target.count(",")


def test_more_sentences_than_there_are_numbers_are_refused():
    with pytest.raises(ConfigError, match=r"70 different sentences of 1 numbers up to 99 are too"):
        small(largest=99, longest=1)
    with pytest.raises(ConfigError, match="one sentence or more"):
        small(n_test=0)
