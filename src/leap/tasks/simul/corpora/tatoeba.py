"""Tatoeba's sentence pairs, as manythings.org/anki gives them out: everyday sentences, CC BY 2.0.

They are sorted by length, and an English sentence stands there once for each of its translations.
"""

import zipfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from leap.errors import FileError
from leap.tasks.files import data_folder
from leap.tasks.simul.corpora.corpus import Corpus, Reader, Sentence, with_held_out
from leap.tasks.simul.corpora.parallel import add_tabbed

FILES = {"de": ("deu-eng.zip", "deu.txt"), "es": ("spa-eng.zip", "spa-eng/spa.txt")}
"""The archive and the file in it, by target language."""
HELD_OUT = 0.01
"""Share of the English sentences in each part that is held out."""


def read_tatoeba(target: str) -> Corpus:
    """Tatoeba's pairs from English, with parts of distinct English sentences.

    Args:
        target: language, one of `FILES`.
    """
    archive, name = FILES[target]
    path = data_folder() / "tatoeba" / archive
    if not path.is_file():
        raise FileError(
            f"no Tatoeba at {path}; put the archive of that name there, or name another folder of "
            "data sets by LEAP_DATA"
        )
    reader = Reader()
    add_tabbed(reader, name, _lines(path, name))
    corpus = with_held_out(reader.corpus("tatoeba", "en", target), HELD_OUT)
    parts = {
        part: sentences if part == "train" else _distinct(sentences)
        for part, sentences in corpus.parts.items()
    }
    return replace(corpus, parts=parts)


def _distinct(sentences: Sequence[Sentence]) -> list[Sentence]:
    """Of sentences with the same source the first, so that none counts twice in a score."""
    first: dict[str, Sentence] = {}
    for sentence in sentences:
        first.setdefault(sentence.source, sentence)
    return list(first.values())


def _lines(path: Path, name: str) -> list[str]:
    try:
        with zipfile.ZipFile(path) as archive:
            text = archive.read(name).decode("utf-8")
    except (OSError, KeyError, zipfile.BadZipFile, UnicodeDecodeError) as error:
        raise FileError(f"{path} is no archive with {name} in UTF-8 ({error})") from error
    return text.removesuffix("\n").split("\n")
