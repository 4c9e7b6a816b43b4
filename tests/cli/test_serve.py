"""`leap serve` as a person starts and stops it."""

import os
import re
import signal
import socket
import subprocess
import sys

import pytest

from leap.cli import main

httpx = pytest.importorskip("httpx", reason="the extra dev is not installed")
pytest.importorskip("uvicorn", reason="the extra serve is not installed")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a model that knows nothing, and its tokenizer."""
    from leap.models import LeapformerConfig, LeapformerForCausalLM
    from leap.tasks.lm.tokenizer import byte_tokenizer

    folder = tmp_path_factory.mktemp("served") / "nothing"
    sizes = {"vocab_size": 257, "hidden_size": 16, "n_layer": 1, "n_head": 2}
    LeapformerForCausalLM(LeapformerConfig(**sizes)).save_pretrained(folder)
    byte_tokenizer().save(folder)
    return folder


def run(capsys, *arguments):
    with pytest.raises(SystemExit) as leaving:
        main(["serve", *map(str, arguments)])
    out, err = capsys.readouterr()
    return leaving.value.code, out, err


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM], ids=lambda x: x.name)
def test_it_says_where_it_is_answers_and_ends_when_it_is_told_to(folder, stop):
    command = [sys.executable, "-m", "leap.cli", "serve", "--run", str(folder), "--port", "0"]
    environment = os.environ | {"LEAP_TOKEN": "sesame"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as server:
        said = server.stdout.readline()
        url = re.fullmatch(r".* is served at (http://127.0.0.1:\d+)/v1/completions; .*\n", said)[1]
        asked = {"prompt": "a", "max_tokens": 3}
        assert httpx.post(f"{url}/v1/completions", json=asked).status_code == 401
        headers = {"Authorization": "Bearer sesame"}
        answer = httpx.post(f"{url}/v1/completions", json=asked, headers=headers, timeout=60)
        assert answer.json()["model"] == "nothing"
        server.send_signal(stop)
        _, err = server.communicate(timeout=60)
    assert "Traceback" not in err
    assert server.returncode in (0, 130, -stop)


def test_a_port_that_is_taken_is_one_line(capsys, folder):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, _, err = run(capsys, "--run", folder, "--port", port)
    assert code == 1 and err.count("\n") == 1
    assert err.startswith(f"leap: cannot listen at 127.0.0.1 port {port} (")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--run", "nowhere"), "no run folder at nowhere"),
        (("--run", ".", "--slots", "0"), "--slots=0 must be 1 or more"),
        (("--run", ".", "--port", "70000"), "--port=70000 must be from 0 to 65535"),
        (("--run", ".", "--seconds", "0"), "--seconds=0.0 must be more than 0"),
        (("--run", ".", "--waiting", "-1"), "--waiting=-1 must be 0 or more"),
        (("--run", ".", "--threads", "0"), "--threads=0 must be 1 or more"),
        (("--run", ".", "--token", " "), "--token is empty"),
        (("--run", ".", "--states", "nowhere"), "--states=nowhere is no folder; make it first"),
    ],
    ids=str,
)
def test_a_setting_that_cannot_work_is_one_line(capsys, flags, message):
    code, _, err = run(capsys, *flags)
    assert code == 1 and err.startswith(f"leap: {message}") and err.count("\n") == 1
