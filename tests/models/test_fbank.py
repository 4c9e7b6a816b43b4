import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal
from transformers import Speech2TextFeatureExtractor

from leap.errors import ConfigError, InputError
from leap.models.fbank import LeapformerFeatureExtractor

pytest.importorskip("kaldi_native_fbank", reason="kaldi-native-fbank is not installed")

RATE = 16000


def make_sound(seconds, seed=0):
    """Something between a hum and a hiss."""
    chance = np.random.default_rng(seed)
    times = np.arange(round(seconds * RATE)) / RATE
    hum = np.sin(2 * np.pi * 220 * times) * np.sin(2 * np.pi * 3 * times)
    return (0.2 * hum + 0.05 * chance.standard_normal(len(times))).astype(np.float32)


@given(cuts=st.lists(st.integers(0, RATE // 4), max_size=6))
def test_a_stream_gives_the_frames_of_the_whole_bit_for_bit(cuts):
    sound = make_sound(0.25)
    extractor = LeapformerFeatureExtractor(mean=[9.0] * 80, std=[3.0] * 80)
    stream = extractor.stream()
    pieces = [stream.push(piece) for piece in np.split(sound, sorted(cuts))]
    whole = extractor(sound, RATE).input_features[0]
    assert_array_equal(np.concatenate(pieces), whole)
    assert len(whole) == extractor.n_frames(len(sound)) == 25


def test_every_segment_of_320_ms_completes_32_frames():
    stream = LeapformerFeatureExtractor().stream()
    segments = np.split(make_sound(1.6), 5)
    assert [len(stream.push(segment)) for segment in segments] == [32] * 5


def test_agrees_with_hugging_faces_own_frames():
    sound = make_sound(1)
    theirs = Speech2TextFeatureExtractor(do_ceptral_normalize=False)(
        sound, sampling_rate=RATE
    ).input_features[0]
    ours = LeapformerFeatureExtractor(lead=0).frames(sound)
    assert ours.shape == theirs.shape
    assert np.abs(ours - theirs).mean() < 1e-4


def test_the_same_sound_gives_the_same_frames():
    extractor = LeapformerFeatureExtractor()
    assert_array_equal(extractor.frames(make_sound(0.3)), extractor.frames(make_sound(0.3)))


def test_integers_and_lists_are_sound_too():
    extractor = LeapformerFeatureExtractor()
    integers = (make_sound(0.1) * 32768).astype(np.int16)
    floats = integers.astype(np.float32) / 32768
    expected = extractor(floats).input_features
    assert_array_equal(extractor(integers).input_features, expected)
    assert_array_equal(extractor(floats.tolist()).input_features, expected)
    assert_array_equal(extractor(floats[None]).input_features, expected)


def test_a_batch_is_padded_and_masked():
    extractor = LeapformerFeatureExtractor(mean=[1.0] * 80, std=[2.0] * 80)
    short, long = make_sound(0.2), make_sound(0.5)
    batch = extractor([short, long], RATE, return_tensors="pt")
    assert batch.input_features.shape == (2, 50, 80)
    assert batch.input_features.dtype == torch.float32
    assert batch.attention_mask.sum(dim=1).tolist() == [20, 50]
    assert (batch.input_features[0, 20:] == 0).all()
    assert_array_equal(batch.input_features[0, :20], extractor(short).input_features[0])


def test_frames_are_normalised():
    sound = make_sound(0.5)
    raw = LeapformerFeatureExtractor().frames(sound)
    extractor = LeapformerFeatureExtractor(mean=raw.mean(axis=0), std=raw.std(axis=0))
    frames = extractor(sound).input_features[0]
    assert np.allclose(frames.mean(axis=0), 0, atol=1e-4)
    assert np.allclose(frames.std(axis=0), 1, atol=1e-4)


def test_silence_is_finite():
    frames = LeapformerFeatureExtractor()(np.zeros(1600, np.float32)).input_features[0]
    assert frames.shape == (10, 80)
    assert np.isfinite(frames).all()


def test_saved_and_loaded_it_gives_the_same_frames(tmp_path):
    sound = make_sound(0.2)
    extractor = LeapformerFeatureExtractor(mean=[1 / 3] * 80, std=[0.7] * 80)
    extractor.save_pretrained(tmp_path)
    again = LeapformerFeatureExtractor.from_pretrained(tmp_path)
    assert_array_equal(again(sound).input_features, extractor(sound).input_features)


def test_a_stream_can_be_forked():
    stream = LeapformerFeatureExtractor().stream()
    sound = make_sound(0.2)
    stream.push(sound[:1000])
    fork = stream.fork()
    stream.push(make_sound(0.3, seed=1))
    assert_array_equal(
        fork.push(sound[1000:]),
        LeapformerFeatureExtractor().frames(sound)[len(sound[:1000]) // 160 :],
    )


def test_what_is_no_sound_of_ours_is_refused(shapes_unchecked):
    extractor = LeapformerFeatureExtractor()
    with pytest.raises(InputError, match=r"8000 samples per second, not 16000; resample"):
        extractor(make_sound(0.1), 8000)
    with pytest.raises(InputError, match="recording 1 of 2 is too short"):
        extractor([make_sound(0.1), make_sound(0.005)])
    with pytest.raises(InputError, match="recording 0 of 1 is too short"):
        extractor(np.zeros(0, np.float32))
    with pytest.raises(InputError, match=r"the shape \[1600, 2\]"):
        extractor([np.zeros((1600, 2), np.float32)])
    for make in (extractor, extractor.frames):
        with pytest.raises(InputError, match="no finite numbers"):
            make(np.full(1600, np.nan, np.float32))
        for sound in (np.full(1600, 99, np.int32), [2] * 1600, np.full(1600, 9e3, np.float32)):
            with pytest.raises(InputError, match=r"a sample of \d+; give numbers from -1 to 1"):
                make(sound)


def test_statistics_that_do_not_fit_are_refused():
    with pytest.raises(ConfigError, match="mean has 3 values, but there are feature_size=80"):
        LeapformerFeatureExtractor(mean=[0.0] * 3)
    with pytest.raises(ConfigError, match="std must be more than 0"):
        LeapformerFeatureExtractor(std=[0.0] * 80)
