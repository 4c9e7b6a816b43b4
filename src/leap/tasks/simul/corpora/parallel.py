"""Plain parallel text: one file per language, line by line; or one with tabs between languages."""

import gzip
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from leap.errors import FileError
from leap.tasks.files import data_folder
from leap.tasks.simul.corpora.corpus import PARTS, Corpus, Reader, Sentence, with_held_out


def read_parallel(path: Path, source: str = "en", target: str = "de") -> Corpus:
    """Read parallel text.

    Args:
        path: a folder with files such as `train.en` and `train.de`, each perhaps packed as `.gz`;
            or one file, perhaps packed too, with a sentence, a tab and its translation on a line.
        source, target: languages, by which the files are named.
    """
    reader = Reader()
    if path.is_file():
        add_tabbed(reader, path.name, _read_lines(path))
    elif path.is_dir():
        for name, left_file, right_file in _pairs_of_files(path, source, target):
            lefts, rights = _read_lines(left_file), _read_lines(right_file)
            if len(lefts) != len(rights):
                raise FileError(
                    f"{left_file} has {len(lefts)} lines, but {right_file.name} has "
                    f"{len(rights)}; each line must be the translation of the other's"
                )
            for number, (left, right) in enumerate(zip(lefts, rights, strict=True), start=1):
                with reader.sentence(f"line {number} of {left_file.name}"):
                    sentence = Sentence(left, right, id=f"{name}-{number}")
                    reader.add(PARTS.get(name, name), sentence)
    else:
        raise FileError(f"no parallel text at {path}")
    return with_held_out(reader.corpus(str(path), source, target))


def add_tabbed(reader: Reader, name: str, lines: Sequence[str]) -> None:
    """Add lines with a sentence, a tab and its translation; what comes after another tab is left.

    Args:
        reader: takes them, to train on.
        name: of the file, for notes why a line is left out.
        lines: the file's.
    """
    for number, line in enumerate(lines, start=1):
        with reader.sentence(f"line {number} of {name}"):
            left, tab, right = line.partition("\t")
            if not tab:
                raise FileError("there is no tab in it")
            reader.add("train", Sentence(left, right.partition("\t")[0], id=str(number)))


def write_parallel(corpus: Corpus, folder: Path) -> None:
    """Write one file per language and part, such as `train.en` and `train.de`."""
    folder.mkdir(parents=True, exist_ok=True)
    for part, sentences in corpus.parts.items():
        for language, lines in (
            (corpus.source_language, [sentence.source for sentence in sentences]),
            (corpus.target_language, [sentence.target for sentence in sentences]),
        ):
            text = "".join(f"{line}\n" for line in lines)
            (folder / f"{part}.{language}").write_text(text, encoding="utf-8")


def read_multi30k() -> Corpus:
    """Multi30k, English to German, from the folder of data sets."""
    folder = data_folder() / "multi30k-en-de"
    if not folder.is_dir():
        raise FileError(
            f"no Multi30k at {folder}; put train.en.gz, train.de.gz and so on there, or name "
            "another folder of data sets by LEAP_DATA"
        )
    return replace(read_parallel(folder), name="multi30k")


def _pairs_of_files(folder: Path, source: str, target: str) -> Iterator[tuple[str, Path, Path]]:
    """The names of the parts, and the files of the two languages."""
    for left in sorted(folder.iterdir()):
        name, _, ending = left.name.removesuffix(".gz").rpartition(".")
        if not left.is_file() or ending != source:
            continue
        rights = [folder / f"{name}.{target}", folder / f"{name}.{target}.gz"]
        right = next((path for path in rights if path.is_file()), None)
        if right is None:
            raise FileError(f"no {rights[0].name} beside {left}")
        yield name, left, right


def _read_lines(path: Path) -> list[str]:
    try:
        content = path.read_bytes()
        text = (gzip.decompress(content) if path.suffix == ".gz" else content).decode("utf-8")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise FileError(f"{path} is no text in UTF-8 ({error})") from error
    # Not splitlines, which also cuts at rarer separators that other tools leave alone.
    return text.removesuffix("\n").split("\n")
