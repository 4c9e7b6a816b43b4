import io

import numpy as np
import pytest
import soundfile
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from leap.errors import FileError
from leap.tasks.simul.audio.files import (
    Audio,
    Resampler,
    decode_sound,
    read_frames,
    read_sound,
    resample,
    sound_facts,
    write_frames,
    write_sound,
)


def make_tone(rate, seconds=0.5, pitch=440.0):
    return (0.5 * np.sin(2 * np.pi * pitch * np.arange(round(rate * seconds)) / rate)).astype(
        np.float32
    )


@pytest.mark.parametrize("rate", [8000, 16000, 22050, 44100, 48000])
@pytest.mark.parametrize("channels", [1, 2], ids=["mono", "stereo"])
def test_a_tone_is_the_same_tone_at_any_rate(tmp_path, rate, channels):
    path = tmp_path / "tone.wav"
    sound = make_tone(rate)
    soundfile.write(path, np.stack([sound] * channels, axis=1), rate, subtype="FLOAT")
    found = read_sound(path)
    assert found.dtype == np.float32 and len(found) == 8000
    middle = slice(1000, -1000)
    assert np.abs(found - make_tone(16000))[middle].max() < 1e-3


@given(
    rate=st.sampled_from([8000, 16000, 22050, 48000]),
    cuts=st.lists(st.integers(0, 2000), max_size=3),
)
def test_sound_resampled_as_it_arrives_is_that_of_the_whole(rate, cuts):
    sound = np.random.default_rng(0).standard_normal(2000).astype(np.float32)
    resampler = Resampler(rate)
    pieces = [resampler.push(piece) for piece in np.split(sound, sorted(cuts))]
    pieces.append(resampler.push(sound[:0], last=True))
    assert_array_equal(np.concatenate(pieces), resample(sound, rate))


def test_a_stretch_of_a_file_is_counted_in_its_own_samples(tmp_path):
    path = tmp_path / "tone.wav"
    sound = make_tone(16000)
    write_sound(path, sound)
    found = read_sound(Audio(path, 1000, 500))
    assert_array_equal(found, read_sound(path)[1000:1500])
    assert np.abs(found - sound[1000:1500]).max() < 1e-4
    assert sound_facts(path) == (8000, 16000)


def test_bad_files_are_named(tmp_path):
    with pytest.raises(FileError, match=r"no sound file at .*gone\.wav"):
        read_sound(tmp_path / "gone.wav")
    text = tmp_path / "text.wav"
    text.write_text("not sound", encoding="utf-8")
    for read in (read_sound, sound_facts):
        with pytest.raises(
            FileError, match=r"text\.wav is no sound file that can be read"
        ) as caught:
            read(text)
        assert "\n" not in str(caught.value)
    empty = tmp_path / "empty.wav"
    write_sound(empty, np.zeros(0, np.float32))
    with pytest.raises(FileError, match=r"empty\.wav holds no sound"):
        read_sound(empty)
    nothing = tmp_path / "nothing.wav"
    nothing.touch()
    with pytest.raises(FileError, match=r"nothing\.wav is no sound file"):
        read_sound(nothing)
    short = tmp_path / "short.wav"
    write_sound(short, make_tone(16000, 0.01))
    with pytest.raises(FileError, match=r"short\.wav (is no sound file|holds no sound)"):
        read_sound(Audio(short, 5000, 100))


def test_a_silent_file_is_silence(tmp_path):
    path = tmp_path / "silent.wav"
    write_sound(path, np.zeros(1600, np.float32))
    assert_array_equal(read_sound(path), np.zeros(1600))


def test_stored_frames_come_back_with_half_the_digits(tmp_path):
    frames = {
        name: np.random.default_rng(i).uniform(-16, 20, (7 + i, 80)).astype(np.float32)
        for i, name in enumerate("abc")
    }
    places = write_frames(tmp_path / "features.zip", frames)
    for place, values in zip(places, frames.values(), strict=True):
        found = read_frames(place)
        assert found.dtype == np.float32
        assert_array_equal(found, values.astype(np.float16).astype(np.float32))
    assert [path.name for path in tmp_path.iterdir()] == ["features.zip"]


def test_features_that_are_none_are_named(tmp_path):
    with pytest.raises(FileError, match="no features at"):
        read_frames(Audio(tmp_path / "gone.zip", 3, 10))
    (place,) = write_frames(tmp_path / "some.zip", {"a": np.zeros((3, 80), np.float32)})
    with pytest.raises(FileError, match="holds no features at byte 7"):
        read_frames(Audio(place.path, 7, 100))
    content = io.BytesIO()
    np.save(content, np.zeros(4))
    (tmp_path / "flat.npy").write_bytes(content.getvalue())
    with pytest.raises(FileError, match="no frames of features"):
        read_frames(Audio(tmp_path / "flat.npy"))


def test_a_sound_file_in_memory_is_read_like_one_on_disk(tmp_path):
    write_sound(tmp_path / "hum.wav", np.linspace(-0.5, 0.5, 800, dtype=np.float32), 8000)
    content = (tmp_path / "hum.wav").read_bytes()
    assert np.array_equal(decode_sound(content), read_sound(tmp_path / "hum.wav"))
    with pytest.raises(FileError, match="no sound file"):
        decode_sound(b"RIFF")
