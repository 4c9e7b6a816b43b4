"""Reading what others have made: files that may be packed, missing, broken or cut off."""

import gzip
import lzma
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from leap.errors import FileError, first_line
from leap.extras import install_command
from leap.tasks.files import data_folder, offline_unless_reached

OPEN: dict[str, Callable[[Path], Any]] = {".xz": lzma.open, ".gz": gzip.open}
RELEASE = "lra_release"
"""The folder of Long Range Arena's own files."""
UNREADABLE = (EOFError, lzma.LZMAError, zlib.error, gzip.BadGzipFile)
"""What the standard library raises for packed files that are broken or cut off."""


def broken(path: Path, why: str) -> FileError:
    """The error that a file is not whole."""
    return FileError(f"{path} is broken or cut off: {why}; get it again")


def read_lines(path: Path) -> Iterator[bytes]:
    """The lines of a file without their ends, unpacked if its name says that it is packed."""
    return (line.rstrip(b"\r\n") for line in _lines(path))


def read_table(path: Path) -> Iterator[bytes]:
    """The lines of a file of which the last has an end too, lest half of a text pass for it."""
    line = b"\n"
    for line in _lines(path):
        yield line.rstrip(b"\r\n")
    if not line.endswith(b"\n"):
        raise broken(path, "its last line has no end")


def check_count(path: Path, found: int, whole: int, release: str) -> None:
    """Raise if a file or folder below one named as a release holds another number than that has.

    Args:
        path: of the file or folder.
        found: examples in it.
        whole: examples that it has in the release.
        release: the folder's name.
    """
    if release in path.resolve().parts and found != whole:
        raise FileError(
            f"{path} holds {found:,} of {release}'s {whole:,} examples; get it again, or rename "
            f"the folder {release} if that is meant"
        )


def _lines(path: Path) -> Iterator[bytes]:
    try:
        file: IO[bytes]
        with OPEN.get(path.suffix, _plain)(path) as file:
            yield from file
    except UNREADABLE as error:
        raise broken(path, first_line(error)) from error
    except OSError as error:
        raise FileError(f"cannot read {path} ({error.strerror or first_line(error)})") from error


def find_file(folder: Path, name: str) -> Path:
    """The one file of this name in a folder or anywhere below it."""
    if not folder.is_dir():
        raise FileError(f"no folder at {folder}; give one that holds {name}")
    found = sorted(folder.rglob(name))
    if len(found) != 1:
        listed = " and ".join(map(str, found[:2])) or "none"
        raise FileError(f"{folder} must hold one {name}, and holds {listed}")
    return found[0]


def at_hand(names: Iterable[str]) -> Path | None:
    """The first of these that is in the folder of data sets."""
    paths = (data_folder() / name for name in names)
    return next((path for path in paths if path.exists()), None)


def from_library(name: str, instead: str) -> Any:
    """A data set of the datasets library, downloaded if need be.

    Args:
        name: of the data set.
        instead: what can be given in its place, for the error that it cannot be had.
    """
    try:
        import datasets
    except ImportError as error:
        raise FileError(
            f"no {name}: datasets are not installed ({install_command('lra')}); or {instead}"
        ) from error
    datasets.disable_progress_bars()
    try:
        with offline_unless_reached(datasets):
            return datasets.load_dataset(name)
    except Exception as error:
        raise FileError(
            f"the datasets library has no {name} for us ({first_line(error)}); {instead}"
        ) from error


def _plain(path: Path) -> IO[bytes]:
    return path.open("rb")
