import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leap.errors import ConfigError, FileError, InputError
from leap.tasks.simul.scoring.metrics import (
    LATENCIES,
    Instance,
    latency,
    read_instances,
    real_time,
    score,
)


@st.composite
def settings(draw):
    """Of a sentence, with words read and written in any order, where computing takes its time."""
    source = draw(st.integers(1, 12)) * draw(st.sampled_from([1, 320]))
    delays = sorted(draw(st.lists(st.integers(1, source), min_size=1, max_size=15)))
    costs = draw(st.lists(st.floats(0, 500), min_size=len(delays), max_size=len(delays)))
    total, elapsed = 0.0, []
    for delay, cost in zip(delays, costs, strict=True):
        total += cost
        elapsed.append(delay + total)
    words = draw(st.integers(1, 15))
    return {
        "prediction": " ".join("x" * len(delays)),
        "reference": " ".join("y" * words),
        "delays": delays,
        "source_length": source,
        "elapsed": elapsed,
    }


def as_log(instance, index=0):
    return json.dumps(
        {
            "index": index,
            "prediction": instance.prediction,
            "delays": list(instance.delays),
            "elapsed": list(instance.elapsed),
            "prediction_length": len(instance.delays),
            "reference": instance.reference,
            "source": ["a"],
            "source_length": instance.source_length,
        }
    )


@given(drawn=st.lists(settings(), min_size=1, max_size=4))
def test_agrees_with_simuleval(drawn):
    many = [Instance(**each) for each in drawn]
    scorers = pytest.importorskip(
        "simuleval.evaluator.scorers.latency_scorer", reason="SimulEval is not installed"
    )
    from simuleval.evaluator.instance import LogInstance

    scores = score(many)
    theirs = {i: LogInstance(as_log(instance, i)) for i, instance in enumerate(many)}
    for aware, ours in ((False, scores.latency), (True, scores.computation_aware)):
        if not ours:
            continue
        for name in ("AL", "LAAL", "AP", "DAL"):
            scorer = scorers.LATENCY_SCORERS_DICT[name](computation_aware=aware)
            assert ours[name] == pytest.approx(scorer(theirs), rel=1e-9)


@given(drawn=st.lists(settings(), min_size=1, max_size=4))
def test_agrees_with_omnisteval(drawn):
    many = [Instance(**each) for each in drawn]
    scoring = pytest.importorskip("omnisteval.scoring", reason="OmniSTEval is not installed")
    from omnisteval.data import Instance as Theirs

    theirs = [
        Theirs(
            prediction=instance.prediction,
            reference=instance.reference,
            source_length=instance.source_length,
            emission_cu=list(instance.delays),
            emission_ca=list(instance.elapsed),
        )
        for instance in many
    ]
    scores = score(many)
    for aware, ours in ((False, scores.latency), (True, scores.computation_aware)):
        for name, value in ours.items():
            scorer = getattr(scoring, f"{name}Scorer")(computation_aware=aware)
            assert value == pytest.approx(scorer(theirs), rel=1e-9, nan_ok=True)
    assert scores.bleu == pytest.approx(scoring.SacreBLEUScorer()(theirs))
    assert scores.chrf == pytest.approx(scoring.ChrFScorer()(theirs))


def test_wait_3_lags_by_three_words():
    instance = Instance("a b c d e", "a b c d e", delays=[3, 4, 5, 5, 5], source_length=5)
    assert instance.latency()["AL"] == pytest.approx(3)
    assert instance.latency()["YAAL"] == pytest.approx(3)


def test_a_translation_gains_nothing_by_length():
    instance = Instance("a b c d", "a b", delays=[1, 2, 3, 4], source_length=4)
    latency = instance.latency()
    assert latency["AL"] == pytest.approx(-0.5)
    assert latency["LAAL"] == pytest.approx(1)


def test_yaal_looks_at_words_before_the_end_of_the_source_or_of_its_stream():
    times, pace = [1, 2, 5, 9], 4 / 4
    before = (1 + 2 - pace) / 2
    assert latency(times, 4, "a b c")["YAAL"] == pytest.approx(before)
    in_stream = (1 + 2 - pace + 5 - 2 * pace) / 3
    assert latency(times, 4, "a b c", end=9)["YAAL"] == pytest.approx(in_stream)


def test_without_a_reference_the_translation_is_as_long_as_it_should_be():
    times = [1, 2, 3, 4]
    assert latency(times, 8) == latency(times, 8, "a b c d") != latency(times, 8, "a b c d e")


def test_an_offline_translation_has_no_yaal():
    assert math.isnan(Instance("a b", "a b", [4, 4], source_length=4).latency()["YAAL"])


@given(drawn=settings())
def test_real_time_lies_between_what_was_heard_and_all_computing(drawn):
    instance = Instance(**drawn)
    times = real_time(instance.delays, instance.elapsed)
    for delay, time, total in zip(instance.delays, times, instance.elapsed, strict=True):
        assert delay - 1e-6 <= time <= total + 1e-6


def test_computing_while_listening_does_not_add_up():
    delays = [320 * i for i in range(1, 1001)]
    elapsed = [delay + 20 * i for i, delay in enumerate(delays, start=1)]
    assert real_time(delays, elapsed) == [delay + 20 for delay in delays]
    # A slow machine falls behind, and stays there.
    slow = [delay + 640 * i for i, delay in enumerate(delays, start=1)]
    assert real_time(delays, slow)[-1] == 320 + 640 * 1000


def test_empty_translations_are_counted_and_have_no_latency():
    said = Instance("a b", "a b", [1, 2], source_length=2)
    silent = Instance("", "a b", [], source_length=2)
    scores = score([said, silent])
    assert (scores.sentences, scores.empty) == (2, 1)
    assert scores.latency == said.latency()
    assert score([silent]).latency == {}
    with pytest.raises(InputError, match="has no words"):
        silent.latency()


def test_text_has_no_computation_aware_latency():
    scores = score([Instance("a b", "a b", [1, 2], source_length=2, elapsed=[0, 0])])
    assert scores.computation_aware == scores.real_time == {}


def test_computation_aware_latency_is_of_all_sentences_or_none():
    timed = Instance("a b", "a b", [1, 2], source_length=2, elapsed=[11, 22])
    untimed = Instance("a b", "a b", [1, 2], source_length=2, elapsed=[0, 0])
    silent = Instance("", "a b", [], source_length=2)
    expected = pytest.approx(timed.latency(timed.elapsed), nan_ok=True)
    assert score([timed, silent]).computation_aware == expected
    scores = score([timed, untimed])
    assert scores.computation_aware == scores.real_time == {}


def test_computing_is_what_elapsed_has_more_than_the_last_delay():
    assert Instance("a b", "a b", [1, 2], source_length=2, elapsed=[11, 22]).computing == 20
    assert Instance("", "a b", [], source_length=2).computing == 0


def test_scores_come_with_their_signature_and_as_json():
    scores = score([Instance("a b", "a b", [2, 2], source_length=2)])
    assert "tok:13a" in scores.bleu_signature and "version:" in scores.chrf_signature
    assert json.loads(json.dumps(scores.to_json()))["latency"]["YAAL"] is None
    assert set(scores.latency) == set(LATENCIES)


def test_a_log_is_read(tmp_path):
    path = tmp_path / "instances.log"
    instance = Instance("a b", "a b c\n", [1, 2], source_length=2, elapsed=[0, 0])
    path.write_text(as_log(instance) + "\n", encoding="utf-8")
    (found,) = read_instances(path)
    assert found.latency() == instance.latency()


def test_a_broken_log_is_named(tmp_path):
    path = tmp_path / "instances.log"
    with pytest.raises(FileError, match="cannot read"):
        read_instances(path)
    path.write_text("{}\n", encoding="utf-8")
    with pytest.raises(FileError, match=r"line 1 of .*instances\.log is no instance"):
        read_instances(path)


def test_what_cannot_be_scored_is_refused():
    with pytest.raises(InputError, match="no sentences"):
        score([])
    with pytest.raises(ConfigError, match=r"tokenize='12a' is not known .* 13a"):
        score([Instance("a", "a", [1], source_length=1)], tokenize="12a")
