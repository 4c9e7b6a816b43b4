"""The run folder: everything a run leaves behind, and all it needs to go on after a stop.

    config.json      the settings; a run with others is refused
    data.json        digests of the data; a run on other data is refused
    checkpoints/     the best and the last one, with the optimiser's state and a manifest
    log/             for TensorBoard
    model/           the best model, once training is done
    metrics.json     the results, written last: a folder that has them is finished
    metrics-40.json  those after 40 steps, of a run that went on for more
    curve.png        the learning curve

Files are written under another name and then renamed, so what is there is whole.
"""

import json
import os
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from leap.errors import FileError
from leap.reports.files import read_json, write_json, write_report, write_whole

Extends = Callable[[Mapping[str, Any]], bool]
"""Whether a run is one with these settings, and more steps."""
Like = Mapping[str, Any]
"""What results must hold, by name: a type, a union of types, a further `Like`, or a list of one of
these, for what every value of a list or of an object must be."""


class RunFolder:
    """One run's folder, made by `create`, or found again with the same settings.

    Args:
        path: where it is, or will be.
        settings: what the run is defined by, as JSON has it.
        extends: whether the run may go on from one that took fewer steps, as `Recipe.extends`.

    Raises:
        FileError: if the folder holds something else, or a run with other settings.
    """

    def __init__(
        self, path: Path, settings: Mapping[str, Any], extends: Extends | None = None
    ) -> None:
        self.path = path
        self.settings = json.loads(json.dumps(settings, default=str))
        self.is_longer = False
        """Whether the run that is there took fewer steps, and this one goes on from it."""
        self._check(extends)

    @property
    def checkpoints(self) -> Path:
        """Where checkpoints are."""
        return self.path / "checkpoints"

    @property
    def model(self) -> Path:
        """Where the best model is, once training is done."""
        return self.path / "model"

    def metrics(self, like: Like | None = None) -> dict[str, Any] | None:
        """The results, or None while the run is not finished.

        Args:
            like: what they must hold.

        Raises:
            FileError: if they do not.
        """
        path = self.path / "metrics.json"
        return read_results(path, like or {}) if path.exists() and not self.is_longer else None

    def create(self, data: Mapping[str, str]) -> None:
        """Make the folder, if it is not there, and write the settings to it.

        Args:
            data: digests of the data, by name, to be the same whenever the run goes on.
        """
        files = {"data.json": data, "config.json": self.settings}
        missing = {name: x for name, x in files.items() if not (self.path / name).exists()}
        write_report(self.path, missing)
        if read_json(self.path / "data.json") != data:
            raise FileError(
                f"the data of the run in {self.path} has changed since it began; bring it back, "
                "or give another output folder"
            )

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keep other processes from this folder, which must have been created, for a while.

        The system forgets the lock of a process that is killed.
        """
        owner = self.path / ".process"
        try:
            with FileLock(self.path / ".lock", timeout=0):
                write_whole(owner, f"process {os.getpid()} on {socket.gethostname()}")
                yield
        except Timeout as error:
            who = owner.read_text(encoding="utf-8") if owner.exists() else "another process"
            raise FileError(
                f"{who} is at work in {self.path}; wait for it, or give another output folder"
            ) from error

    def extend(self) -> None:
        """Take the settings of the longer run; the results of the shorter one are kept."""
        if not self.is_longer:
            return
        path = self.path / "metrics.json"
        if path.exists():
            path.rename(self.path / f"metrics-{read_json(path).get('steps')}.json")
        write_json(self.path / "config.json", self.settings)
        self.is_longer = False

    def write_metrics(self, metrics: Mapping[str, Any]) -> None:
        """Write the results, which also says that the run is finished."""
        write_json(self.path / "metrics.json", metrics)

    def write_folder(self, name: str, write: Callable[[Path], object]) -> None:
        """Let `write` fill a folder inside this one, which appears when it is complete."""
        unfinished = self.path / f".{name}.part"
        shutil.rmtree(unfinished, ignore_errors=True)
        try:
            unfinished.mkdir(parents=True)
            write(unfinished)
            give_usual_modes(unfinished)
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise
        shutil.rmtree(self.path / name, ignore_errors=True)
        unfinished.rename(self.path / name)

    def _check(self, extends: Extends | None) -> None:
        if self.path.exists() and not self.path.is_dir():
            raise FileError(f"{self.path} is a file; give another output folder")
        if not self.path.is_dir():
            return
        path = self.path / "config.json"
        if not path.exists():
            # What a run writes before its settings, and unfinished files of that, do not count.
            names = {inside.name for inside in self.path.iterdir()} - {"data.json"}
            if any(not name.startswith(".") for name in names):
                raise FileError(
                    f"{self.path} is not empty and holds no run; give another output folder"
                )
            return
        found = read_json(path)
        self.is_longer = extends is not None and extends(found)
        for name, ours in self.settings.items():
            if self.is_longer and name in ("steps", "epochs"):
                continue
            theirs = found.get(name, ours)  # A run of an older version may know fewer settings.
            if theirs != ours:
                raise FileError(
                    f"{self.path} holds a run with {name}={theirs}, not {ours}; give another "
                    "output folder, or remove this one"
                )


def give_usual_modes(folder: Path) -> None:
    """Let whoever may read a folder that was just made read its files; weights are written 0600."""
    mode = folder.stat().st_mode & 0o666
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(mode)


def read_results(path: Path, like: Like) -> dict[str, Any]:
    """The results in a file, which must hold what `like` says."""
    found = read_json(path)
    fault = _unlike(found, like)
    if fault is not None:
        raise FileError(
            f"{path} has {fault}: it is of no run of this kind, or was changed; remove it, and "
            "give the command that wrote it again"
        )
    return found


def _unlike(found: Any, like: Any, name: str = "") -> str | None:
    """What of the results is not what it must be, the first of it; None if all is."""
    if isinstance(like, Mapping) and isinstance(found, dict):
        for key, kind in like.items():
            inner = f"{name}.{key}".lstrip(".")
            fault = _unlike(found[key], kind, inner) if key in found else f"no {inner!r}"
            if fault is not None:
                return fault
        return None
    if isinstance(like, list) and isinstance(found, dict | list):
        values = found.values() if isinstance(found, dict) else found
        faults = (_unlike(value, like[0], name) for value in values)
        return next((fault for fault in faults if fault is not None), None)
    is_kind = not isinstance(like, Mapping | list) and (
        isinstance(found, like) or (isinstance(found, int) and isinstance(0.0, like))
    )
    return None if is_kind else f"{str(found)[:20]!r} as {name!r}"
