import math

import pytest

from leap.errors import ConfigError
from leap.training import Recipe


def test_steps_are_given_or_follow_from_epochs():
    assert Recipe(steps=7).n_steps(1000) == 7
    assert Recipe(epochs=1.0, batch=4).n_steps(10) == 3
    assert Recipe(epochs=0.5, batch=4).n_steps(16) == 2
    assert Recipe(epochs=1e-6, batch=4).n_steps(16) == 1
    assert Recipe().n_steps(10) == 2000


def test_a_warmup_is_a_share_of_the_steps_or_their_number():
    assert [Recipe(warmup=w).n_warmup(200) for w in (0.0, 0.05, 1.0, 2.0, 300.0)] == [
        0,
        10,
        200,
        2,
        300,
    ]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"steps": 3, "epochs": 1.0}, "steps=3 and epochs=1.0: give one of them"),
        ({"steps": 0}, "steps=0 must be more than 0"),
        ({"epochs": float("nan")}, "epochs=nan must be more than 0"),
        ({"batch": 0}, "batch=0 must be more than 0"),
        ({"learning_rate": -1.0}, r"learning_rate=-1\.0 must be more than 0"),
        ({"evaluate_every": 0}, "evaluate_every=0 must be 1 or more"),
        ({"batch": 6, "accumulate": 4}, "batch=6 does not divide into accumulate=4 parts"),
        (
            {"evaluate_every": 15, "log_every": 10},
            "evaluate_every=15 is no multiple .* log_every=10",
        ),
        ({"warmup": 1.5}, r"warmup=1\.5 is a share of the steps, .* or a whole number of them"),
        ({"weight_decay": -1.0}, r"weight_decay=-1\.0 must be 0 or more"),
        ({"weight_decay": math.nan}, "weight_decay=nan must be 0 or more"),
        ({"betas": (0.9, 1.0)}, r"betas=\(0\.9, 1\.0\) must be from 0 to less than 1"),
        ({"epsilon": 0.0}, r"epsilon=0\.0 must be more than 0"),
    ],
    ids=str,
)
def test_settings_that_cannot_work_are_named(settings, message):
    with pytest.raises(ConfigError, match=message):
        Recipe(**settings)


@pytest.mark.parametrize(
    ("recipe", "before", "is_longer"),
    [
        ({"steps": 60}, {"steps": 40, "epochs": None}, True),
        ({"steps": 40}, {"steps": 40}, False),
        ({"steps": 20}, {"steps": 40}, False),
        ({"steps": 3000}, {"steps": None}, True),  # 2000 by default.
        ({"steps": 100}, {}, False),
        ({}, {"steps": 40}, True),
        ({"epochs": 2.0}, {"steps": None, "epochs": 1}, True),
        ({"epochs": 2.0}, {"steps": 40, "epochs": None}, False),
        ({"steps": 60}, {"epochs": 1.0}, False),
        ({"steps": 60}, {"steps": "40"}, False),
    ],
    ids=str,
)
def test_a_run_is_known_to_take_more_steps_than_another(recipe, before, is_longer):
    assert Recipe(**recipe).extends(before) == is_longer
