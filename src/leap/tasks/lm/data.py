"""Text to learn from, to choose by, and to be measured on; and sequences of tokens cut from it.

A source is a text file, a folder of them, a Hugging Face dataset (its name, or a folder it was
saved to), `wikitext-2`, or, by default, the Python library of this machine. A source that does not
come in three parts is cut into them: the last tenth is held out, half to choose by, half to test.
"""

import sysconfig
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset

from leap.errors import ConfigError, FileError, first_line
from leap.extras import install_command
from leap.tasks.files import data_folder, offline_unless_reached, read_text

HELD_OUT = 0.05
"""Share of the text in each of the two held-out parts, where the source has no parts itself."""
FILES_TO_SPLIT = 20
"""A folder of at least this number of files is split between files, others within the text."""
PARTS = {
    "train": ("train", "training"),
    "valid": ("valid", "validation", "val", "dev"),
    "test": ("test", "testing"),
}
"""Our names of the parts, and what files and datasets call them."""
TEXT_ENDINGS = (".txt", ".text", ".md", ".raw", ".tokens", ".json", ".jsonl", ".csv", ".tsv")
"""How names of text files end: parts of a text are among these, and no name of a dataset is."""


@dataclass(frozen=True)
class Corpus:
    """A text in three parts, each a sequence of documents."""

    name: str
    """The source, and of a folder what was read in it."""
    train: Sequence[str]
    valid: Sequence[str]
    test: Sequence[str]

    def part(self, name: str) -> Sequence[str]:
        """One of the parts by its name."""
        if name not in PARTS:
            raise ConfigError(f"part={name!r} is not known; there are {', '.join(PARTS)}")
        return getattr(self, name)


TextRead = Callable[[Corpus], None]
"""Told a text that has been read, before anything is done with it."""


def read_corpus(source: str | None = None) -> Corpus:
    """Read a text.

    Args:
        source: path of a file or folder, name of a dataset, `wikitext-2`, or None for the Python
            library of this machine. A dataset with several configurations is `name:configuration`.
            In a folder with a text file named train (train.txt, wiki.train.tokens), those named
            train, valid and test are its parts, and no other is read; else all its files are read
            but hidden and empty ones.
    """
    if source is None:
        return _python_library()
    path = Path(source).expanduser()
    if path.is_file():
        return _corpus(str(source), {"train": [read_text(path)]})
    if path.is_dir():
        if any((path / name).exists() for name in ("dataset_dict.json", "state.json")):
            return _saved_dataset(path)
        return _folder(path)
    if source == "wikitext-2":
        return _wikitext_2()
    name, _, configuration = source.partition(":")
    if name.endswith(TEXT_ENDINGS) or source.startswith((".", "/", "~")):
        raise FileError(f"no text file at {source}")
    return _hub_dataset(source, name, configuration or None)


def _folder(folder: Path) -> Corpus:
    found = {part: _file_named(folder, names) for part, names in PARTS.items()}
    named = {part: path for part, path in found.items() if path is not None}
    if "train" in named:
        listed = ", ".join(path.name for path in named.values())
        texts = {part: [read_text(path)] for part, path in named.items()}
        return _corpus(f"{folder} ({listed})", texts)
    paths = sorted(
        path
        for path in folder.rglob("*")
        if path.is_file()
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    )
    if not paths:
        raise FileError(f"no text files in {folder}")
    full = [path for path in paths if not _is_empty(path)]
    if not full:
        raise FileError(f"the files in {folder} are empty; give some with text in them")
    listed = "1 file" if len(full) == 1 else f"{len(full):,} files"
    if len(full) < len(paths):
        listed += f", {len(paths) - len(full):,} empty left out"
    return _corpus(f"{folder} ({listed})", _split_files([read_text(path) for path in full]))


def _is_empty(path: Path) -> bool:
    try:
        return not path.read_bytes().strip()
    except OSError:  # For `read_text` to tell.
        return False


def _file_named(folder: Path, names: Iterable[str]) -> Path | None:
    found = [
        path
        for path in sorted(folder.iterdir())
        if path.is_file()
        and path.suffix in ("", *TEXT_ENDINGS)
        and path.stem.rpartition(".")[2] in names
    ]
    if len(found) > 1:
        listed = " and ".join(path.name for path in found)
        raise FileError(f"{folder} holds {listed} for one part of the text; leave one of them")
    return found[0] if found else None


def _wikitext_2() -> Corpus:
    folder = data_folder() / "wikitext-2"
    if folder.is_dir():
        texts = {part: [read_text(folder / f"{part}.txt")] for part in PARTS}
        return _corpus("wikitext-2", texts)
    return _hub_dataset("wikitext-2", "Salesforce/wikitext", "wikitext-2-v1")


def _python_library() -> Corpus:
    """Every source file of the standard library in UTF-8, without its tests."""
    folder = Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    texts = []
    for path in sorted(folder.rglob("*.py")):
        if left_out.isdisjoint(path.relative_to(folder).parts):
            try:
                text = path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError):
                continue
            if text.strip():
                texts.append(text)
    if len(texts) < FILES_TO_SPLIT:
        raise FileError(f"no Python library with its source in {folder}; give a text file as data")
    return _corpus("the Python library", _split_files(texts))


def _saved_dataset(folder: Path) -> Corpus:
    datasets = _datasets(str(folder))
    try:
        found = datasets.load_from_disk(str(folder))
    except Exception as error:
        raise FileError(
            f"{folder} looks like a saved dataset but cannot be read ({first_line(error)})"
        ) from error
    return _dataset_corpus(str(folder), found)


def _hub_dataset(source: str, name: str, configuration: str | None) -> Corpus:
    datasets = _datasets(source)
    try:
        with offline_unless_reached(datasets):
            found = datasets.load_dataset(name, configuration)
    except Exception as error:
        raise FileError(
            f"no text at {source}: no file or folder has this name, and the datasets library has "
            f"no {name} for us ({first_line(error)})"
        ) from error
    return _dataset_corpus(source, found)


def _datasets(source: str) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise FileError(
            f"no text file at {source}, and datasets are not installed: {install_command('lm')}"
        ) from error
    datasets.disable_progress_bars()
    return datasets


def _dataset_corpus(source: str, found: Any) -> Corpus:
    parts = found if isinstance(found, dict) else {"train": found}
    texts: dict[str, list[str]] = {}
    for part, names in PARTS.items():
        for name in names:
            if name in parts:
                texts[part] = [_join_rows(source, parts[name])]
                break
    if "train" not in texts:
        raise FileError(f"{source} has the parts {', '.join(parts)}, and none to train on")
    return _corpus(source, texts)


def _join_rows(source: str, rows: Any) -> str:
    columns = [name for name, kind in rows.features.items() if str(kind.dtype) == "string"]
    if "text" not in columns and len(columns) != 1:
        raise FileError(f"{source} has no column of text; it has {', '.join(rows.column_names)}")
    lines = rows["text" if "text" in columns else columns[0]]
    return "".join(line if line.endswith("\n") else line + "\n" for line in lines)


def _split_files(texts: Sequence[str]) -> dict[str, list[str]]:
    """Hold out whole files, evenly spread over the folder, if there are enough of them."""
    if len(texts) < FILES_TO_SPLIT:
        return {"train": ["\n".join(texts)]}
    every = round(1 / HELD_OUT)
    return {
        "train": [t for i, t in enumerate(texts) if i % every not in (every // 2, every - 1)],
        "valid": list(texts[every // 2 :: every]),
        "test": list(texts[every - 1 :: every]),
    }


def _corpus(name: str, texts: dict[str, list[str]]) -> Corpus:
    """Make a corpus, cutting the parts that are missing off the end of the training text."""
    for part in ("test", "valid"):
        if part not in texts:
            whole = "".join(texts["train"])
            missing = sum(p not in texts for p in PARTS)
            cut = round(len(whole) * (1 - HELD_OUT / (1 - HELD_OUT * (2 - missing))))
            cut = whole.rfind("\n", 0, cut) + 1 or cut
            texts = texts | {"train": [whole[:cut]], part: [whole[cut:]]}
    for part, documents in texts.items():
        if not any(text.strip() for text in documents):
            raise FileError(f"the {part} part of {name} is empty; give a longer text")
    return Corpus(name, **texts)


def count_words(documents: Iterable[str]) -> int:
    """Words of a text, as WikiText counts them: what whitespace separates, and line ends."""
    return sum(len(text.split()) + text.count("\n") for text in documents)


def count_bytes(documents: Iterable[str]) -> int:
    """Bytes of a text in UTF-8."""
    return sum(len(text.encode()) for text in documents)


class Blocks(Dataset[dict[str, Tensor]]):
    """Sequences of `length` tokens cut from a text, and for each token the one that follows it.

    Each token of the text but the first is to be foretold in one sequence. The last sequence
    begins so early that it is as long as the others, and shares tokens with the one before it.

    Args:
        tokens: of the whole text.
        length: of a sequence.
        name: of the text, for the error that it is too short.
    """

    def __init__(self, tokens: Tensor, length: int, name: str) -> None:
        if length < 1:
            raise ConfigError(f"length={length} must be 1 or more")
        if len(tokens) < length + 1:
            raise FileError(
                f"{name} has {len(tokens)} tokens, too few for one sequence of length={length}; "
                "give a longer text, or a smaller length"
            )
        self.tokens = tokens
        self.length = length
        self.starts = list(range(0, len(tokens) - length, length))
        if self.starts[-1] + length + 1 < len(tokens):
            self.starts.append(len(tokens) - length - 1)

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        start = self.starts[index]
        block = self.tokens[start : start + self.length + 1].long()
        return {"input_ids": block[:-1], "labels": block[:-1], "shift_labels": block[1:]}
