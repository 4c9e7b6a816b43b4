"""Compile the library next to the Python that loads it: `python src/native/build.py`.

Every op is compiled once for each instruction set that the processors of this machine's kind may
have; which of them is used is decided when it is loaded. The library needs a C++ compiler that
knows GCC's vector types (GCC, Clang) and nothing else. Where it cannot be built, a file with the
reason takes its place, for `leap backends` to show.
"""

import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

SOURCES = Path(__file__).parent
TARGET = SOURCES.parent / "leap" / "ops" / "native"
LIBRARY, REASON = "libleap.so", "not-built.txt"
FLAGS = [
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-Wall",
    "-Wno-psabi",
    "-fno-math-errno",
    "-ffp-contract=fast",
]
SETS = {
    "x86_64": {
        "avx512": "-mavx512f -mavx512dq -mavx512vl -mavx512bw -mfma -mprefer-vector-width=512",
        "avx2": "-mavx2 -mfma",
    },
    "aarch64": {"plain": ""},
}
NAMES = {"amd64": "x86_64", "arm64": "aarch64"}


def build(target: Path = TARGET) -> str | None:
    """Build the library; the reason if that cannot be done."""
    reason = _compile(target / LIBRARY)
    if reason is None:
        (target / REASON).unlink(missing_ok=True)
    else:
        (target / LIBRARY).unlink(missing_ok=True)
        (target / REASON).write_text(reason + "\n")
    return reason


def _compile(library: Path) -> str | None:
    machine = platform.machine().lower()
    sets = SETS.get(NAMES.get(machine, machine))
    if sets is None or os.name != "posix":
        return f"there is no code for {platform.system()} on {machine}"
    compiler = _compiler()
    if compiler is None:
        return "no C++ compiler was found when it was installed (c++, g++, clang++, or $CXX)"
    with tempfile.TemporaryDirectory() as folder:
        made = []
        for name, flags in [("leap", ""), *sets.items()]:
            made.append(str(Path(folder) / f"{name}.o"))
            source = SOURCES / ("leap.cpp" if name == "leap" else "kernels.cpp")
            given = [*FLAGS, *flags.split(), f"-DSET={name}", "-c", str(source), "-o", made[-1]]
            if (failed := _run([*compiler, *given])) is not None:
                return failed
        whole = str(Path(folder) / LIBRARY)
        if (failed := _run([*compiler, "-shared", "-pthread", *made, "-o", whole])) is not None:
            return failed
        # Moved in one step: a program that has the old one loaded keeps it.
        shutil.copy(whole, library.with_suffix(".new"))
        library.with_suffix(".new").replace(library)
    return None


def _compiler() -> list[str] | None:
    named = shlex.split(os.environ.get("CXX", ""))
    if named:
        return named if shutil.which(named[0]) else None
    configured = shlex.split(sysconfig.get_config_var("CXX") or "")[:1]
    found = [name for name in (*configured, "c++", "g++", "clang++") if shutil.which(name)]
    return found[:1] or None


def _run(command: list[str]) -> str | None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return None
    said = [line for line in done.stderr.splitlines() if "error" in line] or [done.stderr.strip()]
    return f"the compiler {command[0]} failed: {said[0][:300]}"


if __name__ == "__main__":
    failed = build()
    sys.stdout.write(f"built {TARGET / LIBRARY}\n" if failed is None else f"not built: {failed}\n")
