import pytest

from leap.app.records import flat, read_benchmarks
from leap.errors import FileError


def test_benchmarks_are_read_and_what_is_none_is_passed_over(recorded):
    found = read_benchmarks(recorded)
    assert list(found) == ["faith", "recall", "speed"]
    speed = found["speed"]
    assert len(speed.records) == 12 and speed.about == "processor abacus <b>"
    assert speed.numbers == ["length", "seconds"] and speed.words == ["mechanism", "passes"]


def test_what_is_drawn_at_first_is_what_a_benchmark_is_about(recorded):
    found = read_benchmarks(recorded)
    assert found["speed"].choose() == ("length", "seconds", "mechanism")
    assert found["faith"].choose() == ("file", "mean", None)
    assert found["recall"].choose() == ("at", "accuracy", None)
    assert found["speed"].usual("length", "mechanism") == ["passes = forward+backward"]


def test_records_of_a_case_are_those_and_no_others(recorded):
    speed = read_benchmarks(recorded)["speed"]
    assert len(speed.where(["passes = forward"])) == 6
    assert len(speed.where(["passes = forward", "passes = forward+backward"])) == 12
    assert not speed.where(["passes = backward"])


def test_a_record_is_flattened_to_words_and_numbers():
    row = {"a": {"b": 1, "c": {"d": "x"}}, "e": [1], "f": None, "g": float("nan"), "h": True}
    assert flat(row) == {"a.b": 1, "a.c.d": "x"}


def test_a_broken_file_is_named(tmp_path):
    (tmp_path / "speed").mkdir()
    (tmp_path / "speed" / "results.json").write_text("{")
    with pytest.raises(FileError, match=r"results.json is no whole JSON file"):
        read_benchmarks(tmp_path)
