import json
import math
from dataclasses import replace

import pytest
import torch
from matplotlib.image import imread

from leap.bench import decode, decode_report
from leap.bench.decode import DecodeConfig, check_step, measure
from leap.bench.run import Report
from leap.errors import ConfigError, LeapError

TINY = DecodeConfig(contexts=(40, 9), preset="tiny", chunk=8, repeats=2, budget=0.05)
OURS = ("leapformer", "leap")


@pytest.fixture(scope="module")
def seen():
    return []


@pytest.fixture(scope="module")
def report(seen):
    return measure(TINY, seen.append)


def decoder_of(name):
    return decode._decoder(name, TINY)


def test_every_model_is_measured_at_every_context(report):
    cases = [(r.context, r.model) for r in report.results]
    assert cases == [(n, name) for n in (9, 40) for name in (*OURS, "gpt2")]
    for result in report.results:
        assert result.seconds == min(result.turns) > 0
        assert 1 <= len(result.turns) <= TINY.repeats


def test_our_state_keeps_its_size_and_a_key_value_cache_grows(report):
    n_bytes = {(r.model, r.context): r.state_bytes for r in report.results}
    for name in OURS:
        assert n_bytes[name, 9] == n_bytes[name, 40] > 0
    # Keys and values of 2 layers of width 32, in float32.
    assert [n_bytes["gpt2", n] for n in (9, 40)] == [2 * 2 * 32 * 4 * n for n in (9, 40)]


def test_progress_runs_from_nothing_to_almost_all(report, seen):
    done = [status.step for status in seen]
    assert done == sorted(done) and done[0] == 0
    assert {status.steps for status in seen} == {done[-1] + 1}
    doing = [status.doing for status in seen]
    assert doing.count("context of 40: read by leap") == 4  # 31 tokens more, 8 at a time.
    assert doing.count("context of 40: read by gpt2") == 1


@pytest.mark.parametrize("name", [*OURS, "gpt2", "softmax"])
def test_a_step_leaves_the_context_as_it_was(name):
    decoder = decoder_of(name)
    with torch.no_grad():
        decoder.read(20)
        decoder.read(5)
        n_bytes = decoder.state_bytes
        first, second = decoder.step(), decoder.step()
    assert decoder.cache.get_seq_length() == 25
    assert decoder.state_bytes == n_bytes
    assert torch.equal(first, second)


@pytest.mark.parametrize("name", [*OURS, "gpt2", "softmax", "cosformer", "linear"])
def test_a_step_agrees_with_a_forward_over_all_tokens(name):
    check_step(name, decoder_of(name))


@pytest.mark.parametrize("name", [*OURS, "gpt2"])
def test_a_step_that_forgets_its_past_is_found_out(name, monkeypatch):
    decoder = decoder_of(name)
    whole = decoder.feed
    monkeypatch.setattr(decoder, "feed", lambda tokens: whole(tokens[:, 1:]))
    with pytest.raises(LeapError, match=f"^{name} decodes wrongly: the logits of a step are off"):
        check_step(name, decoder)


@pytest.mark.parametrize("name", [*OURS, "gpt2"])
def test_a_cache_that_keeps_the_step_is_found_out(name, monkeypatch):
    monkeypatch.setattr(decode, "copy", lambda layer: layer)
    with pytest.raises(LeapError, match="decodes wrongly"):
        check_step(name, decoder_of(name))


def test_models_have_the_same_sizes():
    ours, gpt2 = (decoder_of(name).model for name in ("softmax", "gpt2"))
    positions = gpt2.transformer.wpe.weight.numel()
    assert gpt2.num_parameters() - positions == ours.num_parameters()


def test_only_the_models_chosen_are_measured():
    few = measure(replace(TINY, contexts=(8,), models=("linear",)))
    assert [r.model for r in few.results] == ["linear"]
    page = decode_report.page(few)
    assert "GPT-2" not in page.text


def test_tables_give_time_speed_flatness_state_and_the_comparison():
    results = [
        decode.DecodeResult(
            model=name,
            context=context,
            seconds=taken,
            state_bytes=2048,
            turns=(taken,),
            way="fused",
        )
        for context, times in ((1024, (0.002, 0.001)), (4096, (0.0021, 0.03)))
        for name, taken in zip(("leap", "gpt2"), times, strict=True)
    ]
    config = replace(TINY, contexts=(1024, 4096), models=("leap", "gpt2"))
    machine = {"clock": "CPU time", "threads": "1", "processor": "abacus", "torch": "2"}
    machine["transformers"] = "5"
    made = Report(config=config, machine=machine, results=results)
    time, speed, flatness, state, compared = decode_report.tables(made)
    assert time.title == "milliseconds of CPU time per token"
    assert time.rows == [["leap", "2.0", "2.1"], ["gpt2", "1.0", "30"]]
    assert speed.rows == [["leap", "500", "476"], ["gpt2", "1000", "33"]]
    assert flatness.rows == [["leap", "1.00", "1.05"], ["gpt2", "1.00", "30"]]
    assert state.rows[0] == ["leap", "2.0", "2.0"]
    assert compared.rows == [["leap", "0.50x", "14x"]]


def test_rows_and_what_generate_writes_are_measured_too():
    settings = {"contexts": (9,), "models": ("leapformer", "gpt2"), "batch": 3, "generate": 2}
    made = measure(replace(TINY, **settings))
    assert all(len(r.turns) <= TINY.repeats for r in made.results)
    time, speed, *_ = decode_report.tables(made)
    assert time.title.endswith("for a token of each of 3 rows")
    assert float(speed.rows[0][1]) == pytest.approx(3 / made.results[0].seconds, rel=0.1)
    text = decode_report.describe(made)
    assert "batch 3" in text and "the mean of 2 tokens" in text and "leapformer: " in text


def test_files_are_written_and_say_how_it_was_measured(report, tmp_path):
    paths = decode_report.page(report).write(tmp_path)
    assert [path.name for path in paths] == ["results.json", "results.md", "decode.png"]
    stored = json.loads(paths[0].read_text())
    assert stored["config"]["contexts"] == [40, 9]
    assert stored["config"]["preset"] == "tiny"
    assert stored["machine"]["torch"] == torch.__version__
    assert len(stored["results"]) == 6
    text = paths[1].read_text()
    assert text.startswith("2 layers of width 32, 2 heads, 256 tokens in the vocabulary, batch 1")
    assert "filled with random numbers" in text
    assert imread(paths[2]).ndim == 3


def test_the_plot_names_its_axes_with_units_and_every_model(report):
    figure = decode_report.draw(report)
    (axes,) = figure.axes
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("context (tokens)", "CPU time per token (ms)")
    assert axes.get_xscale() == "log"
    assert [t.get_text() for t in figure.legends[0].get_texts()] == [*OURS, "gpt2"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"contexts": ()}, "nothing to measure"),
        ({"contexts": (256, 0)}, r"contexts=\(256, 0\) must be at least 1"),
        ({"chunk": 0}, "chunk=0 must be at least 1"),
        ({"generate": -1}, "generate=-1 tokens cannot be written"),
        ({"budget": 0.0}, "budget=0.0 must be more than 0"),
        ({"budget": math.inf}, "budget=inf must be more than 0"),
        ({"models": ("gtp2",)}, "'gtp2'; there are leapformer, .*, gpt2"),
        ({"preset": "huge"}, "no preset is called 'huge'"),
        ({"device": "abacus"}, "device='abacus' cannot be measured"),
    ],
    ids=str,
)
def test_a_setting_that_cannot_work_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        DecodeConfig(**settings)
