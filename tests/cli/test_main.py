import os
import re
import subprocess
import sys

import pytest

import leap
from leap import cli
from leap.cli import main
from leap.errors import LeapError


def run(capsys, *arguments):
    with pytest.raises(SystemExit) as leaving:
        main(arguments)
    out, err = capsys.readouterr()
    return leaving.value.code, out, err


def test_version(capsys):
    assert run(capsys, "--version") == (0, f"leapformer {leap.__version__}\n", "")


@pytest.mark.parametrize("arguments", [["--help"], ["-h"]])
def test_help_lists_every_task(capsys, arguments):
    code, out, _ = run(capsys, *arguments)
    assert code == 0
    for task, summary in cli.TASKS.items():
        assert re.search(rf"^  {task} +{summary}$", out, re.MULTILINE)


def test_help_of_a_task_lists_its_verbs(capsys):
    code, out, _ = run(capsys, "bench", "--help")
    assert code == 0
    assert re.search(r"^  attention +Measure the time", out, re.MULTILINE)


@pytest.mark.parametrize("arguments", [[], ["bench"]], ids=str)
def test_no_command_shows_what_there_is(capsys, arguments):
    code, out, _ = run(capsys, *arguments)
    assert code == 2
    assert "commands:" in out


@pytest.mark.parametrize("arguments", [["bnch"], ["bench", "atention"], ["--versoin"]], ids=str)
def test_a_command_that_is_not_there_is_named(capsys, arguments):
    code, _, err = run(capsys, *arguments)
    assert code == 2
    assert arguments[-1] in err


def test_an_error_of_ours_is_one_line(capsys, monkeypatch):
    def fail(arguments):
        raise LeapError("no text file at play.txt")

    monkeypatch.setattr(cli, "_run", fail)
    assert run(capsys) == (1, "", "leap: no text file at play.txt\n")


def test_stopping_it_is_one_line(capsys, monkeypatch):
    def stop(arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_run", stop)
    assert run(capsys) == (130, "", "leap: stopped\n")


def test_a_reader_that_leaves_early_is_not_told_of_it():
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "leap.cli", "lm", "presets"]
    with os.fdopen(write) as gone:
        done = subprocess.run(command, stdout=gone, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "")
