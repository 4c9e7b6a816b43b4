import os
import re
import subprocess
import sys
import threading
from dataclasses import fields
from errno import EACCES, EDQUOT, ENOSPC
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

import leap
from leap import cli
from leap.cli import main
from leap.cli.verbs import COMMANDS, VERBS
from leap.errors import LeapError
from leap.extras import install_command


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


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(ENOSPC, "No space left on device", "a.json"), "there is no room to write"),
        (OSError(EDQUOT, "Disk quota exceeded"), "there is no room to write"),
        (
            RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed"),
            "there is no room to write",
        ),
        (
            SafetensorError(
                "Error while serializing: I/O error: No space left on device (os error 28)"
            ),
            "there is no room to write",
        ),
        (PermissionError(EACCES, "Permission denied", "a.json"), "[Errno 13] Permission denied"),
        (MemoryError(), "there is not enough memory (MemoryError); give a smaller batch"),
        (torch.OutOfMemoryError("CUDA out of memory.\nTried"), "there is not enough memory (CUDA"),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you"),
            "there is not enough memory",
        ),
    ],
    ids=str,
)
def test_what_the_machine_lacks_is_one_line(capsys, monkeypatch, error, message):
    def fail(arguments):
        raise error

    monkeypatch.setattr(cli, "_run", fail)
    code, out, err = run(capsys)
    assert (code, out) == (1, "")
    assert err.startswith(f"leap: {message}") and err.count("\n") == 1


@pytest.mark.parametrize("error", [RuntimeError("no"), OSError("odd"), KeyError("x")], ids=repr)
def test_what_is_our_own_mistake_is_not_hidden(monkeypatch, error):
    def fail(arguments):
        raise error

    monkeypatch.setattr(cli, "_run", fail)
    with pytest.raises(type(error)):
        main([])


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_output_to_a_full_disk_is_one_line():
    command = [sys.executable, "-m", "leap.cli", "lm", "presets"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("leap: there is no room") and done.stderr.count("\n") == 1


def begin(error):
    """A command that starts a thread, which ends in an error."""

    def run(arguments):
        thread = threading.Thread(target=raise_it)
        thread.start()
        thread.join()

    def raise_it():
        raise error

    return run


def test_what_a_thread_lacks_is_one_line(capsys, monkeypatch):
    before = threading.excepthook
    monkeypatch.setattr(cli, "_run", begin(OSError(ENOSPC, "No space left on device")))
    code, out, err = run(capsys)
    assert (code, out) == (1, "")
    assert err.startswith("leap: there is no room to write") and err.count("\n") == 1
    assert threading.excepthook is before


def test_another_error_of_a_thread_is_not_hidden(monkeypatch):
    told = []
    monkeypatch.setattr(threading, "excepthook", lambda arguments: told.append(arguments))
    monkeypatch.setattr(cli, "_run", begin(KeyError("x")))
    main([])
    assert [each.exc_type for each in told] == [KeyError]


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


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("learning_rate=0 must be more", "--learning-rate=0 must be more"),
        ("give learning_rate, or steps=3", "give --learning-rate, or --steps=3"),
        ("models: 'x' takes steps", "--models: 'x' takes steps"),
        ("models is empty", "--models is empty"),
        ("hidden_size=9 into n_head=2", "hidden_size=9 into --n-head=2"),
        ("runs/learning_rate/a.models=1", "runs/learning_rate/a.models=1"),
        ("my_learning_rate=1, minsteps=2", "my_learning_rate=1, minsteps=2"),
    ],
)
def test_settings_are_named_as_they_are_typed(message, expected):
    assert cli.as_typed(message, ["learning_rate", "steps", "models", "n_head"]) == expected


def test_every_flag_has_a_help_and_where_it_is_not_given_the_help_says_what_happens():
    for task, verbs in (*VERBS.items(), ("", COMMANDS)):
        for name, verb in verbs.items():
            config = verb.load_config()
            texts = cli.help_texts(config)
            for field in fields(config):
                text = texts.get(field.name, "")
                assert text, (task, name, field.name)
                if field.default is None:
                    assert re.search(r"default|[Uu]nless|\[.*\]", text), (task, name, field.name)


def test_the_help_of_a_flag_that_may_be_left_out_does_not_call_it_none(capsys):
    _, out, _ = run(capsys, "lm", "generate", "--help")
    assert "by default among all" in " ".join(out.replace("│", "").split())
    assert "(default: None)" not in out


def test_a_package_that_an_extra_brings_is_one_line(capsys, monkeypatch):
    def fail(config):
        raise ModuleNotFoundError("No module named 'accelerate'", name="accelerate")

    monkeypatch.setattr("leap.cli.lm.presets", fail)
    code, _, err = run(capsys, "lm", "presets")
    assert (code, err) == (1, f"leap: leap lm presets needs accelerate: {install_command('lm')}\n")


def test_a_module_that_no_extra_brings_is_an_error_of_ours(monkeypatch):
    def fail(config):
        raise ModuleNotFoundError("No module named 'leap.oops'", name="leap.oops")

    monkeypatch.setattr("leap.cli.lm.presets", fail)
    with pytest.raises(ModuleNotFoundError):
        main(["lm", "presets"])
