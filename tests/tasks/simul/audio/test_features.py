import numpy as np
import pytest
import soundfile
import torch

from leap.errors import ConfigError, FileError
from leap.models.fbank import LeapformerFeatureExtractor
from leap.tasks.simul.audio.features import (
    SPEC_AUGMENT,
    SpecAugment,
    Statistics,
    load_frames,
    read_statistics,
)
from leap.tasks.simul.audio.files import Audio, write_frames, write_sound


def test_statistics_are_those_of_all_frames_together(tmp_path):
    frames = np.random.default_rng(0).normal(9, 3, (50, 80)).astype(np.float32)
    statistics = Statistics()
    for part in np.split(frames, [10, 11, 30]):
        statistics.add(part)
    statistics.save(tmp_path / "gcmvn.npz")
    mean, std = read_statistics(tmp_path / "gcmvn.npz")
    assert mean.dtype == std.dtype == np.float32
    np.testing.assert_allclose(mean, frames.mean(axis=0), rtol=1e-5)
    np.testing.assert_allclose(std, frames.std(axis=0), rtol=1e-4)


def test_silence_is_not_blown_up():
    statistics = Statistics(4)
    statistics.add(np.full((10, 4), -15.9, np.float32))
    assert (statistics.std == np.float32(1e-2)).all()


def test_statistics_that_are_none_are_named(tmp_path):
    path = tmp_path / "gcmvn.npz"
    with pytest.raises(FileError, match=r"no statistics of frames at .*gcmvn\.npz"):
        read_statistics(path)
    np.savez(path, mean=np.zeros(3))
    with pytest.raises(FileError, match=r"gcmvn\.npz is no npz file with mean and std"):
        read_statistics(path)


def test_gaps_are_drawn_anew_within_their_widths():
    frames = torch.ones(200, 80)
    augment = SpecAugment(1, 10, 1, 50, time_share=0.1)
    seen = set()
    for _ in range(50):
        found = augment(frames)
        silent = (found == 0).all(dim=1)
        masked = (found[~silent] == 0).all(dim=0)
        assert silent.sum() <= 20 and masked.sum() <= 10
        assert (found[~silent][:, ~masked] == 1).all()
        seen.add((int(silent.sum()), int(masked.sum())))
    assert len(seen) > 10
    assert max(silent for silent, _ in seen) > 15 and max(masked for _, masked in seen) > 7
    assert (frames == 1).all()


@pytest.mark.parametrize("name", SPEC_AUGMENT)
def test_published_settings_fit_the_shortest_recording(name):
    assert SPEC_AUGMENT[name](torch.ones(1, 80)).shape == (1, 80)


def test_settings_that_make_no_sense_are_refused():
    with pytest.raises(ConfigError, match="time_gaps=-1"):
        SpecAugment(time_gaps=-1)
    with pytest.raises(ConfigError, match="time_share=2"):
        SpecAugment(time_share=2.0)


def test_frames_are_those_of_the_sound_or_those_stored(tmp_path):
    extractor = LeapformerFeatureExtractor()
    sound = (0.1 * np.random.default_rng(0).standard_normal(3200)).astype(np.float32)
    write_sound(tmp_path / "a.wav", sound)
    made = load_frames(Audio(tmp_path / "a.wav"), extractor)
    (place,) = write_frames(tmp_path / "a.zip", {"a": made})
    stored = load_frames(place, extractor)
    assert made.shape == stored.shape == (20, 80)
    np.testing.assert_allclose(stored, made, atol=0.01)


def test_frames_that_do_not_fit_are_refused(tmp_path):
    extractor = LeapformerFeatureExtractor()
    (place,) = write_frames(tmp_path / "a.zip", {"a": np.zeros((5, 40), np.float32)})
    with pytest.raises(FileError, match=r"a\.zip holds frames of 40 bands, not 80"):
        load_frames(place, extractor)
    write_sound(tmp_path / "a.wav", np.zeros(100, np.float32))
    with pytest.raises(FileError, match=r"a\.wav is too short for a single frame"):
        load_frames(Audio(tmp_path / "a.wav"), extractor)


def test_what_is_no_number_is_refused_by_its_name(tmp_path):
    sound = np.zeros(1600, np.float32)
    sound[800] = np.nan
    soundfile.write(tmp_path / "a.wav", sound, 16000, subtype="FLOAT")
    (stored,) = write_frames(tmp_path / "b.zip", {"b": np.full((10, 80), np.inf, np.float32)})
    for audio, name in ((Audio(tmp_path / "a.wav"), "a.wav"), (stored, "b.zip")):
        with pytest.raises(FileError, match=f"{name}.* no finite numbers"):
            load_frames(audio, LeapformerFeatureExtractor())
