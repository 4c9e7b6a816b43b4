"""`leap lra`: training, reports and measurements."""

from dataclasses import asdict, replace

import numpy as np
import pytest

from leap.bench import lra
from leap.cli import main
from leap.cli.verbs import VERBS as ALL_VERBS
from leap.tasks.lra import cache
from leap.tasks.lra.cache import SPLITS, Examples, Sequences
from leap.tasks.lra.data import TASKS

VERBS = ALL_VERBS["lra"]

RUNS = ("train", "report", "speed", "ablate", "overhead")
SHORT = ["--task", "image", "--steps", "1", "--batch", "4"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Pictures of 9 pixels, each the number of its class."""
    folder = tmp_path_factory.mktemp("data")
    labels = (np.arange(8) % 10).astype(np.uint8)
    examples = Examples(Sequences.rows(np.repeat(labels[:, None], 9, axis=1)), labels)
    info = replace(TASKS["image"], max_length=9)
    cache.write(folder / "image", dict.fromkeys(SPLITS, examples), {"task": asdict(info)})
    return str(folder)


def run(capsys, *arguments):
    code = 0
    try:
        main(["lra", *arguments])
    except SystemExit as leaving:
        code = leaving.code
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.parametrize("verb", RUNS)
def test_help_ends_with_examples_that_parse(capsys, verb, monkeypatch):
    code, out, _ = run(capsys, verb, "--help")
    assert code == 0
    _, examples = out.split("\nexamples:\n")
    for line, meaning in VERBS[verb].examples:
        assert f"  leap {line}  " in examples and meaning in examples
        given = []
        monkeypatch.setattr(VERBS[verb].run, given.append)
        assert run(capsys, *line.split()[1:])[0] == 0
        assert type(given[0]) is VERBS[verb].load_config()


def test_models_are_trained_and_reported(capsys, data, tmp_path):
    runs = str(tmp_path / "runs")
    attentions = ["--attention", "softmax", "linear"]
    code, out, err = run(capsys, "train", *SHORT, *attentions, "--data", data, "--output", runs)
    assert code == 0
    assert "softmax" in out and "linear" in out and "accuracy" in out
    assert f"wrote {tmp_path / 'runs' / 'image'}" in out
    assert "softmax seed 0 1/1" in err and "scoring" in err

    code, out, _ = run(capsys, "report", "--runs", runs, "--output", str(tmp_path / "report"))
    assert code == 0
    assert "peak MiB" in out
    for name in ("report.md", "report.csv", "report.png"):
        assert f"wrote {tmp_path / 'report' / name}" in out
        assert (tmp_path / "report" / name).stat().st_size > 0


def test_an_ablation_is_run(capsys, data, tmp_path):
    flags = ["--sizes", "0.2", "--sharing", "shared", "--data", data, "--output", str(tmp_path)]
    code, out, _ = run(capsys, "ablate", *SHORT, *flags)
    assert code == 0
    assert "learned-0.2" in out and "fixed" in out and "spread of proportions" in out
    assert (tmp_path / "image" / "ablation.png").is_file()


def test_speed_is_measured(capsys, tmp_path, monkeypatch):
    short = {name: replace(info, max_length=8) for name, info in TASKS.items()}
    monkeypatch.setattr(lra, "TASKS", short)
    flags = ["--tasks", "text", "--attention", "leapformer", "--repeats", "1"]
    code, out, err = run(capsys, "speed", *flags, "--output", str(tmp_path))
    assert code == 0
    assert "speed-up of leapformer over the others" in out
    assert "softmax-naive" in out and (tmp_path / "speed.png").is_file()
    assert "text, training step" in err


def test_the_overhead_is_measured(capsys, tmp_path):
    flags = ["--lengths", "8", "--widths", "32", "--repeats", "1", "--output", str(tmp_path)]
    code, out, _ = run(capsys, "overhead", *flags)
    assert code == 0
    assert "what learned proportions cost" in out and (tmp_path / "overhead.png").is_file()


def test_errors_are_one_line(capsys, tmp_path):
    code, _, err = run(capsys, "train", "--data", str(tmp_path))
    assert code == 1
    assert err.startswith("leap: no listops data in") and err.count("\n") == 1
    code, _, err = run(capsys, "train", "--task", "chess")
    assert code == 1 and err.startswith("leap: --task='chess' is not known")
