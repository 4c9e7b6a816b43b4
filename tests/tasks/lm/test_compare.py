import json
from dataclasses import replace
from statistics import fmean, stdev

import pytest
import torch

from leap.errors import ConfigError, FileError
from leap.tasks.lm.compare import (
    CompareConfig,
    Outcome,
    Row,
    compare,
    learning_curves,
    parse_model,
    run_configs,
    table,
)


@pytest.fixture
def config(play, tmp_path):
    return CompareConfig(
        models=("gpt2", "leap:global"),
        data=str(play),
        train_tokenizer=280,
        length=32,
        steps=2,
        evaluate_every=1,
        log_every=1,
        hidden_size=16,
        n_layer=2,
        n_head=2,
        output=tmp_path / "compare",
    )


def test_models_differ_in_nothing_but_themselves(config):
    config = replace(config, models=("gpt2", "leap:windowed:leap-elu", "hybrid", "linear:rotary"))
    runs = run_configs(config)
    own = ("attention", "formulation", "windows", "position_embedding", "output")
    assert [[getattr(run, name) for name in own[:-1]] for run in runs.values()] == [
        ["gpt2", None, "doubling", None],
        ["leap", "leap-elu", "doubling", None],
        ["leap,leapformer", None, "doubling", None],
        ["linear", None, "doubling", "rotary"],
    ]
    first, *others = runs.values()
    for run in others:
        assert replace(run, **{name: getattr(first, name) for name in own}) == first


def test_by_default_it_is_three_epochs_of_wikitext_2():
    for run in run_configs(CompareConfig()).values():
        assert (run.data, run.epochs, run.steps, run.length) == ("wikitext-2", 3.0, None, 1024)
        assert (run.learning_rate, run.schedule, run.warmup) == (2e-3, "linear", 0.02)


@pytest.mark.parametrize(
    ("models", "message"),
    [
        (
            ("leapfromer",),
            "'leapfromer' is none that a language model can have; there are .*, and hybrid",
        ),
        (("leap:widowed",), "option 'widowed' in 'leap:widowed' is not known; there are global"),
        (("leap,gtp2",), "'leap,gtp2': attention='gtp2' is none that"),
        ((), "models is empty"),
        (("leap", "leap"), "one of them is named twice"),
    ],
    ids=str,
)
def test_models_that_are_not_there_are_named(models, message):
    with pytest.raises(ConfigError, match=message):
        CompareConfig(models=models)


def test_short_forms_are_read():
    assert parse_model("leap:global").windows == "global"
    assert parse_model("hybrid").attention == "leap,leapformer"
    assert parse_model("leapformer:none").position_embedding == "none"
    assert parse_model("softmax:rotary:conv4").convolution == 4
    assert parse_model("softmax:gate").gate == "head"
    assert parse_model("linear:gate-channel:conv2").gate == "channel"


def test_gates_and_convolutions_are_of_one_model(config):
    runs = run_configs(replace(config, models=("softmax:gate:conv4", "softmax:rotary")))
    assert [(run.gate, run.convolution) for run in runs.values()] == [("head", 4), (None, None)]


def test_a_table_and_curves_come_out_and_models_that_are_done_are_kept(config):
    told, measured = [], []

    def peak_bytes(call, device):
        call()
        measured.append(device)
        return 5 * 2**20

    rows = compare(config, lambda status: told.append((status.name, status.step)), peak_bytes)
    assert [row.model for row in rows] == ["gpt2", "leap:global"]
    assert all(1 < row.outcomes[0].perplexity < 400 for row in rows)
    assert all(row.peak_bytes == 5 * 2**20 for row in rows)
    assert measured == [torch.device("cpu")] * 2
    assert [name for name, _ in told] == sorted(name for name, _ in told)

    results = json.loads((config.output / "results.json").read_text())
    assert [row["model"] for row in results["rows"]] == ["gpt2", "leap:global"]
    table = (config.output / "results.md").read_text().splitlines()
    assert table[0].endswith("2 steps of 4 x 32 tokens, AdamW 0.002 linear, seed 0")
    assert [line.split(" | ")[0] for line in table[4:]] == ["| gpt2", "| leap:global"]
    assert (config.output / "curves.png").stat().st_size > 0

    del told[:], measured[:]
    more = compare(
        replace(config, models=("linear", *config.models)),
        lambda status: told.append(status.name),
        peak_bytes,
    )
    assert more[1:] == rows
    assert set(told) == {"linear"} and len(measured) == 1


def test_seeds_have_runs_of_their_own_and_one_row(config):
    config = replace(config, models=("leapformer:travelled", "linear"), seeds=(0, 3))
    rows = compare(config)
    assert [[outcome.seed for outcome in row.outcomes] for row in rows] == [[0, 3], [0, 3]]
    first, second = rows[0].values("perplexity")
    assert first != second
    names = {path.name for path in config.output.iterdir() if path.is_dir()}
    assert {"leapformer-travelled", "leapformer-travelled-seed-3", "linear-seed-3"} <= names
    told = (config.output / "results.md").read_text()
    assert "seeds 0, 3" in told
    assert f"{fmean((first, second)):,.2f} ± {stdev((first, second)):.2f}" in told
    costs = rows[0].cost_of_equal("proportions")
    assert f"{fmean(costs):+,.2f} ± {stdev(costs):.2f}" in told

    alone = compare(replace(config, models=("linear",), seeds=()))
    assert alone[0].outcomes == rows[1].outcomes[:1]
    with pytest.raises(ConfigError, match="seeds=1 1: one is named twice"):
        replace(config, seeds=(1, 1))


def outcome(seed, *, perplexity, cpu=0.5):
    return Outcome(
        seed=seed,
        perplexity=perplexity,
        word_perplexity=100.0,
        bits_per_byte=2.5,
        valid_perplexity=perplexity,
        seconds_per_step=cpu,
        cpu_seconds_per_step=cpu,
        best_step=20,
        equalised={"gates": perplexity + 0.125},
    )


def test_small_perplexities_have_a_digit_more():
    large = Row("linear", 10, None, (outcome(0, perplexity=151.0), outcome(1, perplexity=153.0)))
    small = Row("leap", 10, None, (outcome(0, perplexity=4.9), outcome(1, perplexity=5.1)))
    cells = table([large, small]).rows
    assert cells[0][2] == "152.00 ± 1.41" and cells[0][6] == "+0.12 ± 0.00"
    assert cells[1][2] == "5.000 ± 0.141" and cells[1][6] == "+0.125 ± 0.000"
    assert cells[0][4] == "2.5000 ± 0.0000"


def test_curves_are_means_over_seeds_by_step_and_by_cpu_time():
    rows = [
        Row("linear", 10, None, (outcome(0, perplexity=9.0, cpu=1.5),)),
        Row("leap", 10, None, tuple(outcome(seed, perplexity=9.0, cpu=3.0) for seed in (0, 1))),
    ]
    histories = {
        "linear, seed 0": [{"step": 10, "loss": 9.0}, {"step": 20, "eval_loss": 3.0}],
        "leap, seed 0": [{"step": 20, "eval_loss": 2.0}, {"step": 40, "eval_loss": 1.0}],
        "leap, seed 1": [{"step": 20, "eval_loss": 4.0}],  # stopped early
    }
    by_step, by_time = learning_curves(rows, histories)
    assert [line.points for line in by_step.lines] == [[(20, 3.0)], [(20, 3.0)]]
    assert [line.points for line in by_time.lines] == [[(0.5, 3.0)], [(1.0, 3.0)]]
    assert by_step.lines[0].spread is None
    assert by_step.lines[1].spread == [pytest.approx(2**0.5)]

    untimed = [
        replace(rows[0], outcomes=(replace(rows[0].outcomes[0], cpu_seconds_per_step=None),))
    ]
    assert [panel.x for panel in learning_curves(untimed, histories)] == ["step"]


def test_models_trained_otherwise_are_not_mixed_in(config):
    compare(replace(config, models=("linear",)))
    with pytest.raises(FileError, match=r"holds a run with train_tokenizer=280, not 300"):
        compare(replace(config, train_tokenizer=300))
    with pytest.raises(FileError, match=r"no text file at missing\.txt"):
        compare(replace(config, data="missing.txt", output=config.output / "other"))
    assert not (config.output / "other").exists()


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("linear:global", "models: 'linear:global': .* attention=linear has none"),
        ("leap:rotary", "models: 'leap:rotary': .*rotary"),
        ("gpt2:rotary", "models: 'gpt2:rotary': gpt2 has learned positions, not rotary"),
    ],
)
@pytest.mark.parametrize("train_tokenizer", [280, None])
def test_a_model_that_cannot_be_made_shows_before_the_work(config, model, message, train_tokenizer):
    told = []
    config = replace(config, models=("gpt2", model), train_tokenizer=train_tokenizer)
    with pytest.raises(ConfigError, match=message):
        compare(config, told.append)
    assert told == []
    assert not config.output.exists()


def test_all_models_share_one_tokenizer(config):
    compare(config)
    fingerprints = {
        json.loads((config.output / name / "model" / "config.json").read_text())[
            "tokenizer_fingerprint"
        ]
        for name in ("gpt2", "leap-global")
    }
    assert len(fingerprints) == 1


def test_runs_recorded_elsewhere_are_taken_as_they_are(config, tmp_path):
    elsewhere = compare(replace(config, models=("linear",), seeds=(0, 3)))
    record = tmp_path / "results.json"
    (config.output / "results.json").rename(record)
    told = []
    here = replace(
        config,
        models=("linear", "leap:global"),
        seeds=(0, 3),
        recorded=record,
        output=tmp_path / "here",
    )
    rows = compare(here, lambda status: told.append(status.name))
    assert rows[0] == elsewhere[0]
    assert {name.partition(",")[0] for name in told} == {"leap:global"}
    again = json.loads((here.output / "results.json").read_text())
    assert set(again["histories"]) == {
        f"{model}, seed {seed}" for model in here.models for seed in (0, 3)
    }


def test_a_record_of_other_runs_is_refused(config, tmp_path):
    compare(replace(config, models=("linear",)))
    record = config.output / "results.json"
    other = replace(config, recorded=record, output=tmp_path / "other")
    with pytest.raises(FileError, match=r"results\.json has runs with steps=2, not 3"):
        compare(replace(other, steps=3, output=tmp_path / "third"))
    found = json.loads(record.read_text())
    for damage, message in [
        ({"text": "another"}, "learned from another text"),
        ({"rows": [{}]}, "is no results.json of leap lm compare"),
        ({"rows": 5}, "is no results.json of leap lm compare"),
        ({"histories": {}}, "lacks the learning curves"),
    ]:
        record.write_text(json.dumps(found | damage))
        with pytest.raises(FileError, match=message):
            compare(other)
