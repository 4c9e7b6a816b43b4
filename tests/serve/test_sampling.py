"""Tokens are drawn as their settings say."""

import numpy as np
import pytest

from leap.errors import InputError
from leap.serve.sampling import Sampler, Sampling, log_probabilities


@pytest.mark.parametrize("top_p", [1.0, 0.6])
def test_sampling_follows_the_distribution(top_p):
    logits = np.log(np.array([0.1, 0.4, 0.2, 0.3], np.float32))
    sampler = Sampler(Sampling(temperature=1.0, top_p=top_p, seed=0))
    drawn = np.bincount([sampler.choose(logits) for _ in range(4000)], minlength=4) / 4000
    expected = [0.1, 0.4, 0.2, 0.3] if top_p == 1 else [0, 4 / 7, 0, 3 / 7]
    assert drawn == pytest.approx(expected, abs=0.03)


def test_a_temperature_close_to_0_is_greedy_and_a_seed_may_be_negative():
    logits = np.array([1.0, 5.0, -3e38, 4.9], np.float32)
    for temperature in (0.0, 1e-300, 1e-9):
        assert Sampler(Sampling(temperature=temperature, seed=-1)).choose(logits) == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -1.0}, "temperature=-1.0 must be 0 or more"),
        ({"temperature": float("nan")}, "temperature=nan must be 0 or more"),
        ({"top_p": 0.0}, "top_p=0.0 must be more than 0"),
        ({"seed": 2**64}, "must fit into 64 bits"),
    ],
)
def test_sampling_that_cannot_be_is_refused(settings, message):
    with pytest.raises(InputError, match=message):
        Sampling(**settings)


def test_log_probabilities_are_those_of_temperature_1():
    chances = np.array([0.1, 0.4, 0.2, 0.3])
    logits = (np.log(chances) + 7).astype(np.float32)
    assert np.exp(log_probabilities(logits)) == pytest.approx(chances, rel=1e-6)
