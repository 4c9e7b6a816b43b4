"""Promises of `leap simul report`."""

import csv
import json

import pytest

from leap.cli import main
from leap.errors import ConfigError, FileError
from leap.tasks.simul.report import ReportConfig, _lines, read_evaluation, report

POINTS = {"wait-1": (2.0, 20.5), "wait-3": (4.0, 30.25), "offline": (11.0, 33.0)}


def write_evaluation(folder, points=POINTS, *, part="test", beam=4, sentences=10):
    folder.mkdir()
    results = [
        {
            "policy": policy,
            "bleu": bleu,
            "latency": {"LAAL": laal},
            "sentences": sentences,
            "bleu_signature": "version:2",
        }
        for policy, (laal, bleu) in points.items()
    ]
    config = {"beam": beam, "long_form": None}
    facts = {"config": config, "part": part, "unit": "words", "results": results}
    (folder / "results.json").write_text(json.dumps(facts))
    return folder


def test_evaluations_stand_beside_each_other(tmp_path, capsys):
    ours = write_evaluation(tmp_path / "ours")
    other = {"wait-1": (2.1, 21.0), "wait-5": (None, 0.0), "offline": (11.0, 34.0)}
    theirs = write_evaluation(tmp_path / "theirs", other)
    main(["simul", "report", "--evals", str(ours), str(theirs), "--output", str(tmp_path / "out")])
    shown = capsys.readouterr().out
    assert "20.50" in shown and "34.00" in shown and "LAAL, words" in shown
    lines = (tmp_path / "out/report.md").read_text().splitlines()
    assert lines[0] == "**BLEU**"
    assert lines[2] == "| evaluation | wait-1 | wait-3 | offline | wait-5 |"
    assert "| ours | 20.50 | 30.25 | 33.00 |  |" in lines
    assert "| theirs | 21.00 |  | 34.00 | 0.00 |" in lines
    assert "| theirs | 2.10 |  | 11.00 |  |" in lines
    with (tmp_path / "out/report.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [float(row["bleu"]) for row in rows] == [20.5, 30.25, 33.0, 21.0, 0.0, 34.0]
    assert rows[4]["laal"] == ""
    assert (tmp_path / "out/report.png").read_bytes().startswith(b"\x89PNG")


def test_a_line_is_of_one_kind_of_policy(tmp_path):
    points = POINTS | {"agree-2": (5.0, 29.0)}
    found = [
        read_evaluation(write_evaluation(tmp_path / "plain")),
        read_evaluation(write_evaluation(tmp_path / "more", points)),
    ]
    lines = {label: list(points) for label, points in _lines(found).items()}
    assert lines == {
        "plain": ["wait-1", "wait-3", "offline"],
        "more, wait-*": ["wait-1", "wait-3", "offline"],
        "more, agree-*": ["agree-2"],
    }


@pytest.mark.parametrize("other", [{"part": "dev"}, {"beam": 1}, {"sentences": 9}], ids=str)
def test_what_is_not_alike_is_refused(tmp_path, other):
    evals = (write_evaluation(tmp_path / "a"), write_evaluation(tmp_path / "b", **other))
    ((name, value),) = other.items()
    with pytest.raises(ConfigError, match=f"a has {name}=.* and b {value}: they cannot be comp"):
        report(ReportConfig(evals=evals, output=tmp_path))


def test_what_is_no_evaluation_is_named(tmp_path):
    with pytest.raises(FileError, match=r"no evaluation at .*gone; make one with leap simul eval"):
        read_evaluation(tmp_path / "gone")
    folder = write_evaluation(tmp_path / "empty", {})
    with pytest.raises(FileError, match=r"empty/results\.json is of no evaluation"):
        read_evaluation(folder)
    with pytest.raises(ConfigError, match="evals=a a: give one or more, each of another name"):
        ReportConfig(evals=(tmp_path / "a", tmp_path / "b" / "a"))
