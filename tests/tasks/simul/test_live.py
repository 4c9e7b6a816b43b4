"""Words as they are written, of text that is piped in or sound that is played."""

import io
import time

import numpy as np
import pytest

from leap.cli import main
from leap.errors import ConfigError, FileError
from leap.tasks.simul.audio import write_sound
from leap.tasks.simul.live import StreamConfig, translate
from leap.tasks.simul.stream import load_interpreter

pytestmark = pytest.mark.usefixtures("shapes_unchecked")


@pytest.fixture
def text_run(random_run, tmp_path, vocabulary):
    return random_run(tmp_path / "text", vocabulary)


def test_text_is_translated_line_by_line(text_run, capsys, monkeypatch):
    lines = ["one hundred and nine", "", "seven"]
    stream = load_interpreter(text_run, "wait-2").stream()
    expected = [word for line in lines for word in stream.push(line) + stream.finish()]
    config = StreamConfig(run=text_run, policy="wait-2")
    found = list(translate(config, io.StringIO("\n".join(lines))))
    assert [each.word for each in found] == expected
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines)))
    main(["simul", "stream", "--run", str(text_run), "--policy", "wait-2"])
    shown = capsys.readouterr()
    assert shown.out.split() == expected
    assert "words behind" in shown.err


def test_sound_of_any_rate_and_stereo_is_translated(random_run, tmp_path, vocabulary):
    run = random_run(tmp_path / "speech", vocabulary, speech=True)
    tone = np.sin(np.cumsum(np.linspace(0.05, 0.6, 9600))).astype(np.float32) / 2
    write_sound(tmp_path / "mono.wav", tone, 16000)
    write_sound(tmp_path / "stereo.wav", np.stack([tone, tone], axis=1), 16000)
    write_sound(tmp_path / "slow.wav", tone[::2], 8000)
    config = {"run": run, "policy": "wait-1/4"}
    mono, stereo, slow = (
        [each.word for each in translate(StreamConfig(**config, sound=tmp_path / f"{name}.wav"))]
        for name in ("mono", "stereo", "slow")
    )
    assert mono == stereo and mono and slow
    started = time.perf_counter()
    live = StreamConfig(**config, sound=tmp_path / "mono.wav", real_time=True)
    assert [each.word for each in translate(live)] == mono
    assert time.perf_counter() - started > 0.6
    (tmp_path / "no.wav").write_text("this is no sound")
    with pytest.raises(FileError, match="no sound file that can be read"):
        list(translate(StreamConfig(**config, sound=tmp_path / "no.wav")))


def test_a_model_of_the_other_kind_is_refused(text_run):
    with pytest.raises(ConfigError, match="translates text"):
        list(translate(StreamConfig(run=text_run, sound=text_run / "x.wav")))
