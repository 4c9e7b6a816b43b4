import json

import pytest

from leap.cli import main
from leap.cli.verbs import VERBS as ALL_VERBS
from leap.tasks.lra import generate
from leap.tasks.lra.data import load_task
from leap.tasks.lra.prepare import PrepareConfig

VERBS = ALL_VERBS["lra"]

SMALL = ["--train", "5", "--valid", "2", "--test", "3", "--workers", "1"]


@pytest.fixture(autouse=True)
def few_at_a_time(monkeypatch, tmp_path):
    monkeypatch.setattr(generate, "CHUNK", 20)
    monkeypatch.setenv("LEAP_DATA", str(tmp_path / "sets"))


def run(capsys, *arguments):
    code = 0
    try:
        main(["lra", "prepare", *map(str, arguments)])
    except SystemExit as leaving:
        code = leaving.code
    out, err = capsys.readouterr()
    return code, out, err


def test_help_explains_the_flags_and_ends_with_examples(capsys):
    code, out, _ = run(capsys, "--help")
    assert code == 0
    for promise in (
        "Make the data of Long Range Arena",
        "--difficulty",
        "{easy,intermediate,hard}",
    ):
        assert promise in out
    _, examples = out.split("\nexamples:\n")
    for line, meaning in VERBS["prepare"].examples:
        assert f"  leap {line}  " in examples and meaning in examples


@pytest.mark.parametrize("line", [line for line, _ in VERBS["prepare"].examples])
def test_examples_are_commands_that_parse(monkeypatch, line):
    given = []
    monkeypatch.setattr(
        "leap.cli.lra.preparing.prepare", lambda config, _: given.append(config) or []
    )
    main(line.split())
    assert isinstance(given[0], PrepareConfig)


def test_all_at_hand_is_made_and_the_rest_is_named(capsys, tmp_path):
    output = tmp_path / "out"
    code, out, err = run(capsys, "--output", output, *SMALL)
    assert (code, err) == (0, "")
    assert "listops (generated): 5 train, 2 valid, 3 test; at most" in out
    assert f"wrote {output / 'pathfinder'}" in out
    assert "text: left out, no imdb in" in out
    assert len(load_task("listops", output, "test")) == 3
    code, out, _ = run(capsys, "--output", output, *SMALL)
    assert code == 0 and f"found {output / 'listops'}" in out


def test_what_was_cut_is_said(capsys, tmp_path):
    source = tmp_path / "reviews"
    source.mkdir()
    for part in ("train", "test"):
        lines = [json.dumps({"text": "x" * n, "label": n % 2}) for n in range(1, 21)]
        (source / f"{part}.jsonl").write_text("\n".join(lines))
    flags = ["--task", "text", "--source", source, "--output", tmp_path, "--max-length", 15]
    code, out, _ = run(capsys, *flags)
    assert code == 0
    assert "text (reviews): 18 train, 2 valid, 20 test; at most 15 tokens, 10 inputs cut" in out


def test_an_error_is_one_line_that_names_the_file(capsys, tmp_path):
    (tmp_path / "train.jsonl").write_text('{"text": "cut o')
    code, out, err = run(capsys, "--task", "text", "--source", tmp_path, "--output", tmp_path)
    assert (code, out) == (1, "")
    assert err.startswith(f"leap: {tmp_path / 'train.jsonl'} is broken") and err.count("\n") == 1
    code, _, err = run(capsys, "--task", "listops", "--train", 0)
    assert (code, err) == (1, "leap: --train=0 must be 1 or more\n")
    code, _, err = run(capsys, "--task", "sudoku")
    assert code == 2 and "sudoku" in err
