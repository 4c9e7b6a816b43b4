"""What a user gets who installs the wheel with no extras, or unpacks the source distribution.

The dependencies of the bare environment are links to the packages installed here: those that the
core asks for, and what these ask for in turn, and no others.
"""

import os
import re
import subprocess
import sys
import tarfile
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from leap.cli.verbs import VERBS

ROOT = Path(__file__).parents[1]
EVERY_HELP = """
import sys
from leap.cli import main
from leap.cli.verbs import COMMANDS, VERBS

every = [[task, verb] for task, verbs in VERBS.items() for verb in verbs]
for command in (*every, *([name] for name in COMMANDS)):
    try:
        main([*command, "--help"])
    except SystemExit as leaving:
        assert leaving.code == 0, command
print("accelerate" in sys.modules, len(every))
"""
TRAININGS = [
    *(("lm", verb) for verb in ("train", "compare", "demo", "recall", "mqar")),
    *(("lra", verb) for verb in ("train", "ablate")),
    ("simul", "train"),
]
EVERY_TRAINING = f"""
import sys
from leap.cli import main

_, text, output = sys.argv
for task, verb in {TRAININGS}:
    data = ["--data", text] if verb in ("train", "compare", "recall") else []
    try:
        main([task, verb, *data, "--output", output])
    except SystemExit as leaving:
        assert leaving.code == 1, verb
"""


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    """The folder with the wheel and the source distribution."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def bare(dist):
    """An environment with the wheel and the core's dependencies alone; where its programs are."""
    (wheel,) = dist.glob("*.whl")
    folder = dist / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "install"]
    subprocess.run([*pip, "-q", "--no-deps", "--no-index", str(wheel)], check=True)
    (site,) = folder.glob("lib/*/site-packages")
    for path in sorted(core_files()):
        if not (site / path.name).exists():
            (site / path.name).symlink_to(path)
    return folder / "bin"


def core_files():
    """Files and folders, as they stand in site-packages, of what the core asks for."""
    waiting, names, found = ["leapformer"], set(), set()
    while waiting:
        name = waiting.pop()
        try:
            installed = distribution(name)
        except PackageNotFoundError:  # Left out by who built torch for CPUs, say.
            continue
        names.add(name)
        if name != "leapformer":
            tops = {file.parts[0] for file in installed.files or () if file.parts[0] != ".."}
            found |= {Path(installed.locate_file(top)) for top in tops - {"__pycache__"}}
        for line in installed.requires or ():
            wanted = Requirement(line)
            is_core = wanted.marker is None or wanted.marker.evaluate({"extra": ""})
            if is_core and wanted.name not in names:
                waiting.append(wanted.name)
    return found


def run(*command):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def test_every_help_works_without_extras(bare):
    done = run(bare / "python", "-c", EVERY_HELP)
    assert done.returncode == 0, done.stderr
    n_verbs = sum(map(len, VERBS.values()))
    assert done.stdout.endswith(f"\nFalse {n_verbs}\n")


def test_what_needs_an_extra_says_so_in_one_line(bare, dist, tmp_path):
    (wheel,) = dist.glob("*.whl")
    done = run(bare / "python", "-c", EVERY_TRAINING, __file__, tmp_path / "run")
    assert done.returncode == 0, done.stderr
    told = [line for line in done.stderr.splitlines() if line.startswith("leap: ")]
    assert told == [
        f"leap: leap {task} {verb} needs accelerate: pip install '{wheel}[{task}]'"
        for task, verb in TRAININGS
    ]
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.fixture(scope="module")
def held(dist):
    """Names of the files in the source distribution."""
    (path,) = dist.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        return {name.partition("/")[2] for name in archive.getnames()}


def test_the_source_distribution_holds_what_the_readme_links_to(held):
    links = re.findall(r"\]\((?!https?:)([^)#]+)", (ROOT / "README.md").read_text())
    assert len(links) > 10
    assert not set(links) - held


def test_the_source_distribution_is_all_that_git_keeps(held):
    """So each target of the Makefile works from it: those of web/ and docs/ too."""
    git = ["git", "-C", str(ROOT), "ls-files"]
    kept = subprocess.run(git, capture_output=True, text=True, check=False).stdout.split("\n")
    if "web/build.mjs" not in kept:
        pytest.skip("no git checkout here to compare with")
    assert not {name for name in kept if name and (ROOT / name).exists()} - held
    assert not {name for name in held if "node_modules" in name}
