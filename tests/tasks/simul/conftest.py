"""A few number words in two languages, and a vocabulary of them."""

from hashlib import sha256

import numpy as np
import pytest
import torch

from leap.models.fbank import LeapformerFeatureExtractor
from leap.runtime.streaming.vocabulary import EOS
from leap.tasks.simul.corpora.corpus import Sentence
from leap.tasks.simul.model import ModelConfig, build_model, save_model
from leap.tasks.simul.vocabulary import train_vocabulary

PAIRS = [
    ("twenty-one", "einundzwanzig"),
    ("three hundred forty-two", "dreihundertzweiundvierzig"),
    ("five thousand", "fünftausend"),
    ("seven", "sieben"),
    ("sixty-eight (again)", "achtundsechzig (noch einmal)"),
    ("one hundred and nine", "einhundertneun"),
]


@pytest.fixture(scope="session")
def sentences():
    return [Sentence(source, target, id=str(i)) for i, (source, target) in enumerate(PAIRS)]


@pytest.fixture(scope="session")
def vocabulary():
    return train_vocabulary([text for pair in PAIRS for text in pair], size=60)


@pytest.fixture(scope="session")
def random_run():
    """Writes a run folder with a model that knows nothing, but ends now and then."""
    sizes = {
        "hidden_size": 16,
        "feed_forward_size": 16,
        "n_layer": 1,
        "encoder_layers": 1,
        "n_head": 2,
    }

    def make(folder, vocabulary, *, speech=False):
        torch.manual_seed(1)
        bands = {"mean": [12.0] * 80, "std": [3.0] * 80}
        extractor = LeapformerFeatureExtractor(**bands) if speech else None
        model = build_model(ModelConfig(**sizes), vocabulary, 80 if speech else None)
        with torch.no_grad():
            model.lm_head.weight[EOS] *= 1.5
        save_model(model, vocabulary, extractor, folder)
        return folder

    return make


@pytest.fixture(scope="session")
def tones():
    """A voice that says each word as a chord of its own, for a fifth of a second."""

    def sound_of(part, sentence):
        times = np.arange(3200) / 16000
        words = []
        for word in sentence.source.split():
            pitches = 200 + 10 * np.frombuffer(sha256(word.encode()).digest()[:3], np.uint8)
            chord = sum(np.sin(2 * np.pi * pitch * times) for pitch in pitches)
            words.append(chord * np.hanning(len(times)))
        sound = np.concatenate(words)
        # A little noise: without it most bands are empty, and that is what silence is told by.
        sound += np.random.default_rng(len(sound)).standard_normal(len(sound)) / 10
        return (0.1 * sound).astype(np.float32), "tones"

    return sound_of
