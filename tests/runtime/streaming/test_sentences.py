"""Where a sentence ends is said as soon as it is sure."""

import sys

import pytest

from leap.errors import ConfigError
from leap.extras import install_command
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


def test_without_sentencex_the_installation_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "sentencex", None)
    with pytest.raises(ConfigError) as told:
        ends_sentence("hat.", None, "en")
    assert str(told.value).endswith(install_command("simul"))
