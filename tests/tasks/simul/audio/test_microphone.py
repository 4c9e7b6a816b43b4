"""A microphone, with a device that plays what it is given."""

import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from leap.errors import ConfigError, LeapError
from leap.tasks.simul.audio.files import resample
from leap.tasks.simul.audio.microphone import listen


class PortAudioError(Exception):
    pass


class Device(ModuleType):
    """sounddevice, with one microphone that hears a sound and then nothing."""

    PortAudioError = PortAudioError

    def __init__(self, sound, rate, *, goes=False):
        super().__init__("sounddevice")
        self.sound, self.rate, self.goes = sound, rate, goes
        self.opened = None
        self.active = True

    def query_devices(self, device, kind):
        assert kind == "input"
        if device not in (None, 3):
            raise ValueError(f"No input device matching {device!r}")
        return {"default_samplerate": float(self.rate)}

    def InputStream(self, *, samplerate, blocksize, device, channels, callback):
        assert samplerate == self.rate and channels == 1
        self.opened = SimpleNamespace(size=blocksize, device=device, callback=callback)
        return self

    def __enter__(self):
        size = self.opened.size
        for start in range(0, len(self.sound), size):
            block = self.sound[start : start + size, None].copy()
            self.opened.callback(block, len(block), None, None)
            block[:] = np.nan  # PortAudio uses its buffers again.
        self.active = not self.goes
        return self

    def __exit__(self, *_):
        self.opened = None


@pytest.fixture
def plug_in(monkeypatch):
    def plug(*arguments, **options):
        device = Device(*arguments, **options)
        monkeypatch.setitem(sys.modules, "sounddevice", device)
        return device

    return plug


def make_sound(n):
    return np.sin(np.cumsum(np.linspace(0.01, 0.2, n))).astype(np.float32) / 2


@pytest.mark.parametrize("rate", [16000, 48000])
def test_what_is_spoken_arrives_at_the_models_rate_until_stopped(plug_in, rate):
    sound = make_sound(rate)
    device = plug_in(sound, rate)
    heard = list(listen(lambda: True, milliseconds=240))
    assert [part.seconds for part in heard] == [0.24] * 4 + [0.04]
    assert sorted(part.arrived for part in heard) == [part.arrived for part in heard]
    found = np.concatenate([part.samples for part in heard])
    np.testing.assert_allclose(found, resample(sound, rate), atol=1e-6)
    assert device.opened is None  # Closed again.


def test_a_microphone_is_chosen_by_number_or_name(plug_in):
    plug_in(make_sound(16000), 16000)
    assert list(listen(lambda: True, device="3"))
    with pytest.raises(ConfigError, match=r"no microphone 'Desk' .*No input device matching"):
        list(listen(lambda: True, device="Desk"))


def test_a_microphone_that_goes_is_told_of(plug_in):
    plug_in(make_sound(16000), 16000, goes=True)
    heard = listen(lambda: False)
    with pytest.raises(LeapError, match="has gone"):
        for _ in range(9):
            next(heard)


def test_a_device_that_cannot_be_opened_is_one_line(plug_in, monkeypatch):
    device = plug_in(make_sound(16000), 16000)

    def fail(*_):
        raise PortAudioError("Error querying device -1\nand more")

    monkeypatch.setattr(device, "query_devices", fail)
    with pytest.raises(ConfigError, match=r"no microphone can be used \(Error .* -1\); python -m"):
        list(listen(lambda: True))


def test_what_is_not_installed_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "sounddevice", None)
    with pytest.raises(ConfigError, match=r"pip install '.*\[microphone\]'"):
        list(listen(lambda: True))


def test_so_is_the_library_under_it(monkeypatch, tmp_path):
    (tmp_path / "sounddevice.py").write_text("raise OSError('PortAudio library not found')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "sounddevice", raising=False)
    with pytest.raises(ConfigError, match=r"PortAudio library not found\); .*libportaudio2"):
        list(listen(lambda: True))
