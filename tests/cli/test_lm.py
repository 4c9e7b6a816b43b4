import json
import shutil
import subprocess
import sys

import pytest

from leap.cli import main
from leap.cli.verbs import VERBS as ALL_VERBS
from leap.models import LeapformerConfig, LeapformerForSequenceClassification
from leap.tasks.lm.model import PresetSize
from leap.tasks.lm.train import RESULTS

VERBS = ALL_VERBS["lm"]

SMALL = [
    *("--hidden-size", "16", "--n-layer", "2", "--n-head", "2", "--length", "32"),
    *("--batch", "4", "--steps", "4", "--evaluate-every", "2", "--log-every", "1"),
    *("--position-embedding", "none"),
]


@pytest.fixture(scope="module")
def play(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "play.txt"
    path.write_text("".join(f"Enter the king, number {i}.\n" for i in range(200)))
    return path


@pytest.fixture(scope="module")
def run_folder(play):
    main(["lm", "train", "--data", str(play), "--output", str(play.parent / "run"), *SMALL])
    return play.parent / "run"


def run(capsys, *arguments):
    code = 0
    try:
        main(["lm", *map(str, arguments)])
    except SystemExit as leaving:
        code = leaving.code
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.parametrize("verb", VERBS)
def test_help_explains_the_flags_and_ends_with_examples(capsys, verb):
    code, out, _ = run(capsys, verb, "--help")
    assert code == 0
    assert VERBS[verb].summary in out
    _, examples = out.split("\nexamples:\n")
    for line, meaning in VERBS[verb].examples:
        assert f"  leap {line}  " in examples and meaning in examples


def test_the_help_of_a_mixed_config_knows_every_flag(capsys):
    _, out, _ = run(capsys, "train", "--help")
    for words in (
        "Tokens in a sequence.",
        "Windows of LEAP layers",
        "Peak learning rate",
        "Width;",
    ):
        assert words in out


@pytest.mark.parametrize(
    ("verb", "example"), [(verb, line) for verb in VERBS for line, _ in VERBS[verb].examples]
)
def test_the_examples_are_commands_that_work(verb, example, monkeypatch):
    configs = []
    monkeypatch.setattr(VERBS[verb].run, configs.append)
    main(example.split())
    assert len(configs) == 1


def test_train_tells_what_came_out_and_where_it_is(capsys, play, tmp_path):
    code, out, err = run(capsys, "train", "--data", play, "--output", tmp_path / "run", *SMALL)
    assert code == 0
    assert "best at step 4 of 4" in out
    assert "test perplexity" in out and "bits per byte" in out
    assert f"wrote {tmp_path / 'run'}" in out
    assert out.startswith(f"read {play}: ")
    assert [line.split()[0] for line in err.splitlines()] == ["2/4", "4/4"]


def test_train_tells_that_a_run_was_finished_before(capsys, run_folder, play):
    code, out, _ = run(capsys, "train", "--data", play, "--output", run_folder, *SMALL)
    assert code == 0
    assert "best at step 4 of 4" in out
    assert f"{run_folder} was finished before; nothing was trained" in out and "wrote" not in out


@pytest.mark.parametrize("name", RESULTS)
def test_results_that_were_changed_are_an_error_in_a_line(capsys, run_folder, play, tmp_path, name):
    path = shutil.copytree(run_folder, tmp_path / "run") / "metrics.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: "x"}))
    code, _, err = run(capsys, "train", "--data", play, "--output", tmp_path / "run", *SMALL)
    assert code == 1
    assert err.startswith(f"leap: {path} has 'x' as '{name}': ") and err.count("\n") == 1


def test_train_goes_on_to_more_steps_and_says_so(capsys, play, tmp_path):
    arguments = ["--data", play, "--output", tmp_path / "run", *SMALL]
    run(capsys, "train", *arguments)
    code, out, err = run(capsys, "train", *arguments, "--steps", 6)
    assert code == 0
    assert "best at step 6 of 6" in out and "wrote" in out
    assert err.startswith("leap: going on from step 4 to 6: from here on the learning rate")
    assert (tmp_path / "run" / "metrics-4.json").exists()
    code, out, _ = run(capsys, "train", *arguments)
    assert code == 1  # Fewer than there are.


def test_a_run_that_diverges_is_an_error_in_a_line(capsys, play, tmp_path):
    arguments = ["--data", play, "--output", tmp_path / "run", *SMALL]
    code, _, err = run(capsys, "train", *arguments, "--learning-rate", 1e30)
    assert code == 1
    assert "loss is " in err.splitlines()[-1] and err.splitlines()[-1].startswith("leap: the ")


def test_a_batch_beyond_all_memory_is_an_error_in_a_line(capsys, play, tmp_path):
    arguments = ["--data", play, "--output", tmp_path / "run", *SMALL]
    code, _, err = run(capsys, "train", *arguments, "--batch", 100_000_000)
    assert code == 1
    assert err.startswith("leap: --batch=100000000 in parts of 100000000 takes ")
    assert err.count("\n") == 1
    assert not (tmp_path / "run").exists()  # So that the same folder takes a smaller one.


@pytest.mark.skipif(sys.platform == "win32", reason="there are no such limits")
@pytest.mark.parametrize("limit", [1000, 40_000, 100_000])
def test_a_full_disk_is_an_error_in_a_line_and_the_run_goes_on_later(capsys, play, tmp_path, limit):
    """Files may have so many bytes at most, which torch and safetensors find out as we do."""
    arguments = ["--data", play, "--output", tmp_path / "run", *SMALL]
    code = "import resource, sys\nfrom leap.cli import main\n"
    code += f"resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))\nmain(sys.argv[1:])"
    command = [sys.executable, "-c", code, "lm", "train", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert done.stderr.splitlines()[-1].startswith("leap: ")
    assert "Traceback" not in done.stderr
    code, out, _ = run(capsys, "train", *arguments)
    assert code == 0 and "best at step 4 of 4" in out


def test_eval_prints_the_numbers(capsys, run_folder, play, tmp_path):
    output = tmp_path / "score.json"
    arguments = ["--run", run_folder, "--data", play, "--stateful", "--output", output]
    code, out, err = run(capsys, "eval", *arguments)
    assert (code, err) == (0, "")
    score = json.loads(output.read_text())
    assert f"{score['tokens']:,} tokens" in out
    assert f"perplexity per token  {score['perplexity']:.3f}" in out
    assert f"wrote {output}" in out
    assert out.startswith(f"read {play}: ")


def test_generate_prints_the_prompt_the_text_and_the_speed(capsys, run_folder, tmp_path):
    arguments = ["--run", run_folder, "--tokens", 9, "--past-end", "--state", tmp_path / "tale"]
    code, out, err = run(capsys, "generate", *arguments, "--prompt", "Enter")
    assert code == 0
    assert out.startswith("Enter") and out.endswith("\n")
    assert err.startswith("[9 tokens, ") and " per second, state of " in err
    assert f"kept in {tmp_path / 'tale'}]" in err
    code, out, _ = run(capsys, "generate", *arguments)
    assert code == 0 and not out.startswith("Enter")


def test_compare_prints_the_table(capsys, play, tmp_path):
    flags = [flag if flag != "none" else "learned" for flag in SMALL]
    code, out, err = run(
        capsys, "compare", "--data", play, "--output", tmp_path, "--train-tokenizer", 260,
        "--models", "gpt2", "leap:windowed", *flags,
    )  # fmt: skip
    assert code == 0
    assert "perplexity" in out and "leap:windowed" in out and "peak MiB" in out
    assert out.startswith(f"read {play}: ")
    assert f"wrote {tmp_path / 'results.md'}" in out
    assert "gpt2 2/4" in err


def test_presets_are_listed(capsys, monkeypatch):
    size = PresetSize("tiny", 35_000, 1_234, LeapformerConfig(hidden_size=48, n_layer=3))
    monkeypatch.setattr("leap.cli.lm.preset_sizes", lambda: [size])
    code, out, _ = run(capsys, "presets")
    assert code == 0
    for words in ("tiny", "35,000", "48 x 3", "state bytes", "1,234"):
        assert words in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "--data", "missing.txt"], "no text file at missing.txt"),
        (["train", "--steps", "3", "--epochs", "1"], "--steps=3 and --epochs=1.0: give"),
        (["train", "--batch", "6", "--accumulate", "4"], "--batch=6 does not divide"),
        (["train", "--device", "cuda"], "--device=cuda is not there; this machine"),
        (["train", "--learning-rate", "0"], "--learning-rate=0.0 must be more than 0"),
        (["train", "--seed", "-1"], "--seed=-1 must be from 0 to 4294967295"),
        (["train", "--seed", "4294967296"], "--seed=4294967296 must be from 0"),
        (
            ["train", "--data", "missing.txt", "--attention", "transformer"],
            "--attention='transformer' is none that a language model can have; there are ",
        ),
        (["train", "--data", "missing.txt", "--attention", "bigbird"], "--attention='bigbird' is"),
        (["eval", "--run", "nowhere"], "no run folder at nowhere"),
        (["generate", "--run", "nowhere"], "no run folder at nowhere"),
        (["generate", "--run", "nowhere", "--tokens", "0"], "--tokens=0 must be 1 or more"),
        (["generate", "--run", "nowhere", "--seed", "-2"], "--seed=-2 must be from 0"),
        (
            ["generate", "--run", "nowhere", "--temperature", "1e-300"],
            "--temperature=1e-300 is too",
        ),
        (
            ["generate", "--run", "nowhere", "--prompt", "a\udcff"],
            "--prompt='a\\udcff' is not text in UTF-8 (character 1); convert it",
        ),
        (["compare", "--models", "gpt3"], "--models: 'gpt3': attention='gpt3' is none"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_error_is_one_line(capsys, monkeypatch, tmp_path, arguments, message):
    monkeypatch.chdir(tmp_path)
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (1, "")
    assert err.startswith(f"leap: {message}") and err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["train", "--stesp", "3"], "--stesp"),
        (["train", "--steps", "few"], "--steps"),
        (["eval"], "--run"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_bad_flag_is_named(capsys, arguments, named):
    code, _, err = run(capsys, *arguments)
    assert code == 2
    assert named in err


def test_a_run_is_not_overwritten_by_another(capsys, run_folder, play):
    code, _, err = run(
        capsys, "train", "--data", play, "--output", run_folder, *SMALL, "--seed", "3"
    )
    assert code == 1
    assert err.startswith(f"leap: {run_folder} holds a run with --seed=0, not 3")


def test_the_folder_of_a_comparison_is_no_run(capsys, run_folder, tmp_path):
    for name in ("gpt2", "leap-global"):
        (tmp_path / name).symlink_to(run_folder)
    code, _, err = run(capsys, "generate", "--run", tmp_path)
    assert (code, err) == (
        1,
        f"leap: {tmp_path} is no run, but holds some (gpt2, leap-global); give one of them\n",
    )


def test_an_export_is_no_run(capsys, tmp_path):
    (tmp_path / "manifest.json").write_text("{}")
    code, _, err = run(capsys, "eval", "--run", tmp_path)
    line = f"leap: {tmp_path} holds an exported model; give the run that it was made of\n"
    assert (code, err) == (1, line)


@pytest.mark.parametrize("verb", ["eval", "generate"])
def test_a_model_of_another_task_is_told_from_ours(capsys, tmp_path, verb):
    config = LeapformerConfig(hidden_size=8, n_layer=1, n_head=2, vocab_size=8)
    LeapformerForSequenceClassification(config).save_pretrained(tmp_path / "model")
    capsys.readouterr()
    code, _, err = run(capsys, verb, "--run", tmp_path)
    assert code == 1
    assert err == (
        f"leap: {tmp_path / 'model'} holds no language model, but a "
        "LeapformerForSequenceClassification; give a run of leap lm train\n"
    )


MQAR = [
    *("mqar", "--models", "linear:gate", "--widths", "8", "--vocabulary", "8", "--length", "8"),
    *("--pairs", "2", "--train-pairs", "2", "--batch-tokens", "16", "--steps", "1"),
]


def test_mqar_prints_the_table_and_says_where_it_is(capsys, tmp_path):
    code, out, _ = run(capsys, *MQAR, "--output", tmp_path / "mqar")
    assert code == 0
    assert "2 in 16" in out and "linear:gate" in out
    assert f"wrote {tmp_path / 'mqar' / 'mqar.png'}" in out


def test_mqar_names_the_flag_that_does_not_fit(capsys, tmp_path):
    code, _, err = run(capsys, *MQAR, "--vocabulary", "3", "--output", tmp_path / "mqar")
    assert code == 1
    assert err == (
        "leap: --vocabulary=3 is too small for 2 pairs, whose keys and values all differ; "
        "give 4 or more\n"
    )
