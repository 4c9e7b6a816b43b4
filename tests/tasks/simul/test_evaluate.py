"""Evaluation: scores of streams, the same by our pools and by SimulEval with our agent."""

import json

import numpy as np
import pytest

from leap.errors import ConfigError
from leap.tasks.simul.audio import write_sound
from leap.tasks.simul.corpus import Audio, Sentence
from leap.tasks.simul.evaluate import EvalConfig, evaluate, run_simuleval, translate
from leap.tasks.simul.prepare import PrepareConfig, prepare
from leap.tasks.simul.stream import load_interpreter

pytestmark = pytest.mark.usefixtures("shapes_unchecked")  # Thousands of small steps.


@pytest.fixture(scope="module")
def numbers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "numbers"
    return prepare(PrepareConfig(limit=60, vocabulary=120, output=folder))


@pytest.fixture(scope="module")
def run(numbers, random_run, tmp_path_factory):
    return random_run(tmp_path_factory.mktemp("run"), numbers.vocabulary)


def told(instances):
    return [(each.prediction, list(each.delays), each.source_length) for each in instances]


def test_an_evaluation_leaves_scores_logs_and_a_curve(numbers, run, tmp_path):
    config = EvalConfig(
        run=run, data=numbers.folder, waits=(1, "offline"), limit=6, output=tmp_path
    )
    found = evaluate(config)
    assert [each.policy for each in found] == ["wait-1", "offline"]
    assert found[0].scores.latency["LAAL"] < found[1].scores.latency["LAAL"]
    assert found[0].scores.empty == 0
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["results"][0]["bleu_signature"].startswith("nrefs:1")
    assert results["unit"] == "words"
    assert "| wait-1 |" in (tmp_path / "results.md").read_text()
    assert (tmp_path / "curve.png").stat().st_size > 1000


def test_pools_give_the_words_and_delays_of_streams_alone(numbers, run):
    sentences = numbers.sentences("test")[:7]
    interpreter = load_interpreter(run, "wait-2")
    alone, pooled = (translate(interpreter, sentences, batch=size) for size in (1, 4))
    assert told(alone) == told(pooled)
    assert [each.index for each in pooled] == list(range(7))


def test_simuleval_with_our_agent_gives_the_same_for_text(numbers, run, tmp_path):
    pytest.importorskip("simuleval")
    sentences = numbers.sentences("test")[:5]
    config = EvalConfig(run=run, data=numbers.folder)
    theirs = run_simuleval(config, sentences, "wait-2", tmp_path)
    assert told(theirs) == told(translate(load_interpreter(run, "wait-2"), sentences))


def test_simuleval_with_our_agent_gives_the_same_for_speech(numbers, random_run, tmp_path):
    pytest.importorskip("simuleval")
    run = random_run(tmp_path / "run", numbers.vocabulary, speech=True)
    random = np.random.default_rng(0)
    sentences = []
    for i, rate in enumerate((16000, 16000, 8000)):
        path = tmp_path / f"{i}.wav"
        sound = np.sin(np.cumsum(random.uniform(0.05, 1.0, rate * (i + 1) // 2))) / 2
        write_sound(path, sound.astype(np.float32), rate)
        sentences.append(Sentence("", "eins zwei drei", id=str(i), audio=Audio(path), n_frames=i))
    config = EvalConfig(run=run)
    theirs = run_simuleval(config, sentences, "wait-1/4", tmp_path / "scores")
    ours = translate(load_interpreter(run, "wait-1/4"), sentences, batch=1)
    assert told(theirs[:2]) == told(ours[:2])
    # Another rate is resampled as it comes, so words may come a segment later.
    assert theirs[2].prediction == ours[2].prediction
    assert all(each.is_timed for each in (*theirs, *ours))


def test_what_cannot_be_evaluated_is_an_error_that_says_so(numbers, run, tmp_path):
    with pytest.raises(ConfigError, match="waits or policies"):
        EvalConfig(waits=())
    with pytest.raises(ConfigError, match="no part other"):
        evaluate(EvalConfig(run=run, data=numbers.folder, part="other", output=tmp_path))
