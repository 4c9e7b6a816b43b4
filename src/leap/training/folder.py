"""The run folder: everything a run leaves behind, and all it needs to go on after a stop.

    config.json      the settings; a run with others is refused
    data.json        digests of the data; a run on other data is refused
    checkpoints/     the best and the last one, with the optimiser's state
    log/             for TensorBoard
    model/           the best model, once training is done
    metrics.json     the results, written last: a folder that has them is finished
    curve.png        the learning curve

Files are written under another name and then renamed, so what is there is whole.
"""

import json
import os
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from leap.errors import FileError


class RunFolder:
    """One run's folder, made by `create`, or found again with the same settings.

    Args:
        path: where it is, or will be.
        settings: what the run is defined by, as JSON has it.

    Raises:
        FileError: if the folder holds something else, or a run with other settings.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self.path = path
        self.settings = json.loads(json.dumps(settings, default=str))
        self._check()

    @property
    def checkpoints(self) -> Path:
        """Where checkpoints are."""
        return self.path / "checkpoints"

    @property
    def model(self) -> Path:
        """Where the best model is, once training is done."""
        return self.path / "model"

    def metrics(self) -> dict[str, Any] | None:
        """The results, or None while the run is not finished."""
        path = self.path / "metrics.json"
        return read_json(path) if path.exists() else None

    def create(self, data: Mapping[str, str]) -> None:
        """Make the folder, if it is not there, and write the settings to it.

        Args:
            data: digests of the data, by name, to be the same whenever the run goes on.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            if not (self.path / "data.json").exists():
                write_json(self.path / "data.json", data)
            if not (self.path / "config.json").exists():
                write_json(self.path / "config.json", self.settings)
        except OSError as error:
            raise FileError(
                f"cannot write to {self.path} ({error.strerror}); give another output folder"
            ) from error
        if read_json(self.path / "data.json") != data:
            raise FileError(
                f"the data of the run in {self.path} has changed since it began; bring it back, "
                "or give another output folder"
            )

    def write_metrics(self, metrics: Mapping[str, Any]) -> None:
        """Write the results, which also says that the run is finished."""
        write_json(self.path / "metrics.json", metrics)

    def write_folder(self, name: str, write: Callable[[Path], object]) -> None:
        """Let `write` fill a folder inside this one, which appears when it is complete."""
        unfinished = self.path / f".{name}.part"
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        write(unfinished)
        shutil.rmtree(self.path / name, ignore_errors=True)
        unfinished.rename(self.path / name)

    def all_checkpoints(self) -> list[Path]:
        """Every whole checkpoint, the newest last. One that a kill left unfinished is removed."""
        whole = []
        for path in self.checkpoints.glob("checkpoint-*"):
            try:  # Trainer writes this file last.
                json.loads((path / "trainer_state.json").read_text())
            except (OSError, ValueError):
                shutil.rmtree(path, ignore_errors=True)
            else:
                whole.append(path)
        return sorted(whole, key=lambda path: int(path.name.rpartition("-")[2]))

    def last_checkpoint(self) -> Path | None:
        """The newest whole checkpoint."""
        return next(iter(self.all_checkpoints()[-1:]), None)

    def _check(self) -> None:
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
        for name, ours in self.settings.items():
            theirs = found.get(name, ours)  # A run of an older version may know fewer settings.
            if theirs != ours:
                raise FileError(
                    f"{self.path} holds a run with {name}={theirs}, not {ours}; give another "
                    "output folder, or remove this one"
                )


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise FileError(f"cannot read {path} ({error.strerror})") from error
    except ValueError as error:
        raise FileError(f"{path} is not a whole JSON file ({error}); remove it") from error
    if not isinstance(found, dict):
        raise FileError(f"{path} holds no JSON object; it is of another kind than was expected")
    return found


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON file whole or not at all."""
    write_whole(path, json.dumps(value, indent=1, default=str) + "\n")


def write_whole(path: Path, text: str) -> None:
    """Write a text file whole or not at all."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.{time.monotonic_ns()}.part")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(path)
