"""Parallel text, spoken by espeak-ng in many voices: speech translation without recordings.

How a sentence is spoken depends on the seed, its part and its name alone, so that it is spoken the
same way again. Tests are spoken by voices that are never heard in training.
"""

import random
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from leap.errors import ConfigError, FileError
from leap.runtime.fbank import Samples
from leap.tasks.simul.audio.files import RATE, resample
from leap.tasks.simul.corpora.corpus import Sentence

ACCENTS = {
    "en": (
        "en-us",
        "en-gb",
        "en-gb-scotland",
        "en-gb-x-rp",
        "en-gb-x-gbclan",
        "en-gb-x-gbcwmd",
        "en-029",
    ),
}
"""Ways to speak a language; one that is not listed is spoken in the one way of its own name."""
HEARD = (
    "m1 m2 m3 m4 m5 m6 m7 f1 f2 f3 f4 Alex Andy Annie Denis Gene Jacky Lee Mario Michael adam "
    "aunty belinda benjamin boris caleb david ed edward grandma grandpa linda marcelo max michel "
    "pablo paul quincy rob robert sandro shelby steph travis victor zac"
)
UNHEARD = "m8 f5 Alicia Mike norbert iven steph3"
"""Voices of training, and those of tests alone."""
HEADER = 44
"""Bytes of the wav file before its samples."""


@dataclass(frozen=True)
class Delivery:
    """How a sentence is spoken."""

    voice: str
    """espeak-ng's name: an accent, `+`, and a voice."""
    speed: int
    """Words a minute, about."""
    pitch: int
    """From 0 to 99."""
    volume: float
    """From 0 to 1."""
    noise: float
    """Below the voice, in decibels."""
    seed: int
    """Of the noise."""
    before: float = 0.0
    after: float = 0.0
    """Seconds in which only the noise is heard."""


def draw_delivery(
    sentence: Sentence, part: str, language: str, seed: int, silence: float = 0.0
) -> Delivery:
    """How to speak a sentence.

    Args:
        sentence: by its name.
        part: any other than `train` and `valid` is a test.
        language: of the source.
        seed: another one has everything spoken otherwise.
        silence: most seconds of it before and after the sentence.
    """
    chance = random.Random(f"{seed} {part} {sentence.id}")
    accent = chance.choice(ACCENTS.get(language, (language,)))
    voices = HEARD if part in ("train", "valid") else UNHEARD
    return Delivery(
        voice=f"{accent}+{chance.choice(voices.split())}",
        speed=chance.randint(130, 190),
        pitch=chance.randint(30, 70),
        volume=chance.uniform(0.3, 1.0),
        noise=chance.uniform(15, 40),
        seed=chance.getrandbits(32),
        before=chance.uniform(0, silence),
        after=chance.uniform(0, silence),
    )


def speak(text: str, delivery: Delivery) -> Samples:
    """A text as sound, at the rate of our models, with noise, and silence around it.

    Raises:
        ConfigError: if there is no espeak-ng, or not this voice.
        FileError: if there is nothing in the text that can be said.
    """
    command = ["espeak-ng", "-v", delivery.voice, "-s", str(delivery.speed)]
    command += ["-p", str(delivery.pitch), "-b", "1", "-z", "--stdin", "--stdout"]
    try:
        done = subprocess.run(command, input=text.encode(), capture_output=True, check=False)
    except FileNotFoundError as error:
        raise ConfigError(missing()) from error
    said = done.stderr.decode(errors="replace").strip().splitlines()
    if done.returncode or (said and not done.stdout):
        why = said[0] if said else f"it exits with {done.returncode}"
        raise ConfigError(f"espeak-ng cannot speak as {delivery.voice} ({why})")
    spoken = np.frombuffer(done.stdout[HEADER:], "<i2").astype(np.float32) / 32768
    if not spoken.any():
        raise FileError(f"there is nothing to say in {text!r}")
    rate = int.from_bytes(done.stdout[24:28], "little")
    sound = resample(spoken, rate, RATE)
    sound *= delivery.volume / max(1.0, float(np.abs(sound).max()))
    level = float(np.sqrt(np.mean(sound**2))) * 10 ** (-delivery.noise / 20)
    sound = np.pad(sound, (round(delivery.before * RATE), round(delivery.after * RATE)))
    noise = np.random.default_rng(delivery.seed).standard_normal(len(sound), np.float32)
    return np.clip(sound + level * noise, -1, 1).astype(np.float32)


def speaker(
    language: str, seed: int, silence: float = 0.0
) -> Callable[[str, Sentence], tuple[Samples, str]]:
    """What speaks the sentences of a corpus: the sound, and the name of the voice."""
    if shutil.which("espeak-ng") is None:
        raise ConfigError(missing())

    def sound_of(part: str, sentence: Sentence) -> tuple[Samples, str]:
        delivery = draw_delivery(sentence, part, language, seed, silence)
        return speak(sentence.source, delivery), delivery.voice

    return sound_of


def missing() -> str:
    """What to do where there is no espeak-ng."""
    return (
        "speaking text needs espeak-ng, which is not installed: apt-get install espeak-ng, or "
        "brew install espeak-ng"
    )
