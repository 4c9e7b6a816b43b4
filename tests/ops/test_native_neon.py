"""The library's code for ARM, cross-compiled and run in an emulator: see check_native.cpp."""

import runpy
import shutil
import subprocess
from pathlib import Path

import pytest

from leap.ops.native import library

HERE = Path(__file__).parent
SOURCES = HERE.parents[1] / "src" / "native"
CHECK = HERE / "check_native.cpp"
CROSS_COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
MISSING = [name for name in (CROSS_COMPILER, EMULATOR) if shutil.which(name) is None]


def run(*command):
    return subprocess.run([str(x) for x in command], capture_output=True, text=True, check=False)


def compiled(*arguments):
    done = run(*arguments)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(
    bool(MISSING),
    reason=f"no {' and no '.join(MISSING)} (Debian: g++-aarch64-linux-gnu, qemu-user)",
)
def test_neon_agrees_with_the_formulas(tmp_path):
    flags = runpy.run_path(str(SOURCES / "build.py"))["FLAGS"]
    for name, source in (("leap", "leap.cpp"), ("plain", "kernels.cpp")):
        given = [f"-DSET={name}", "-c", SOURCES / source, "-o", tmp_path / f"{name}.o"]
        compiled(CROSS_COMPILER, *flags, *given)
    made = [tmp_path / "leap.o", tmp_path / "plain.o"]
    program = tmp_path / "check"
    compiled(CROSS_COMPILER, "-std=c++17", "-static", "-pthread", CHECK, *made, "-o", program)
    done = run(EMULATOR, program)
    assert done.stdout.startswith("instructions: NEON\n")
    assert done.returncode == 0, done.stdout


@pytest.mark.skipif(
    library.missing() is not None or shutil.which("g++") is None,
    reason=f"no native library ({library.missing()}), or no g++ to check it with",
)
@pytest.mark.parametrize("instructions", ["AVX-512", "AVX2", "NEON"])
def test_the_library_of_this_machine_agrees_with_the_formulas(instructions, tmp_path):
    folder, program = Path(library.__file__).parent, tmp_path / "check"
    here = [folder / library.LIBRARY, f"-Wl,-rpath,{folder}"]
    compiled("g++", "-std=c++17", "-pthread", CHECK, *here, "-o", program)
    done = run(program, instructions)
    if "no such instruction set" in done.stdout:
        pytest.skip(f"no {instructions} here")
    assert done.returncode == 0, done.stdout
