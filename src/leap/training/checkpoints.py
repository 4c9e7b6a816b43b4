"""The checkpoints of a run, each with a manifest of its files: their sizes and hashes.

    checkpoints/checkpoint-200/manifest.json    {} while it is written; written anew last of all

One that does not agree with its manifest was damaged since, and is not gone on from.
"""

import shutil
from hashlib import file_digest
from pathlib import Path
from typing import Any

from leap.errors import FileError
from leap.reports.files import read_json, write_json
from leap.reports.progress import Say
from leap.training.folder import give_usual_modes

MANIFEST = "manifest.json"
STATE = "trainer_state.json"
"""Where Trainer writes how far it was."""


class Checkpoints:
    """The checkpoints in a folder, by their steps."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def at(self, step: int) -> Path:
        """The folder of the checkpoint at a step."""
        return self.path / f"checkpoint-{step}"

    def steps(self) -> list[int]:
        """The steps there is a folder of, whole or not, the last one last."""
        names = (path.name.removeprefix("checkpoint-") for path in self.path.glob("checkpoint-*"))
        return sorted(int(name) for name in names if name.isdecimal())

    def begin(self, step: int) -> None:
        """Make the folder of a new checkpoint, which is unfinished until it is sealed."""
        shutil.rmtree(self.at(step), ignore_errors=True)
        self.at(step).mkdir(parents=True)
        write_json(self.at(step) / MANIFEST, {})

    def seal(self, step: int) -> None:
        """Write the manifest of a checkpoint whose files are all there."""
        give_usual_modes(self.at(step))
        files = {name: _facts(self.at(step) / name) for name in self._files(step)}
        write_json(self.at(step) / MANIFEST, {"files": files})

    def fault(self, step: int) -> str | None:
        """What is wrong with a checkpoint; None if it is as it was written."""
        try:
            manifest = read_json(self.at(step) / MANIFEST)
            if not manifest:
                return "it was not written to its end"
            expected: dict[str, Any] = manifest["files"]
            found = self._files(step)
            for name, facts in expected.items():
                if name not in found:
                    return f"{name} is missing"
                if _facts(self.at(step) / name) != facts:
                    return f"{name} has changed since it was written"
            strange = sorted(found - expected.keys())
        except (FileError, OSError, KeyError, TypeError, AttributeError) as error:
            is_there = (self.at(step) / MANIFEST).exists()
            return f"{MANIFEST} cannot be read ({error})" if is_there else f"it has no {MANIFEST}"
        return f"{strange[0]} was not written with it" if strange else None

    def whole(self) -> list[int]:
        """The steps of those that are as they were written, the last one last."""
        return [step for step in self.steps() if self.fault(step) is None]

    def newest(self, say: Say | None = None) -> int | None:
        """The step of the newest one that is as it was written; None if there is none at all.

        Later ones are removed. `say` is told of those that were damaged, but not of one that a
        kill left unfinished.

        Raises:
            FileError: if there are checkpoints, and each of them is damaged.
        """
        faults: dict[int, str] = {}
        for step in reversed(self.steps()):
            fault = self.fault(step)
            if fault is None:
                break
            if self._is_unfinished(step):
                shutil.rmtree(self.at(step))
            else:
                faults[step] = fault
        else:
            if faults:
                step, fault = next(iter(faults.items()))
                raise FileError(
                    f"no checkpoint in {self.path} is whole ({self.at(step).name}: {fault}); "
                    "remove this folder to begin anew"
                )
            return None
        for damaged, fault in faults.items():
            if say is not None:
                say(f"{self.at(damaged)} is passed over for checkpoint-{step}: {fault}")
            shutil.rmtree(self.at(damaged), ignore_errors=True)
        return step

    def rotate(self, n_kept: int, best: int | None) -> None:
        """Remove all but the last ones and the best."""
        for step in self.steps()[:-n_kept]:
            if step != best:
                shutil.rmtree(self.at(step), ignore_errors=True)

    def state(self, step: int) -> dict[str, Any]:
        """How far Trainer was."""
        return read_json(self.at(step) / STATE)

    def _files(self, step: int) -> set[str]:
        files = (path for path in self.at(step).rglob("*") if path.is_file())
        return {path.relative_to(self.at(step)).as_posix() for path in files} - {MANIFEST}

    def _is_unfinished(self, step: int) -> bool:
        try:
            return not read_json(self.at(step) / MANIFEST)
        except FileError:
            return not any(self.at(step).iterdir())  # Not even that was written.


def _facts(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"size": path.stat().st_size, "sha256": file_digest(file, "sha256").hexdigest()}
