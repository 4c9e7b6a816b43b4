"""Evaluation: scores of streams, the same by our pools and by SimulEval with our agent."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from leap.cli import main
from leap.errors import ConfigError, InputError
from leap.runtime.streaming.policies import WaitK
from leap.runtime.streaming.stream import LONGEST_WORD
from leap.tasks.simul import evaluate as evaluating
from leap.tasks.simul import prepare as preparing
from leap.tasks.simul.audio.files import Audio, write_sound
from leap.tasks.simul.corpora.corpus import Sentence
from leap.tasks.simul.evaluate import (
    EvalConfig,
    Evaluated,
    evaluate,
    notes,
    run_simuleval,
    tables,
    translate,
)
from leap.tasks.simul.prepare import PrepareConfig, prepare
from leap.tasks.simul.scoring.longform import join, sound_of, translate_long
from leap.tasks.simul.scoring.metrics import Instance, Scores, read_instances, score
from leap.tasks.simul.scoring.simuleval import write_simuleval
from leap.tasks.simul.streaming.stream import load_trained

pytestmark = pytest.mark.usefixtures("shapes_unchecked")  # Thousands of small steps.


@pytest.fixture(scope="module")
def numbers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "numbers"
    return prepare(PrepareConfig(limit=60, vocabulary=150, output=folder))


@pytest.fixture(scope="module")
def run(numbers, random_run, tmp_path_factory):
    return random_run(tmp_path_factory.mktemp("run"), numbers.vocabulary)


def told(instances):
    return [(each.prediction, list(each.delays), each.source_length) for each in instances]


def test_an_evaluation_leaves_scores_logs_and_a_curve(numbers, run, tmp_path):
    config = EvalConfig(
        run=run, data=numbers.folder, waits=(1, "offline"), limit=3, output=tmp_path
    )
    found = evaluate(config)
    assert [each.name for each in found] == ["wait-1", "offline"]
    assert found[0].scores.latency["LAAL"] < found[1].scores.latency["LAAL"]
    assert found[0].scores.empty == 0
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["results"][0]["bleu_signature"].startswith("nrefs:1")
    assert results["unit"] == "words"
    text = (tmp_path / "results.md").read_text()
    assert "| wait-1 |" in text and "BLEU nrefs:1" in text and "chrF nrefs:1" in text
    assert (tmp_path / "curve.png").stat().st_size > 1000


def test_pools_give_the_words_and_delays_of_streams_alone(numbers, run):
    sentences = numbers.sentences("test")[:5]
    interpreter = load_trained(run).interpreter("wait-2")
    alone, pooled = (translate(interpreter, sentences, batch=size) for size in (1, 3))
    assert told(alone) == told(pooled)
    assert [each.index for each in pooled] == list(range(5))


def test_simulevals_own_command_gives_the_same_for_text(numbers, run, tmp_path):
    pytest.importorskip("simuleval", reason="SimulEval is not installed")
    ours = {"run": run, "data": numbers.folder, "waits": (2,), "limit": 3, "beam": 3}
    (found,) = evaluate(EvalConfig(**ours, output=tmp_path / "ours"))
    source, target = write_simuleval(tmp_path, "test", numbers.sentences("test")[:3])
    command = [Path(sys.executable).with_name("simuleval")]
    command += ["--agent-class", "leap.tasks.simul.agents.TextAgent", "--run", run]
    command += ["--policy", "wait-2", "--beam", "3", "--source", source, "--target", target]
    command += ["--output", tmp_path / "theirs", "--no-progress-bar"]
    command += ["--quality-metrics", "BLEU", "--latency-metrics", "LAAL", "AL", "DAL", "AP"]
    subprocess.run(command, check=True, capture_output=True)
    logs = [read_instances(tmp_path / who / "instances.log") for who in ("ours/wait-2", "theirs")]
    assert told(logs[0]) == told(logs[1])
    names, values = (tmp_path / "theirs/scores.tsv").read_text().split("\n")[:2]
    theirs = dict(zip(names.split("\t"), map(float, values.split("\t")), strict=True))
    assert theirs.pop("BLEU") == pytest.approx(found.scores.bleu, abs=1e-3)
    assert theirs == {
        name: pytest.approx(found.scores.latency[name], abs=1e-3)
        for name in ("LAAL", "AL", "DAL", "AP")
    }


def test_simuleval_with_our_agent_gives_the_same_for_speech(numbers, random_run, tmp_path):
    pytest.importorskip("simuleval", reason="SimulEval is not installed")
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
    ours = translate(load_trained(run).interpreter("wait-1/4"), sentences, batch=1)
    assert told(theirs[:2]) == told(ours[:2])
    # Another rate is resampled as it comes, so words may come a segment later.
    assert theirs[2].prediction == ours[2].prediction
    assert all(each.is_timed for each in (*theirs, *ours))


@pytest.fixture(scope="module")
def spoken(numbers, random_run, tmp_path_factory):
    """A model of speech, and sentences of it."""
    folder = tmp_path_factory.mktemp("spoken")
    run = random_run(folder / "run", numbers.vocabulary, speech=True)
    return run, [make_spoken(folder / f"{i}.wav", n) for i, n in enumerate((9600, 4000, 7001))]


@pytest.fixture(scope="module")
def digits(tmp_path_factory, tones):
    """Numbers, each word a chord of its own."""
    folder = tmp_path_factory.mktemp("data") / "digits"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preparing, "speaker", lambda *_: tones)
        return prepare(PrepareConfig(limit=20, vocabulary=60, speak=True, output=folder))


@pytest.fixture(scope="module")
def digits_run(digits, random_run, tmp_path_factory):
    return random_run(tmp_path_factory.mktemp("digits"), digits.vocabulary, speech=True)


def make_spoken(path, n):
    sound = np.sin(np.cumsum(np.linspace(0.05, 0.05 + n / 16000, n))) / 2
    write_sound(path, sound.astype(np.float32))
    return Sentence("", "eins zwei", id=path.stem, audio=Audio(path), n_frames=n // 160)


def test_latency_with_computing_is_told_where_it_was_measured(spoken):
    run, sentences = spoken
    alone = score(translate(load_trained(run).interpreter("wait-1/4"), sentences, batch=1))
    first, added, real = tables([Evaluated("wait-1/4", alone, 1.0, 0.5)])
    assert first.columns[-1] == "RTF" and first.rows[0][-1] == "0.500"
    for table in (added, real):
        assert table.columns == ["policy", "LAAL", "AL", "DAL", "AP", "YAAL"]
    assert "(CA)" in added.title and "real time" in real.title
    assert float(first.rows[0][3]) < float(real.rows[0][1]) <= float(added.rows[0][1])


def test_computing_is_timed_of_all_sentences_or_of_none(spoken):
    run, sentences = spoken
    interpreter = load_trained(run).interpreter("wait-1/4")
    for batch, is_timed in ((1, True), (2, False), (64, False)):
        found = translate(interpreter, sentences, batch=batch)
        assert {each.is_timed for each in found} == {is_timed}
    (alone,) = translate(interpreter, sentences[:1], batch=2)
    assert not alone.is_timed


def test_simuleval_is_told_the_ratio_and_its_log_tells_the_computing(
    digits, digits_run, tmp_path, monkeypatch
):
    asked = []

    def run_simuleval(config, sentences, policy, folder):
        asked.append(policy)
        told = {"reference": "eins zwei", "source_length": 1000}
        return [
            Instance("eins zwei", delays=[320, 640], elapsed=[330, 690], **told),
            Instance("eins", delays=[1000], elapsed=[1010], **told),
            Instance("", delays=[], elapsed=[], **told),
        ]

    monkeypatch.setattr(evaluating, "run_simuleval", run_simuleval)
    config = {"run": digits_run, "data": digits.folder, "engine": "simuleval", "output": tmp_path}
    found = evaluate(
        EvalConfig(**config, waits=(3, "offline"), policies=("wait-5/2", "align-2"), ratio=1)
    )
    assert asked == ["wait-3/1", "offline", "wait-5/2", "align-2"]
    assert [each.name for each in found] == asked
    assert found[0].seconds == pytest.approx(0.06)
    assert found[0].real_time_factor == pytest.approx(0.03)
    evaluate(EvalConfig(**config, waits=(3,)))
    assert asked[-1] == "wait-3/4"


def test_where_nothing_was_timed_there_is_no_real_time_factor(numbers, run, tmp_path, monkeypatch):
    text = Instance("eins", "eins", [1], source_length=1, elapsed=[0])
    monkeypatch.setattr(evaluating, "run_simuleval", lambda *_: [text])
    config = {"run": run, "data": numbers.folder, "engine": "simuleval", "output": tmp_path}
    (found,) = evaluate(EvalConfig(**config, waits=(3,)))
    assert found.name == "wait-3"
    assert found.seconds is None is found.real_time_factor
    scores = found.scores
    shown = tables([Evaluated("a", scores, None, None), Evaluated("b", scores, 1.0, 0.5)])[0]
    assert [row[-1] for row in shown.rows] == ["", "0.500"]


def test_a_run_is_evaluated_as_it_was_trained(numbers, random_run, tmp_path):
    run = tmp_path / "run"
    random_run(run / "model", numbers.vocabulary)
    (run / "config.json").write_text('{"ratio": 2, "chunk_sizes": [6, 3, 0]}')
    for folder in (run, run / "model"):
        interpreter = load_trained(folder).interpreter("wait-3")
        assert interpreter.policy == WaitK(3, 2) and interpreter.chunk_size == 3
        assert load_trained(folder).interpreter("wait-3/1").policy == WaitK(3, 1)
    assert load_trained(run).interpreter("offline").chunk_size == 0
    assert load_trained(run).interpreter("wait-3", chunk_size=1).chunk_size == 1
    config = {"run": run, "data": numbers.folder, "limit": 1, "waits": (3,)}
    policies = ("wait-2", "wait-2/1")
    found = evaluate(EvalConfig(**config, policies=policies, output=tmp_path / "its"))
    assert [each.name for each in found] == ["wait-3/2", "wait-2/2", "wait-2/1"]
    (found,) = evaluate(EvalConfig(**config, ratio=1, output=tmp_path / "other"))
    assert found.name == "wait-3/1"  # As wait-3 is another of this run.
    (run / "config.json").write_text('{"ratio": 2, "chunk_sizes": [6, 3]}')
    assert load_trained(run).interpreter("offline").chunk_size == 6
    (run / "config.json").write_text('{"ratio": null, "chunk_sizes": null}')
    assert load_trained(run).interpreter("wait-3").policy == WaitK(3, 1)
    for policy in ("wait-3", "offline"):
        assert load_trained(run).interpreter(policy).chunk_size == 1


def test_what_is_read_as_a_whole_has_no_resets(digits, digits_run, tmp_path, capsys):
    config = {"run": digits_run, "data": digits.folder, "limit": 2, "long_form": "all"}
    found = evaluate(EvalConfig(**config, waits=("offline", 1), reset=20, output=tmp_path / "a"))
    assert [each.name for each in found] == ["offline", "wait-1/4", "wait-1/4 reset 20"]
    assert notes(found)[0] == "offline: not tried with resets, as it waits for the end"
    assert "- offline: not tried with resets" in (tmp_path / "a/results.md").read_text()
    whole = EvalConfig(**config, waits=("offline", 1), reset=20, chunk_size=0, output=tmp_path)
    with pytest.raises(ConfigError, match="reset does not go with chunk_size=0"):
        evaluate(whole)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]  # Before anything was translated.
    read = EvalConfig(**config, waits=("offline",), reset=20, chunk_size=4, output=tmp_path / "b")
    assert [each.name for each in evaluate(read)] == ["offline", "offline reset 20"]


def test_a_stream_too_long_to_be_cut_is_refused_before_or_logged(
    numbers, run, tmp_path, monkeypatch
):
    config = EvalConfig(
        run=run, data=numbers.folder, waits=(2,), limit=3, long_form="all", output=tmp_path
    )
    with monkeypatch.context() as patch, pytest.raises(InputError, match="make shorter streams"):
        patch.setattr("leap.tasks.simul.scoring.resegment.MOST", 3)
        evaluate(config)
    assert not list(tmp_path.iterdir())

    def refuse(words, references):
        raise InputError("too long")

    monkeypatch.setattr("leap.tasks.simul.scoring.longform.resegment", refuse)
    with pytest.raises(InputError, match="too long"):
        evaluate(config)
    assert len(read_instances(tmp_path / "wait-2/instances.log")) == 1
    assert (tmp_path / "wait-2/steps.csv").exists()


def test_the_curve_has_a_line_for_each_kind_of_policy():
    found = [
        Evaluated(name, Scores(bleu=bleu, chrf=0, latency={"LAAL": lag}), None, None)
        for name, lag, bleu in (
            ("wait-3", 3, 20),
            ("wait-1", 1, 10),
            ("offline", 9, 30),
            ("wait-3/2", 6, 25),
            ("agree-2", 2, 15),
            ("wait-1 reset 5", 1, 11),
            ("tail-0.3", 4, 21),
            ("tail-0.5", 3, 19),
        )
    ]
    silent = Evaluated("align-2", Scores(bleu=0, chrf=0, latency={}), None, None)
    (axes,) = evaluating._plot([*found, silent], "words", "a run").axes
    assert {line.get_label(): list(line.get_xdata()) for line in axes.get_lines()} == {
        "wait-*": [1, 3, 9],
        "wait-*/2": [6, 9],
        "agree-*": [2],
        "wait-* reset 5": [1],
        "tail-*": [3, 4],
    }
    (axes,) = evaluating._plot(found[2:3], "words", "a run").axes
    assert [line.get_label() for line in axes.get_lines()] == ["offline"]


def test_sentences_without_a_translation_are_told(monkeypatch, capsys, tmp_path):
    scores = [Scores(bleu=0, chrf=0, latency={}, sentences=9, empty=empty) for empty in (0, 2)]
    found = [Evaluated(f"wait-{i}", each, 1.0, None) for i, each in enumerate(scores)]
    monkeypatch.setattr(evaluating, "evaluate", lambda config, progress: found)
    main(["simul", "eval"])
    lines = capsys.readouterr().out.splitlines()
    assert "wait-1: 2 of 9 sentences have no translation, and so no latency" in lines
    assert not any(line.startswith("wait-0:") for line in lines)


def test_text_in_long_form_is_one_stream(numbers, run):
    sentences = numbers.sentences("test")[4:8]
    interpreter = load_trained(run).interpreter("wait-2")
    found = translate_long(interpreter, sentences)
    source = [word for sentence in sentences for word in sentence.source.split()]
    stream = interpreter.stream()
    expected = [stream.push([word]) for word in source]
    expected[-1] += stream.finish()
    assert found.words == [word for words in expected for word in words]
    assert found.delays == [i for i, words in enumerate(expected, start=1) for _ in words]
    assert [step.position for step in found.steps] == list(range(1, len(source) + 1))
    assert sum(found.spans[-1]) == found.length == len(source)
    sizes = [step.state_bytes for step in found.steps]
    assert max(sizes) - min(sizes) <= 8 * LONGEST_WORD  # Pieces of a word that is not complete.
    cut = found.cut(10)
    assert " ".join(each.prediction for each in cut if each.prediction) == " ".join(found.words)
    assert [each.index for each in cut] == [10, 11, 12, 13]
    delays = [
        delay + begin
        for each, (begin, _) in zip(cut, found.spans, strict=True)
        for delay in each.delays
    ]
    assert delays == found.delays


def test_speech_in_long_form_has_pauses(spoken):
    run, sentences = spoken
    interpreter = load_trained(run).interpreter("wait-1/4")
    found = translate_long(interpreter, sentences, pause=100)
    silence = np.zeros(1600, np.float32)
    sounds = [sound_of(sentence, 16000) for sentence in sentences]
    stream = interpreter.stream()
    whole = np.concatenate([sounds[0], silence, sounds[1], silence, sounds[2]])
    assert found.words == stream.push(whole) + stream.finish()
    assert found.spans == [(0, 600), (700, 250), (1050, 7001 / 16)]
    assert [step.position for step in found.steps] == [320, 640, 960, 1280, len(whole) / 16]
    cut = found.cut(0)
    assert all(each.is_timed for each in cut if each.delays)
    assert cut[1].end == pytest.approx(len(whole) / 16 - 700)
    # Computing is added to what was heard, but not up along the stream.
    costs = {step.position: 1000 * step.seconds for step in found.steps}
    for delay, time, total in zip(found.delays, found.times, found.elapsed, strict=True):
        assert delay + costs[delay] - 1e-6 <= time <= total + 1e-6
    times = [
        time + begin
        for each, (begin, _) in zip(cut, found.spans, strict=True)
        for time in each.times
    ]
    assert times == pytest.approx(found.times)


def test_computing_in_a_long_stream_overlaps_with_listening(spoken, monkeypatch):
    run, sentences = spoken
    interpreter = load_trained(run).interpreter("offline")  # One word, or a few, after many steps.
    clock = iter(range(10**6))
    # Each look at the clock is a tenth of a second after the one before.
    monkeypatch.setattr(
        "leap.tasks.simul.scoring.longform.time.perf_counter", lambda: next(clock) / 10
    )
    found = translate_long(interpreter, sentences, pause=0)
    assert [step.position for step in found.steps][-2:] == [1280, found.length]
    # The last stretch is short, so it waits for the one before it.
    assert found.times[-1] == pytest.approx(1280 + 100 + 100)
    assert found.elapsed[-1] == pytest.approx(found.length + 100 * len(found.steps))


def test_sentences_are_joined_up_to_a_size(numbers, spoken):
    texts = [Sentence("a b c", "x"), Sentence("d e", "y"), Sentence("f", "z")]
    assert join(texts, None) == [texts]
    assert join(texts, 4) == [texts[:2], texts[2:]]
    assert join(texts, 1) == [[each] for each in texts]
    _, sentences = spoken
    assert join(sentences, 0.8 / 60) == [sentences[:2], sentences[2:]]


def test_long_form_has_the_scores_of_omnisteval_and_shows_its_cost(numbers, run, tmp_path):
    pytest.importorskip("omnisteval", reason="OmniSTEval is not installed")
    config = {"run": run, "data": numbers.folder, "waits": (2,), "limit": 4, "omnisteval": True}
    found = evaluate(EvalConfig(**config, long_form=12, reset=6, output=tmp_path))
    assert [each.name for each in found] == ["wait-2", "wait-2 reset 6"]
    assert found[0].scores != found[1].scores
    for each in found:
        ours = {"BLEU": each.scores.bleu, "chrF": each.scores.chrf, **each.scores.latency}
        assert each.omnisteval == pytest.approx(ours, abs=1e-4)
    steps = (tmp_path / "wait-2/steps.csv").read_text().splitlines()
    assert steps[0] == "stream,position,seconds,state_bytes"
    assert steps[-1].split(",")[0] != "0"  # More than one stream.
    assert (tmp_path / "cost.png").stat().st_size > 1000
    cost = json.loads((tmp_path / "results.json").read_text())["results"][0]["cost"]
    assert len(cost["words_read"]) == len(cost["step_seconds"]) == len(cost["state_bytes"])
    assert "OmniSTEval" in (tmp_path / "results.md").read_text()


def test_short_form_has_the_scores_of_omnisteval(numbers, run, tmp_path):
    pytest.importorskip("omnisteval", reason="OmniSTEval is not installed")
    config = {"run": run, "data": numbers.folder, "waits": (2,), "limit": 4, "omnisteval": True}
    (found,) = evaluate(EvalConfig(**config, output=tmp_path))
    ours = {"BLEU": found.scores.bleu, "chrF": found.scores.chrf, **found.scores.latency}
    assert found.omnisteval == pytest.approx(ours, abs=1e-4)
    assert [table.title for table in tables([found])] == ["", "OmniSTEval"]


def test_what_cannot_be_evaluated_is_an_error_that_says_so(numbers, run, tmp_path, monkeypatch):
    for wrong, message in (
        ({"waits": ()}, "waits or policies"),
        ({"reset": 100}, "reset is for long form"),
        ({"long_form": 0}, "long_form=0 must be above 0"),
        ({"long_form": "all", "engine": "simuleval"}, "run by us alone"),
        ({"pause": -1}, "pause=-1"),
        ({"batch": 0}, "batch=0"),
    ):
        with pytest.raises(ConfigError, match=message):
            EvalConfig(**wrong)
    with pytest.raises(ConfigError, match="no part other"):
        evaluate(EvalConfig(run=run, data=numbers.folder, part="other", output=tmp_path))
    with pytest.raises(ConfigError, match="sentence 7 is not spoken"):
        sound_of(Sentence("a", "b", id="7"), 16000)
    monkeypatch.setattr("leap.tasks.simul.scoring.omnisteval.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="OmniSTEval is not installed: pip install"):
        EvalConfig(omnisteval=True)
