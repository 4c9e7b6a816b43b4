import numpy as np
import pytest

from leap.errors import ConfigError
from leap.runtime.fbank import FilterBank

SETTINGS = {"mean": [12.0] * 80, "std": [3.0] * 80}


@pytest.fixture
def sound():
    random = np.random.default_rng(0)
    times = np.arange(16000) / 16000
    voice = np.sin(2 * np.pi * 220 * times) * np.hanning(len(times))
    return np.concatenate([voice / 3 + random.normal(size=16000) / 1000, np.zeros(4000)]).astype(
        "f"
    )


@pytest.mark.parametrize("rate", [8000, 16000])
def test_frames_are_kaldis(sound, rate):
    pytest.importorskip("kaldi_native_fbank", reason="Kaldi's frames are those to compare with")
    from leap.models.fbank import LeapformerFeatureExtractor

    expected = LeapformerFeatureExtractor(sampling_rate=rate, lead=0).frames(sound)
    found = FilterBank(sampling_rate=rate, lead=0).frames(sound)
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, atol=2e-3)


def test_sound_that_arrives_gives_the_frames_of_the_whole(sound):
    bank = FilterBank(**SETTINGS)
    whole = bank.normalise(bank.frames(sound))
    stream = bank.stream()
    parts = [stream.push(part) for part in np.split(sound, [1, 100, 5000, 5001])]
    np.testing.assert_array_equal(np.concatenate(parts), whole)
    assert len(whole) == bank.n_frames(len(sound))
    np.testing.assert_allclose(
        bank.energy(whole), bank.frames(sound).mean(axis=1), rtol=1e-4, atol=1e-4
    )


def test_no_sound_has_no_frames():
    assert FilterBank().raw_frames(np.zeros(100, np.float32)).shape == (0, 80)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sampling_rate": 0}, "sampling_rate=0 1000 or more"),
        ({"feature_size": 0}, "feature_size=0 must be 1 or more"),
        ({"lead": -1}, "lead=-1 0 or more"),
    ],
    ids=str,
)
def test_sound_that_cannot_be_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        FilterBank(**settings)
