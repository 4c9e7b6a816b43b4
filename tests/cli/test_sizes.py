"""Models that nobody can train are one line, at once, whichever command was to train them."""

import pytest

from leap.cli import main

COMMANDS = {
    "lm train": ("--data", "nothing.txt"),
    "lm compare": ("--data", "nothing.txt", "--models", "leap:windowed"),
    "lm recall": ("--data", "nothing.txt"),
    "lm mqar": (),
    "simul train": ("--data", "nothing"),
}


def run(capsys, *arguments):
    with pytest.raises(SystemExit) as leaving:
        main(arguments)
    assert leaving.value.code == 1
    out, err = capsys.readouterr()
    assert not out and err.count("\n") == 1
    return err


@pytest.mark.parametrize("command", COMMANDS)
def test_too_many_layers(capsys, tmp_path, command):
    output = tmp_path / "run"
    given = [*COMMANDS[command], "--n-layer", "100000", "--output", str(output)]
    err = run(capsys, *command.split(), *given)
    assert "--n-layer=100000 is more than the 1,000 layers that a model may have here" in err
    assert not output.exists()


@pytest.mark.parametrize("command", COMMANDS)
def test_too_wide_layers(capsys, tmp_path, command):
    output = tmp_path / "run"
    flag = "--widths" if command == "lm mqar" else "--hidden-size"
    given = [*COMMANDS[command], flag, "1000000", "--output", str(output)]
    err = run(capsys, *command.split(), *given)
    assert "GiB" in err and "give a smaller" in err
    assert not output.exists()


def test_an_encoder_of_too_many_layers(capsys, tmp_path):
    given = ["--encoder-layers", "100000", "--data", "nothing", "--output", str(tmp_path / "run")]
    assert "--encoder-layers=100000 is more than" in run(capsys, "simul", "train", *given)
