"""Promises of `leap lra speed`."""

from dataclasses import replace

import pytest
import torch

from leap.bench import lra, lra_report
from leap.bench.lra import NAIVE, SpeedConfig, build, make_inputs, measure
from leap.errors import ConfigError
from leap.models import usable_as
from leap.tasks.lra.data import TASKS

SHORT = {name: replace(info, max_length=16) for name, info in TASKS.items()}


@pytest.fixture
def short(monkeypatch):
    """Tasks of a few tokens."""
    monkeypatch.setattr(lra, "TASKS", SHORT)


def make(**settings):
    common = {
        "tasks": ("text", "retrieval"),
        "attention": ("leapformer",),
        "repeats": 2,
        "budget": 0.05,
    }
    return SpeedConfig(**common | settings)


def test_attentions_and_both_softmaxes_are_measured_on_every_task(short):
    told = []
    report = measure(make(), told.append)
    found = {(r.task, r.attention, r.passes) for r in report.results}
    assert len(found) == len(report.results) == 2 * 3 * 2
    assert {name for _, name, _ in found} == {NAIVE, "softmax", "leapformer"}
    for r in report.results:
        assert r.seconds == min(r.turns) > 0 and r.peak_bytes > 0
    assert (told[-1].step, told[-1].steps) == (23, 24)
    sizes = {r.attention: r.parameters for r in report.results if r.task == "text"}
    assert sizes["leapformer"] - 2180 == sizes["softmax"] == sizes[NAIVE]


def test_what_is_timed_are_the_papers_models_at_full_length():
    config = make(batch=2)
    inputs = make_inputs(TASKS["retrieval"], config)
    assert inputs["input_ids"].shape == inputs["input_ids_b"].shape == (2, 4000)
    assert inputs["labels"].shape == (2,)
    assert build(TASKS["text"], "softmax", config).num_parameters() == 370_562


def test_naive_softmax_gives_the_same_and_holds_all_scores():
    info, config = replace(TASKS["listops"], max_length=256), make(batch=2)
    inputs = make_inputs(info, config)
    models = [build(info, name, config).eval() for name in (NAIVE, "softmax")]
    with torch.no_grad():
        naive, fast = (model(**inputs).logits for model in models)
    torch.testing.assert_close(naive, fast, rtol=1e-4, atol=1e-5)

    report = measure(make(tasks=("listops",)))
    peaks = {(r.attention, r.passes): r.peak_bytes for r in report.results}
    scores = 2 * 2000**2 * 4
    assert peaks[NAIVE, "inference"] > scores > peaks["softmax", "inference"]
    assert peaks[NAIVE, "training step"] > 2 * scores


def test_tables_compare_leapformer_with_each_of_the_others(short, tmp_path):
    report = measure(make())
    page = lra_report.page(report)
    assert [table.title.split(":")[0] for table in page.tables] == ["training step"] * 2 + [
        "inference"
    ] * 2 + ["training step"] * 2 + ["inference"] * 2
    faster = page.tables[0]
    assert faster.columns == ["attention", "text", "retrieval"]
    assert [row[0] for row in faster.rows] == [NAIVE, "softmax"]
    taken = {
        r.attention: r.seconds
        for r in report.results
        if (r.task, r.passes) == ("text", "training step")
    }
    shown = float(faster.rows[0][1].removesuffix("x"))
    assert shown == pytest.approx(taken[NAIVE] / taken["leapformer"], rel=0.06)
    assert "The paper's models" in page.text
    assert [path.name for path in page.write(tmp_path)] == [
        "results.json",
        "results.md",
        "speed.png",
    ]


def test_leapformer_may_be_left_out(short):
    page = lra_report.page(measure(make(attention=("linear",), tasks=("image",))))
    assert len(page.tables) == 4


def test_all_are_all():
    assert make(attention=("all",)).attentions() == [
        NAIVE,
        "softmax",
        "bigbird-stored",
        *(name for name in usable_as("bidirectional") if name != "softmax"),
    ]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tasks": ()}, "nothing to measure"),
        ({"tasks": ("chess",)}, "tasks='chess' is not known"),
        ({"attention": ("lstm",)}, "attention='lstm' is not known in encoders"),
        ({"batch": 0}, "batch=0 must be at least 1"),
        ({"budget": 0.0}, r"budget=0\.0 must be more than 0 seconds"),
    ],
)
def test_settings_that_cannot_work_are_named(settings, message):
    with pytest.raises(ConfigError, match=message):
        make(**settings)
