import pytest

from leap.models import LeapformerForSequenceClassification
from leap.tasks.lra.data import TASKS
from leap.tasks.lra.model import PAPER, encoder_config, paper


@pytest.mark.parametrize(
    ("task", "parameters"),
    [
        ("listops", 209_802),
        ("text", 370_562),
        ("retrieval", 395_138),
        ("pathfinder", 173_954),
        ("image", 158_602),
    ],
)
def test_models_are_as_large_as_the_authors(task, parameters):
    def count(attention, **changes):
        config = encoder_config(TASKS[task], attention, **changes)
        return LeapformerForSequenceClassification(config).num_parameters()

    assert count("softmax") == parameters
    assert count("leapformer") == parameters + 2_180
    assert count("leapformer", proportion_hidden=1) == parameters + 132


def test_every_task_is_trained_as_in_the_paper_or_like_the_one_it_stands_for():
    assert {paper(task) for task in TASKS} == set(PAPER.values())
    assert paper("retrieval-standin") == PAPER["retrieval"]
    assert paper("pathfinder-easy") == PAPER["pathfinder"]
