import shutil
from dataclasses import replace

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from leap.errors import ConfigError, FileError
from leap.tasks.simul.corpora.corpus import Sentence
from leap.tasks.simul.corpora.speak import HEARD, UNHEARD, Delivery, draw_delivery, speak, speaker

needs_espeak = pytest.mark.skipif(
    shutil.which("espeak-ng") is None, reason="espeak-ng is not installed"
)
PLAIN = Delivery("en-us+m3", speed=160, pitch=50, volume=0.5, noise=40.0, seed=0)


def deliveries(part, seed=0):
    return [draw_delivery(Sentence("a", "b", id=str(i)), part, "en", seed) for i in range(200)]


def test_tests_are_spoken_by_voices_that_are_not_trained_on():
    train, test = ({d.voice.split("+")[1] for d in deliveries(p)} for p in ("train", "test"))
    assert train == set(HEARD.split()) and test == set(UNHEARD.split())
    assert not train & test


def test_delivery_varies_and_is_the_same_again():
    found = deliveries("train")
    assert found == deliveries("train") != deliveries("train", seed=1)
    for name in ("voice", "speed", "pitch", "volume", "noise"):
        assert len({getattr(delivery, name) for delivery in found}) > 20


def test_another_language_is_spoken_by_its_own_name():
    delivery = draw_delivery(Sentence("a", "b", id="1"), "train", "fr", 0)
    assert delivery.voice.startswith("fr+")


@needs_espeak
def test_a_sentence_becomes_sound():
    sound = speak("Two young men are outside.", PLAIN)
    assert sound.dtype == np.float32
    assert 16000 < len(sound) < 3 * 16000
    assert 0.1 < np.abs(sound).max() <= 1
    assert_array_equal(sound, speak("Two young men are outside.", PLAIN))


@needs_espeak
def test_slow_speech_is_longer_and_noise_is_heard():
    slow = Delivery("en-us+m3", speed=80, pitch=50, volume=0.5, noise=40.0, seed=0)
    assert len(speak("Two young men.", slow)) > 1.3 * len(speak("Two young men.", PLAIN))
    noisy = Delivery("en-us+m3", speed=160, pitch=50, volume=0.5, noise=0.0, seed=0)
    calm, loud = (speak("Two young men.", d) for d in (PLAIN, noisy))
    assert np.abs(loud - calm).std() > 10 * np.abs(calm[:100]).std()


def test_silence_is_drawn_and_changes_nothing_else():
    sentences = [Sentence("a", "b", id=str(i)) for i in range(200)]
    found = [draw_delivery(each, "train", "en", 0, silence=0.3) for each in sentences]
    assert [replace(each, before=0.0, after=0.0) for each in found] == deliveries("train")
    for name in ("before", "after"):
        drawn = [getattr(each, name) for each in found]
        assert 0 <= min(drawn) < 0.02 and 0.28 < max(drawn) <= 0.3
    assert any(each.before != each.after for each in found)


@needs_espeak
def test_silence_around_a_sentence_holds_its_noise_alone():
    around = speak("Two young men.", replace(PLAIN, before=0.25, after=0.5))
    plain = speak("Two young men.", PLAIN)
    assert len(around) == len(plain) + 12000
    for silent in (around[:4000], around[-8000:]):
        assert 0 < silent.std() < 0.1 * plain.std()
    assert around[4000 : 4000 + len(plain)].std() == pytest.approx(plain.std(), rel=0.05)


@needs_espeak
def test_a_text_that_looks_like_a_flag_is_spoken():
    assert len(speak("-v is a flag", PLAIN)) > 8000


@needs_espeak
def test_what_cannot_be_said_is_refused():
    with pytest.raises(FileError, match="nothing to say in ''"):
        speak("", PLAIN)
    unknown = Delivery("tlh-x+m3", speed=160, pitch=50, volume=0.5, noise=40.0, seed=0)
    with pytest.raises(ConfigError, match=r"espeak-ng cannot speak as tlh-x\+m3 \(.+\)"):
        speak("one", unknown)


def test_without_espeak_it_says_how_to_install_it(monkeypatch):
    monkeypatch.setenv("PATH", "")
    for attempt in (lambda: speaker("en", 0), lambda: speak("one", PLAIN)):
        with pytest.raises(ConfigError, match=r"needs espeak-ng.*apt-get install espeak-ng"):
            attempt()
