"""Where a sentence ends is said as soon as it is sure."""

import pytest

from leap.runtime.streaming.sentences import ends_sentence

pytest.importorskip("sentencex")


@pytest.mark.parametrize(
    ("word", "following", "ends"),
    [
        ("hat.", None, True),
        ("hat", None, None),
        ("hat", "They", False),
        ("3.14", "is", False),
        ("U.S.", None, None),
        ("U.S.", "They", True),
        ("U.S.", "team", False),
        ("“Mr.", "Smith", False),
        ("really?", None, True),
    ],
)
def test_an_end_is_told_by_the_word_or_by_the_next(word, following, ends):
    assert ends_sentence(word, following, "en") is ends
