"""The toy pair from end to end: prepared, learnt in seconds, and translated while it arrives."""

import pytest

from leap.tasks.simul.corpora.numbers import numbers_corpus
from leap.tasks.simul.corpora.parallel import write_parallel
from leap.tasks.simul.evaluate import EvalConfig, evaluate
from leap.tasks.simul.prepare import PrepareConfig, prepare
from leap.tasks.simul.scoring.metrics import read_instances
from leap.tasks.simul.train import TrainConfig, train

pytestmark = pytest.mark.usefixtures("shapes_unchecked")  # Thousands of small steps.

SMALL = {
    "hidden_size": 64,
    "feed_forward_size": 128,
    "n_layer": 1,
    "encoder_layers": 1,
    "dropout": 0.0,
    "label_smoothing": 0.0,
    "waits": (1, 3, "offline"),
    "tokens": 512,
    "steps": 400,
    "learning_rate": 5e-3,
}


def test_numbers_are_learnt_and_one_has_to_wait_for_the_units(tmp_path):
    write_parallel(numbers_corpus(2000, 60, 100, largest=99, longest=2), tmp_path / "text")
    data, run, scores = (tmp_path / name for name in ("data", "run", "scores"))
    prepare(PrepareConfig(corpus="text", data=tmp_path / "text", vocabulary=90, output=data))
    train(TrainConfig(**SMALL, data=data, output=run))
    waits = SMALL["waits"]
    found = evaluate(EvalConfig(run=run, data=data, waits=waits, batch=100, output=scores))
    right, late = {}, {}
    for each in found:
        instances = read_instances(scores / each.name / "instances.log")
        right[each.name] = sum(one.prediction == one.reference for one in instances)
        late[each.name] = each.scores.latency["LAAL"]
    # Of 100. One that knows nothing has none right; one that cannot wait, those without units.
    assert right["wait-1"] < 50
    assert right["wait-3"] > 80
    assert right["offline"] > 80
    assert late["wait-1"] < late["wait-3"] < late["offline"]
