"""Bring the test suite of the installed transformers to a folder, for `models.py` to import.

    python tests/hf/obtain.py build/hf-tests            from the source archive on the package index
    python tests/hf/obtain.py build/hf-tests CHECKOUT   from a checkout of its repository

The archive has the tests of models, but neither those of generation nor those of export. In their
place go empty classes; a checkout of the same version has them all. Nothing of it is kept in ours.
"""

import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import transformers

STAND_INS = {
    "generation/test_utils.py": "GenerationTesterMixin",
    "exporters/test_export.py": "ExportTesterMixin",
}


def main(folder: Path, checkout: Path | None = None) -> None:
    """Fill `folder` with a package `tests`, unless it is there already."""
    version = transformers.__version__
    stamp = folder / "obtained"
    wanted = f"{version} {checkout or 'archive'}"
    if stamp.exists() and stamp.read_text() == wanted:
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if checkout is None:
        _unpack(version, folder)
    else:
        found = checkout / "tests" / "test_modeling_common.py"
        if not found.exists():
            raise SystemExit(f"{checkout} is no checkout of transformers: it has no {found.name}")
        shutil.copytree(checkout / "tests", folder / "tests")
    _complete(folder / "tests")
    stamp.write_text(wanted)


def _unpack(version: str, folder: Path) -> None:
    with tempfile.TemporaryDirectory() as download:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--no-binary", "transformers", "--no-build-isolation", "--dest", download]
        if subprocess.run([*command, f"transformers=={version}"]).returncode:
            raise SystemExit(
                f"the source archive of transformers {version} cannot be had from the package "
                "index; name a checkout of it: make hf-tests HF=folder"
            )
        (archive,) = Path(download).glob("*.tar.gz")
        with tarfile.open(archive) as files:
            root = f"transformers-{version}/"
            for member in files.getmembers():
                if member.name.startswith(f"{root}tests/"):
                    member.name = member.name.removeprefix(root)
                    files.extract(member, folder, filter="data")


def _complete(package: Path) -> None:
    """Make a package of it, with stand-ins for what the archive leaves out."""
    for name, mixin in STAND_INS.items():
        path = package / name
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            path.write_text(f"class {mixin}:\n    is_stand_in = True\n")
        (path.parent / "__init__.py").touch()
    (package / "__init__.py").touch()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(Path, sys.argv[2:3]))
