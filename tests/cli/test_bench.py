import pytest

from leap.cli import main
from leap.cli.verbs import VERBS as ALL_VERBS

VERBS = ALL_VERBS["bench"]

SMALL = ["--lengths", "8", "16", "--heads", "2", "--width", "16", "--repeats", "1"]
SMALL += ["--mechanisms", "leapformer", "leap-w4"]


SMALL_DECODE = ["--contexts", "8", "20", "--preset", "tiny", "--repeats", "1"]
EXAMPLES = [(verb, line) for verb in VERBS for line, _ in VERBS[verb].examples]


def run(capsys, *arguments, verb="attention"):
    code = 0
    try:
        main(["bench", verb, *arguments])
    except SystemExit as leaving:
        code = leaving.code
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.parametrize(
    ("verb", "promises"),
    [
        (
            "attention",
            ["Measure the time and memory of every", "--lengths", "Numbers of tokens to attend"],
        ),
        ("decode", ["Measure the time of one more token", "--contexts", "quadratic"]),
    ],
)
def test_help_explains_the_flags_and_ends_with_examples(capsys, verb, promises):
    code, out, _ = run(capsys, "--help", verb=verb)
    assert code == 0
    for promise in promises:
        assert promise in out
    _, examples = out.split("\nexamples:\n")
    for line, meaning in VERBS[verb].examples:
        assert f"  leap {line}  " in examples and meaning in examples


def test_tables_are_printed_and_files_written(capsys, tmp_path):
    code, out, err = run(capsys, *SMALL, "--output", str(tmp_path / "run"))
    assert code == 0
    assert "speed-up over scaled_dot_product_attention" in out
    assert "leapformer" in out and "leap-w4" in out
    for name in ("results.json", "results.md", "attention.png"):
        assert f"wrote {tmp_path / 'run' / name}" in out
        assert (tmp_path / "run" / name).stat().st_size > 0
    assert "16 tokens, forward+backward" in err


def test_training_is_measured_and_files_written(capsys, tmp_path):
    small = ["--lengths", "8", "--preset", "tiny", "--repeats", "1", "--models", "leap", "gpt2"]
    code, out, _ = run(capsys, *small, "--output", str(tmp_path / "run"), verb="train")
    assert code == 0
    assert "speed-up over GPT-2" in out and "tokens per second" in out
    for name in ("results.json", "results.md", "train.png"):
        assert (tmp_path / "run" / name).stat().st_size > 0


def test_decoding_is_measured_and_files_written(capsys, tmp_path):
    code, out, err = run(capsys, *SMALL_DECODE, "--output", str(tmp_path / "run"), verb="decode")
    assert code == 0
    for title in (
        "milliseconds of CPU time per token",
        "tokens per second",
        "1 is flat",
        "state kept",
    ):
        assert title in out
    assert "leapformer" in out and "gpt2" in out
    for name in ("results.json", "results.md", "decode.png"):
        assert f"wrote {tmp_path / 'run' / name}" in out
        assert (tmp_path / "run" / name).stat().st_size > 0
    assert "context of 20" in err


def test_an_unknown_model_is_one_line(capsys, tmp_path):
    code, out, err = run(capsys, "--models", "gtp2", "--output", str(tmp_path), verb="decode")
    assert (code, out) == (1, "")
    assert err.startswith("leap: no model is called 'gtp2'; there are leapformer, ")
    assert err.count("\n") == 1


def test_an_unknown_mechanism_is_one_line(capsys, tmp_path):
    code, out, err = run(capsys, "--mechanisms", "leapfromer", "--output", str(tmp_path))
    assert (code, out) == (1, "")
    assert err.startswith("leap: no mechanism is called 'leapfromer'; there are softmax, ")
    assert err.count("\n") == 1


def test_an_unknown_flag_is_named(capsys):
    code, _, err = run(capsys, "--lenghts", "8")
    assert code == 2
    assert "--lenghts" in err


@pytest.mark.parametrize("value", ["many", "1.5"])
def test_a_value_of_the_wrong_kind_is_named(capsys, value):
    code, _, err = run(capsys, "--heads", value)
    assert code == 2
    assert "--heads" in err and value in err


@pytest.mark.parametrize("verb", VERBS)
def test_a_folder_that_cannot_be_written_shows_before_the_work(capsys, tmp_path, monkeypatch, verb):
    (tmp_path / "taken").write_text("")
    monkeypatch.setattr(f"leap.cli.bench.measure_{verb}", lambda *_: pytest.fail("in vain"))
    code, _, err = run(capsys, "--output", str(tmp_path / "taken"), verb=verb)
    assert code == 1
    assert err.startswith(f"leap: cannot write to {tmp_path / 'taken'}")


@pytest.mark.parametrize(("verb", "example"), EXAMPLES)
def test_the_examples_are_commands_that_work(verb, example, monkeypatch):
    configs = []
    monkeypatch.setattr(VERBS[verb].run, configs.append)
    main(example.split())
    assert len(configs) == 1


@pytest.mark.parametrize("verb", VERBS)
def test_a_seed_out_of_range_is_one_line(capsys, tmp_path, verb):
    code, out, err = run(capsys, "--seed", "-1", "--output", str(tmp_path), verb=verb)
    assert (code, out, err) == (1, "", "leap: --seed=-1 must be from 0 to 4294967295\n")
