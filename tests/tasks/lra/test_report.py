"""Promises of `leap lra report`."""

import csv
import json

import pytest

from leap.errors import FileError
from leap.reports.table import markdown
from leap.tasks.lra.report import (
    ReportConfig,
    average,
    compare,
    not_alike,
    report,
    tables,
    unfinished,
)
from leap.tasks.lra.runs import RESULTS

SETTINGS = {"steps": 100, "batch": 32, "learning_rate": 1e-4, "changes": {"pooling": "mean"}}


def write_run(folder, task, name, seed, settings=None, data="a1", **changes):
    metrics = {
        "task": task,
        "name": name,
        "seed": seed,
        "accuracy": 0.5,
        "steps": 100,
        "batch": 32,
        "device": "cpu",
        "seconds_per_step": 9.0,
        "cpu_seconds_per_step": 2.0,
        "peak_bytes": 64 * 2**20,
        "parameters": 1000,
        "test": {"examples": 100, "seconds": 70.0, "cpu_seconds": 10.0},
    }
    path = folder / task / name / f"seed-{seed}"
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(SETTINGS | (settings or {})))
    (path / "data.json").write_text(json.dumps({"data": data}))
    (path / "metrics.json").write_text(json.dumps(metrics | changes))


@pytest.fixture
def runs(tmp_path):
    for seed, accuracy in enumerate((0.6, 0.5)):
        write_run(tmp_path, "text", "softmax", seed, accuracy=accuracy)
        write_run(
            tmp_path,
            "text",
            "linear",
            seed,
            accuracy=accuracy + 0.1,
            cpu_seconds_per_step=0.5,
            peak_bytes=16 * 2**20,
            test={"examples": 100, "seconds": 1.0, "cpu_seconds": 5.0},
            parameters=1100,
        )
    write_run(tmp_path, "text", "exp", 0, accuracy=0.9)
    return tmp_path


def test_a_row_is_over_seeds_and_beside_softmax(runs):
    rows = report(ReportConfig(runs))
    assert [(row.task, row.name, row.seeds) for row in rows] == [
        ("text", "softmax", 2),
        ("text", "exp", 1),
        ("text", "linear", 2),
    ]
    linear = rows[2]
    assert linear.accuracy == pytest.approx(0.65)
    assert linear.spread == pytest.approx(0.1 / 2**0.5)
    assert rows[1].spread is None
    assert (linear.train_rate, linear.inference_rate) == (64.0, 20.0)
    assert linear.accuracy_gain == pytest.approx(0.1)
    assert (linear.train_speed, linear.inference_speed) == (4.0, 2.0)
    assert (linear.memory_share, linear.parameters_share) == (0.25, 1.1)


def test_the_time_is_that_of_the_wall_on_a_gpu(tmp_path):
    write_run(tmp_path, "text", "softmax", 0, device="cuda")
    (row,) = report(ReportConfig(tmp_path))
    assert (row.train_rate, row.inference_rate) == (32 / 9.0, 100 / 70.0)


def test_files_hold_what_the_rows_do(runs, tmp_path):
    folder = tmp_path / "out"
    rows = report(ReportConfig(runs, output=folder))
    lines = (folder / "report.md").read_text().splitlines()
    assert lines[2] == "**text**"
    start, end = "| linear | 65.00 ± 7.07 | +10.00 ", "| 1,100 (1.10x) | 2 | 100 | 32 | 100 |"
    assert f"{start}| 64 (4.00x) | 20 (2.00x) | 16 (0.25x) {end}" in lines
    with (folder / "report.csv").open() as file:
        read = list(csv.DictReader(file))
    assert [float(line["accuracy"]) for line in read] == [row.accuracy for row in rows]
    assert [line["spread"] == "" for line in read] == [row.spread is None for row in rows]
    assert (folder / "report.png").read_bytes().startswith(b"\x89PNG")


def test_attentions_that_did_every_task_are_averaged(runs):
    write_run(runs, "image", "softmax", 0, accuracy=0.2)
    write_run(runs, "image", "linear", 0, accuracy=0.4, cpu_seconds_per_step=2.0)
    write_run(runs, "pathfinder-easy", "softmax", 0)  # None of the arena's tasks.
    rows = report(ReportConfig(runs))
    averages = {row.name: row for row in rows if row.task == "average"}
    assert set(averages) == {"softmax", "linear"}
    assert averages["linear"].accuracy == pytest.approx((0.65 + 0.4) / 2)
    assert averages["linear"].train_speed == pytest.approx(2.0)  # The root of 4 and 1.
    assert averages["linear"].accuracy_gain == pytest.approx(0.15)
    assert averages["softmax"].memory_share == pytest.approx(1.0)
    *_, last = markdown(*tables(rows)).splitlines()
    assert last.startswith("| linear | 52.50 | +15.00 | (2.00x) |")
    assert markdown(*tables(rows)).count("**average**") == 1


def test_without_softmax_there_is_nothing_to_stand_beside(tmp_path):
    write_run(tmp_path, "text", "linear", 0, peak_bytes=None, cpu_seconds_per_step=None)
    (row,) = report(ReportConfig(tmp_path))
    assert row.train_speed is None and row.accuracy_gain is None and row.peak_bytes is None
    assert average(compare([row])) == []
    assert "| linear | 50.00 |  |  | 10 |  | 1,000 | 1 | 100 | 32 | 100 |" in markdown(
        *tables([row])
    )


@pytest.mark.parametrize(
    ("changes", "apart"),
    [
        ({"steps": 500}, "steps"),
        ({"batch": 8}, "batch"),
        ({"settings": {"learning_rate": 0.01}}, "learning_rate"),
        ({"settings": {"changes": {"pooling": "cls"}}}, "pooling"),
        ({"data": "b2"}, "data"),
        ({"device": "cuda"}, "device"),
        ({"threads": 2}, "threads"),
        ({"settings": {"group_by_length": False}}, "group_by_length"),
        ({"settings": {"evaluate_every": 5}}, "evaluate_every"),
        ({"test": {"examples": 50, "seconds": 70.0, "cpu_seconds": 10.0}}, "tests"),
    ],
    ids=str,
)
def test_runs_that_are_not_alike_are_neither_averaged_nor_compared(runs, changes, apart):
    write_run(runs, "text", "linear", 2, accuracy=0.1, **changes)
    write_run(runs, "image", "linear", 0)
    rows = report(ReportConfig(runs))
    assert not [row for row in rows if row.task == "average"]
    mine, others = (
        [row for row in rows if row.name == "linear" and row.accuracy == accuracy]
        for accuracy in (0.1, pytest.approx(0.65))
    )
    assert [row.seeds for row in mine + others] == [1, 2]
    assert mine[0].accuracy_gain is None and others[0].accuracy_gain == pytest.approx(0.1)
    assert mine[0].apart.startswith(f"{apart}=") and mine[0].apart != others[0].apart
    (sentence,) = not_alike(rows)
    assert sentence.startswith(f"text: runs are not alike ({apart}=")
    page = (runs / "report.md").read_text()
    assert sentence in page and f"**text: {mine[0].apart}**" in page and "**image**" in page


def test_runs_that_were_not_finished_are_told_apart(runs):
    (runs / "text" / "linear" / "seed-1" / "metrics.json").unlink()
    assert unfinished(runs) == [runs / "text" / "linear" / "seed-1"]
    assert [row.seeds for row in report(ReportConfig(runs))] == [2, 1, 1]


def test_real_runs_are_reported(trained, tmp_path):
    rows = report(ReportConfig(trained, output=tmp_path))
    assert [(row.task, row.name) for row in rows] == [
        ("image", "leapformer"),
        ("text", "softmax"),
        ("text", "leapformer"),
        ("average", "leapformer"),
    ]
    assert rows[2].parameters_share > 1 and rows[2].train_speed > 0
    assert rows[2].peak_bytes == 2**20


@pytest.mark.parametrize("name", RESULTS)
def test_results_that_were_changed_are_named(tmp_path, name):
    write_run(tmp_path, "text", "linear", 0)
    path = tmp_path / "text" / "linear" / "seed-0" / "metrics.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: [1]}))
    with pytest.raises(FileError, match=rf"metrics\.json has '\[1\]' as '{name}': it is of no run"):
        report(ReportConfig(tmp_path))


def test_what_is_no_folder_of_runs_is_named(tmp_path):
    with pytest.raises(FileError, match=r"no finished run in .*; make some with leap lra train"):
        report(ReportConfig(tmp_path))
    write_run(tmp_path, "text", "linear", 0)
    path = tmp_path / "text" / "linear" / "seed-0" / "metrics.json"
    path.write_text("{}")
    with pytest.raises(FileError, match=r"metrics\.json has no 'task': it is of no run"):
        report(ReportConfig(tmp_path))
