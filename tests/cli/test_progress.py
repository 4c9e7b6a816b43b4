"""Promises of progress in a log file, where no bar can move."""

import pytest

from leap.cli import progress
from leap.cli.progress import progress_shown
from leap.reports.progress import Status


@pytest.fixture
def clock(monkeypatch):
    """Time that passes only when told to."""
    now = [100.0]
    monkeypatch.setattr(progress, "monotonic", lambda: now[0])

    def wait(seconds):
        now[0] += seconds

    return wait


def lines(capsys):
    return capsys.readouterr().err.splitlines()


def test_a_log_gets_a_line_every_half_minute(capsys, clock):
    with progress_shown() as show:
        for step in range(1, 101):
            show(Status(step, 100, doing=f"loss {step}"))
            clock(1)
    assert lines(capsys) == [
        "31/100  loss 31  1 min left",
        "61/100  loss 61  39 s left",
        "91/100  loss 91  9 s left",
    ]


def test_news_is_told_at_once_and_once(capsys, clock):
    with progress_shown() as show:
        for step in range(1, 7):
            news = None if step < 3 else 1.5 if step < 6 else 1.25
            show(Status(step, 6, "gpt2", news=news))
            clock(1)
    assert lines(capsys) == ["gpt2 3/6  3 s left", "gpt2 6/6"]


def test_a_new_name_starts_a_new_count(capsys, clock):
    with progress_shown() as show:
        show(Status(1, 2, "a", news=1))
        show(Status(500, 1000, "b"))
        clock(40)
        show(Status(501, 1000, "b"))
    assert lines(capsys) == ["a 1/2", "b 501/1000  5 h 33 min left"]


def test_on_a_terminal_there_is_a_bar(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    with progress_shown() as show:
        show(Status(3, 6, "leap", numbers={"loss": 1.0}))
    assert "3/6" in capsys.readouterr().err
