"""`leap app` as a person gets it wrong."""

import subprocess
import sys

import pytest

from leap.cli import main


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--run", "nowhere"), "no run folder at nowhere"),
        (("--run", ".", "--port", "70000"), "--port=70000 must be from 0 to 65535"),
        (("--run", ".", "--waiting", "0"), "--waiting=0 must be 1 or more"),
        (("--run", ".", "--benchmarks", "nowhere"), "--benchmarks=nowhere is no folder"),
    ],
    ids=str,
)
def test_a_setting_that_cannot_work_is_one_line(capsys, flags, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as leaving:
        main(["app", *flags])
    _, err = capsys.readouterr()
    assert leaving.value.code == 1
    assert err.startswith(f"leap: {message}") and err.count("\n") == 1


def test_its_settings_are_told_without_gradio():
    code = "import sys, leap.app.config\nprint('gradio' in sys.modules, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False False\n"
