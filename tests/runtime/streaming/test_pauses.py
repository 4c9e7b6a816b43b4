"""Pauses by silero-vad, where it is installed: voices, not noise, and however the sound is cut."""

import numpy as np
import pytest

from leap.errors import ConfigError
from leap.models.fbank import LeapformerFeatureExtractor
from leap.runtime.streaming import pauses
from leap.runtime.streaming.pauses import Silero, are_quiet, best_installed, make_detector
from leap.runtime.streaming.sources import SpeechSource
from leap.tasks.files import data_folder
from leap.tasks.simul.corpora.prompts import SPEAKER, prompts_sound, read_prompts

BANDS = {"mean": [12.0] * 80, "std": [3.0] * 80}


@pytest.fixture(scope="module")
def silero():
    pytest.importorskip("onnxruntime")
    return pytest.importorskip("silero_vad")


@pytest.fixture(scope="module")
def speech():
    """Two prompts of a telephone exchange with a second of silence between them."""
    if not (data_folder() / "asterisk-prompts" / f"{SPEAKER}.wav.tar.xz").is_file():
        pytest.skip("no recordings; see LEAP_DATA")
    sound_of = prompts_sound()
    chosen = sorted(read_prompts("es").parts["train"], key=lambda each: len(each.source))
    one, two = (sound_of("train", sentence)[0] for sentence in chosen[-60:-58])
    return np.concatenate([one[:48000], np.zeros(16000, np.float32), two[:48000]])


def told(sound, cuts):
    extractor = LeapformerFeatureExtractor(**BANDS)
    detector, frames = make_detector("silero", extractor), extractor.stream()
    found, n_frames = [], 0
    for part in np.split(sound, cuts):
        new = frames.push(part)
        n_frames += len(new)
        detector = detector.fork()
        found.append(detector.push(part, new))
    found.append(detector.finish(n_frames - sum(map(len, found))))
    return np.concatenate(found)[:n_frames]


def test_silence_between_voices_is_quiet_and_voices_are_not(silero, speech):
    quiet = told(speech, [])
    assert quiet[330:385].all()
    assert (~quiet[30:270]).mean() > 0.8 and (~quiet[450:690]).mean() > 0.8


def test_noise_as_loud_as_voices_is_a_pause(silero, speech):
    """Which by its loudness it is not."""
    noisy = speech.copy()
    noise = np.random.default_rng(0).standard_normal(16000).astype(np.float32)
    noisy[48000:64000] += 0.02 * noise
    extractor = LeapformerFeatureExtractor(**BANDS)
    assert not are_quiet(extractor.normalise(extractor.frames(noisy)))[305:395].any()
    assert told(noisy, [])[330:385].all()


def test_what_is_quiet_does_not_depend_on_how_the_sound_is_cut(silero, speech):
    whole = told(speech, [])
    for size in (160, 777, 5120):
        assert (told(speech, range(size, len(speech), size)) == whole).all()


def test_sources_are_cut_in_pauses_and_go_on_from_a_file(silero, speech):
    def sentences(size, saved=False):
        extractor = LeapformerFeatureExtractor(**BANDS)
        source = SpeechSource(extractor, 8, 4, reset=1000, pauses="silero")
        found, n_read = [0], 0
        for part in [*np.split(speech, range(size, len(speech), size)), None]:
            if part is None:
                source.finish()
            else:
                source = source.fork()
                source.push(part)
            if saved:
                kept = source.kept()
                is_ended = source.is_ended
                source = SpeechSource(extractor, 8, 4, reset=1000, pauses="silero")
                source.restore(kept)
                source.is_ended = is_ended
            while (chunk := source.take(n_read)) is not None:
                found[-1] += len(chunk.content)
                n_read += chunk.n_states
                if chunk.is_last:
                    found.append(n_read := 0)
        return found

    whole = sentences(len(speech))
    assert len(whole) > 2
    assert sentences(5120) == whole
    assert sentences(7000, saved=True) == whole


def test_without_it_pauses_are_told_by_loudness_and_asking_for_it_is_one_line(monkeypatch):
    monkeypatch.setattr(pauses, "find_spec", lambda name: None)
    assert best_installed() == "loudness"
    monkeypatch.setitem(__import__("sys").modules, "silero_vad", None)
    pauses._network.cache_clear()
    with pytest.raises(ConfigError, match=r"needs silero-vad: pip install .*, or use pauses=loud"):
        Silero(240)
    with pytest.raises(ConfigError, match="8000; use pauses=loudness"):
        make_detector("silero", LeapformerFeatureExtractor(sampling_rate=8000))
