"""Where sentences end in text that is still arriving: sentencex, asked at every word.

Most full stops are told by the word they follow: `hat.` ends a sentence, `3.14` does not. After an
abbreviation the next word decides: `U.S. They` is an end, `U.S. team` is none.
"""

from typing import Any

from leap.errors import ConfigError
from leap.extras import install_command

OPENING = "\"'“„«([{¿¡"
"""What stands before a word, and hides an abbreviation from the splitter."""
FOLLOWING = ("They", "and")
"""A word that begins sentences and one that does not: an end before either is an end for sure."""


def ends_sentence(word: str, following: str | None, language: str) -> bool | None:
    """Whether a sentence ends after a word; None if only the following word can tell.

    Args:
        word: with its punctuation.
        following: the next word, if it has come.
        language: ISO 639 code of the text; one that sentencex has no rules for is taken as English.
    """
    word = word.lstrip(OPENING)
    if following is None:
        return all(_is_split(word, each, language) for each in FOLLOWING) or None
    return _is_split(word, following, language)


def _is_split(word: str, following: str, language: str) -> bool:
    return len(_sentencex().segment(language, f"{word} {following}")) > 1


def _sentencex() -> Any:
    try:
        import sentencex
    except ImportError as error:
        raise ConfigError(
            f"ends of sentences are told by sentencex: {install_command('simul')}"
        ) from error
    return sentencex
