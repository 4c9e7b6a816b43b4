"""Words as they are written, of text that is piped in, sound that is played, or a microphone."""

import io
import os
import signal
import time
from itertools import chain

import numpy as np
import pytest

from leap.cli import main
from leap.errors import ConfigError, FileError, InputError
from leap.tasks.simul import live
from leap.tasks.simul.audio.files import read_sound, write_sound
from leap.tasks.simul.audio.microphone import Heard
from leap.tasks.simul.live import Ended, StreamConfig, Written, translate
from leap.tasks.simul.streaming.stream import load_trained

pytestmark = pytest.mark.usefixtures("shapes_unchecked")
LINES = ["one hundred and nine", "", "seven"]


@pytest.fixture(scope="module")
def text_run(random_run, tmp_path_factory, vocabulary):
    return random_run(tmp_path_factory.mktemp("text"), vocabulary)


@pytest.fixture(scope="module")
def speech_run(random_run, tmp_path_factory, vocabulary):
    return random_run(tmp_path_factory.mktemp("speech"), vocabulary, speech=True)


@pytest.fixture(scope="module")
def tone():
    return np.sin(np.cumsum(np.linspace(0.05, 0.6, 9600))).astype(np.float32) / 2


def words(events):
    return [event.word for event in events if isinstance(event, Written)]


def spoken(run, lines, policy="wait-2"):
    stream = load_trained(run).interpreter(policy).stream()
    return [stream.push(line) + stream.finish() for line in lines]


def test_a_word_without_end_is_refused_while_it_is_still_coming(text_run):
    read = []

    def endless():
        for _ in range(100):
            read.append(b"seven" * 100)
            yield "seven" * 100

    with pytest.raises(InputError, match=r"a word of 1,500 characters or more, seven"):
        list(translate(StreamConfig(run=text_run), endless()))
    assert len(read) == 3


def test_text_is_translated_line_by_line(text_run):
    config = StreamConfig(run=text_run, policy="wait-2")
    found = list(translate(config, io.StringIO("\n".join(LINES))))
    expected = spoken(text_run, LINES)
    assert words(found) == [*chain(*expected)]
    assert [event.n_words for event in found if isinstance(event, Ended)] == [
        len(said) for said in expected
    ]
    first, *_, last = found
    # One piece is a word at the most, so the first comes with the second word, or later.
    assert first.delay >= 2 and first.lag == first.delay
    assert last.source_length == 1 and last.lagging == 1


def test_sentences_of_one_line_are_translated_one_by_one_unless_told_otherwise(text_run):
    line = "one hundred. seven five! nine"
    sentences = ["one hundred.", "seven five!", "nine"]
    config = {"run": text_run, "policy": "wait-2"}
    found = words(translate(StreamConfig(**config), io.StringIO(line)))
    assert found == [*chain(*spoken(text_run, sentences))]
    never = words(translate(StreamConfig(**config, reset=0), io.StringIO(line)))
    assert never == spoken(text_run, [line])[0] != found


def test_the_lag_is_beside_each_word(text_run, capsys, monkeypatch):
    expected = [said for said in spoken(text_run, LINES) if said]
    command = ["simul", "stream", "--run", str(text_run), "--policy", "wait-2"]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(LINES)))
    main(command)
    shown = capsys.readouterr()
    lines = [line.split("\t") for line in shown.out.splitlines()]
    assert [line[0] for line in lines if line[0]] == [*chain(*expected)]
    assert all(line[1].endswith(" words") for line in lines if line[0])
    assert "words behind; LAAL" in shown.err
    # On a terminal, on one line; without lags, the text alone.
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(LINES)))
    main(command)
    assert f"{expected[0][0]}\x1b[2m +" in capsys.readouterr().out
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(LINES)))
    main([*command, "--no-lag"])
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == spoken(
        text_run, LINES
    )


def test_words_come_before_the_line_ends():
    reading, writing = os.pipe()
    with os.fdopen(reading, encoding="utf-8") as text, os.fdopen(writing, "wb", 0) as pipe:
        found = live._words(text)
        pipe.write(b"one two\tthree fo")
        assert [next(found) for _ in range(3)] == ["one", "two", "three"]
        pipe.write("urü".encode()[:-1])  # In the middle of a word, and of a letter.
        pipe.write("ü\r\n \nfive si".encode()[1:])
        assert [next(found) for _ in range(4)] == ["fourü", None, None, "five"]
        pipe.close()
        assert list(found) == ["si", None]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        ("one\n", ["one", None]),
        ("one", ["one", None]),
        ("one ", ["one", None]),
        ("one \n  ", ["one", None]),
        ("\n\none\n\n", [None, None, "one", None, None]),
    ],
)
def test_each_line_has_an_end_and_what_follows_the_last_one_too(text, expected):
    assert list(live._words(io.StringIO(text))) == expected


@pytest.mark.parametrize("content", [b"one \xff two\n", b"one two \xc3"])
def test_what_is_not_text_is_an_error_that_says_so(text_run, content):
    text = io.TextIOWrapper(io.BytesIO(content), encoding="utf-8")
    with pytest.raises(InputError, match="not text in UTF-8"):
        list(translate(StreamConfig(run=text_run), text))


def test_sound_of_any_rate_and_stereo_is_translated(speech_run, tmp_path, tone):
    write_sound(tmp_path / "mono.wav", tone, 16000)
    write_sound(tmp_path / "stereo.wav", np.stack([tone, tone], axis=1), 16000)
    write_sound(tmp_path / "slow.wav", tone[::2], 8000)
    write_sound(tmp_path / "fast.wav", np.repeat(tone, 3), 48000)
    config = {"run": speech_run, "policy": "wait-1/4"}
    mono, stereo, slow, fast = (
        list(translate(StreamConfig(**config, sound=tmp_path / f"{name}.wav")))
        for name in ("mono", "stereo", "slow", "fast")
    )
    assert words(mono) == words(stereo) and all(map(words, (mono, slow, fast)))
    for found in (mono, slow, fast):
        assert found[-1].source_length == pytest.approx(600)
        assert found[-1].lagging == pytest.approx(320, abs=320)
        assert [event.delay for event in found[:-1]] == sorted(e.delay for e in found[:-1])
    assert all(event.lag >= 280 for event in mono[:-1])
    started = time.perf_counter()
    live_config = StreamConfig(**config, sound=tmp_path / "mono.wav", real_time=True)
    assert words(translate(live_config)) == words(mono)
    assert time.perf_counter() - started > 0.6


def test_sound_is_heard_as_a_whole_offline(speech_run, tmp_path, tone):
    silence = np.zeros(8000, np.float32)
    write_sound(tmp_path / "two.wav", np.concatenate([tone, silence, tone]), 16000)
    config = {"run": speech_run, "sound": tmp_path / "two.wav"}
    whole = words(translate(StreamConfig(**config, policy="offline")))
    assert whole == words(translate(StreamConfig(**config, policy="offline", reset=0)))
    by_default = words(translate(StreamConfig(**config, policy="wait-1/4")))
    assert by_default == words(translate(StreamConfig(**config, policy="wait-1/4", reset=200)))
    assert by_default != words(translate(StreamConfig(**config, policy="wait-1/4", reset=0)))
    with pytest.raises(ConfigError, match="reset=-1 must be 1 or more, or 0 for never"):
        StreamConfig(**config, reset=-1)


def test_a_microphone_gives_what_a_file_gives(speech_run, tmp_path, tone, monkeypatch, capsys):
    write_sound(tmp_path / "mono.wav", tone, 16000)
    command = ["simul", "stream", "--run", str(speech_run), "--policy", "wait-1/4", "--no-lag"]
    main([*command, "--sound", str(tmp_path / "mono.wav")])
    expected = capsys.readouterr().out
    spoken = read_sound(tmp_path / "mono.wav", 16000)  # Rounded to 16 bits, as the file is.
    asked = {}

    def listen(stopped, **options):
        asked.update(options)
        for i, start in enumerate(range(0, len(spoken), 5120)):
            assert not stopped()
            samples = spoken[start : start + 5120]
            yield Heard(samples, len(samples) / 16000, float(i))
        signal.raise_signal(signal.SIGINT)  # Ctrl-C.
        assert stopped()

    monkeypatch.setattr(live, "listen", listen)
    usual = signal.getsignal(signal.SIGINT)
    main([*command, "--microphone", "--device", "3"])
    shown = capsys.readouterr()
    assert shown.out == expected and shown.out.strip()
    assert "ms behind" in shown.err
    assert asked == {"rate": 16000, "milliseconds": 320, "device": "3"}
    assert signal.getsignal(signal.SIGINT) is usual


def test_silence_ends_without_a_word(speech_run, tmp_path):
    write_sound(tmp_path / "silence.wav", np.zeros(16000, np.float32))
    (end,) = translate(StreamConfig(run=speech_run, sound=tmp_path / "silence.wav"))
    assert end == Ended(0, pytest.approx(1000), None)


def test_what_cannot_be_translated_is_an_error_that_says_so(text_run, speech_run, tmp_path):
    with pytest.raises(ConfigError, match="translates text, so give no sound"):
        list(translate(StreamConfig(run=text_run, sound=tmp_path / "x.wav")))
    with pytest.raises(ConfigError, match="translates speech: give a sound or --microphone"):
        list(translate(StreamConfig(run=speech_run), io.StringIO("one")))
    (tmp_path / "no.wav").write_text("this is no sound")
    with pytest.raises(FileError, match="no sound file that can be read"):
        list(translate(StreamConfig(run=speech_run, sound=tmp_path / "no.wav")))
    for wrong, message in (
        ({"sound": tmp_path, "microphone": True}, "not both"),
        ({"real_time": True}, "real_time is for a sound file"),
        ({"device": "3"}, "device=3 is for a microphone"),
        ({"segment": 0}, "segment=0"),
    ):
        with pytest.raises(ConfigError, match=message):
            StreamConfig(**wrong)
