import json
from dataclasses import replace

import torch
from matplotlib.image import imread

from leap.bench import attention_report as reporting
from leap.bench.attention import BenchConfig, Result
from leap.bench.run import Report, describe_machine
from leap.reports.table import MIB


def result(mechanism, length, seconds, speed, n_mib, passes="forward+backward", operations=None):
    return Result(
        mechanism=mechanism,
        baseline="softmax",
        length=length,
        passes=passes,
        seconds=seconds,
        speed=speed,
        peak_bytes=n_mib * MIB,
        turns=(seconds, 2 * seconds),
        operations=operations,
        touched=10**6,
        sgemm=1e9,
        copy=1e9,
    )


def make_report():
    config = BenchConfig(lengths=(1024, 2048))
    rows = [
        result("softmax", 1024, 0.1, 1.0, 4),
        result("leap-w64", 1024, 0.05, 2.0, 3),
        result("softmax", 2048, 0.4, 1.0, 8),
        result("leap-w64", 2048, 0.1, 4.0, 6),
    ]
    rows += [replace(r, passes="forward", seconds=r.seconds / 100) for r in rows]
    return Report(config=config, machine=describe_machine(torch.device("cpu"), 1), results=rows)


def test_tables_give_speed_then_time_then_memory_of_what_training_takes_first():
    speed, time, memory, *forward = reporting.tables(make_report())
    assert speed.columns == ["tokens", "1024", "2048"]
    assert speed.rows == [["leap-w64", "2.0x", "4.0x"]]
    assert time.columns == ["tokens", "1024", "2048", "growth"]
    assert time.rows == [["softmax", "100", "400", "t^2.0"], ["leap-w64", "50", "100", "t^1.0"]]
    assert memory.rows == [["softmax", "4.0", "8.0", "t^1.0"], ["leap-w64", "3.0", "6.0", "t^1.0"]]
    assert [t.title.split(":")[0] for t in forward] == ["forward"] * 3
    assert forward[1].rows[1] == ["leap-w64", "0.50", "1.0", "t^1.0"]


def test_what_is_counted_is_told_as_a_share_of_a_matrix_product():
    counted = result("linear", 1024, 0.1, 1.0, 4, operations=40_000_000)
    _, share, *_ = reporting.tables(replace(make_report(), results=[counted]))
    assert share.title == "forward+backward: speed as a share of a matrix product's"
    assert share.rows == [["linear", "40 %"]]


def test_the_roofline_shows_what_is_counted_under_what_the_machine_can_do():
    counted = result("linear", 1024, 0.1, 1.0, 4, operations=40_000_000)
    figure = reporting.roofline(replace(make_report(), results=[counted]))
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names == ["copy, then sgemm", "linear"]
    (_, line) = figure.axes[1].get_lines()[:2]
    assert (line.get_xdata()[0], line.get_ydata()[0]) == (40, 0.4)


def test_markdown_has_every_table_and_says_what_it_was_measured_on():
    text = reporting.page(make_report()).text
    assert text.startswith("Batch 1, 8 heads of 64, float32; CPU time on 1 thread of ")
    assert "| leap-w64 | 2.0x | 4.0x |" in text.splitlines()
    assert "| tokens | 1024 | 2048 | growth |\n| --- | --: | --: | --: |" in text


def test_files_hold_everything(tmp_path):
    report = make_report()
    reporting.page(report).write(tmp_path)
    stored = json.loads((tmp_path / "results.json").read_text())
    assert stored["config"]["lengths"] == [1024, 2048]
    assert stored["config"]["output"] == str(report.config.output)
    assert stored["machine"] == report.machine
    assert stored["results"][1]["mechanism"] == "leap-w64"
    assert stored["results"][1]["turns"] == [0.05, 0.1]
    height, width, _ = imread(tmp_path / "attention.png").shape
    assert width >= 1200 and height >= 800
    assert (tmp_path / "roofline.png").stat().st_size > 0


def test_the_plot_names_its_axes_with_units_and_every_mechanism():
    figure = reporting.draw(make_report())
    labels = {text for axes in figure.axes for text in (axes.get_xlabel(), axes.get_ylabel())}
    assert {"length (tokens)", "CPU time (ms)"} <= labels
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["softmax", "leap-w64"]
    assert all(axes.get_xscale() == axes.get_yscale() == "log" for axes in figure.axes)
