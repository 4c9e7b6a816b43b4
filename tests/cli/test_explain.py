"""Promises of `leap explain`: for language models, classifiers and translation models."""

import json
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch

from leap.cli import main
from leap.cli.verbs import VERBS
from leap.models import (
    LeapformerConfig,
    LeapformerForSeq2SeqLM,
    LeapformerForSequenceClassification,
    LeapformerSeq2SeqConfig,
)
from leap.tasks.lm.tokenizer import byte_tokenizer

SMALL = [
    *("--hidden-size", "16", "--n-layer", "2", "--n-head", "2", "--length", "32"),
    *("--batch", "4", "--steps", "4", "--evaluate-every", "2", "--log-every", "1"),
    *("--position-embedding", "none", "--proportion", "travelled", "--gate", "head"),
    *("--learning-rate", "0.02"),
]


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("explain")
    play = folder / "play.txt"
    play.write_text("".join(f"Enter the king, number {i}.\n" for i in range(400)))
    main(["lm", "train", "--data", str(play), "--output", str(folder / "run"), *SMALL])
    return folder / "run"


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    """A folder with a classifier of texts, untrained, and its tokenizer."""
    folder = tmp_path_factory.mktemp("classifier")
    torch.manual_seed(0)
    config = LeapformerConfig(
        vocab_size=257, hidden_size=16, n_layer=1, n_head=2, n_positions=64, attention="leap",
        num_labels=2,
    )  # fmt: skip
    LeapformerForSequenceClassification(config).save_pretrained(folder)
    byte_tokenizer().save(folder)
    return folder


def run(capsys, *arguments):
    code = 0
    try:
        main(["explain", *map(str, arguments)])
    except SystemExit as leaving:
        code = leaving.code
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.parametrize("verb", VERBS["explain"])
def test_help_explains_the_flags_and_ends_with_examples(capsys, verb):
    code, out, _ = run(capsys, verb, "--help")
    assert code == 0 and VERBS["explain"][verb].summary in out
    for line, meaning in VERBS["explain"][verb].examples:
        assert f"  leap {line}  " in out and meaning in out


def test_text_tells_what_carries_a_prediction_and_what_striking_out_does(
    capsys, run_folder, tmp_path
):
    page, numbers = tmp_path / "new" / "why.html", tmp_path / "why.json"
    text = "Enter <b>the"
    code, out, err = run(
        capsys, "text", "--run", run_folder, text, "--html", page, "--json", numbers, "--strike", 3
    )
    assert (code, err) == (0, "")
    assert out.startswith("predicted: '") and "likeliest: " in out
    assert "probability without it" in out and f"wrote {page}" in out and f"wrote {numbers}" in out
    written = page.read_text()
    assert "<script" not in written and "http" not in written
    assert "&lt;</span>" in written and "<b>the" not in written
    found = json.loads(numbers.read_text())
    assert "".join(found["pieces"][1:]) == text
    assert len(found["importance"]) == len(found["pieces"]) and len(found["struck"]) == 3
    assert all(each["token"] < len(text) for each in found["struck"])  # Not that which predicts.
    assert [layer["name"] for layer in found["layers"]] == ["leapformer", "leapformer"]


def test_text_explains_the_token_that_did_come(capsys, run_folder, tmp_path):
    numbers = tmp_path / "why.json"
    run(capsys, "text", "--run", run_folder, "Enter", "--token", 2, "--json", numbers)
    found = json.loads(numbers.read_text())
    assert found["target"] == "t" and "".join(found["pieces"][1:]) == "En"


def test_on_a_terminal_the_text_is_shaded(capsys, run_folder, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    _, out, _ = run(capsys, "text", "--run", run_folder, "Enter")
    assert "\x1b[" in out


def test_text_explains_a_class(capsys, classifier):
    code, out, _ = run(capsys, "text", "--run", classifier, "a good film")
    assert code == 0 and "predicted: 'class " in out


def test_proportions_has_a_row_per_layer_and_how_they_moved(capsys, run_folder, tmp_path):
    pytest.importorskip("pandas")
    code, out, _ = run(
        capsys, "proportions", "--run", run_folder, "--output", tmp_path, "--quiet", 5
    )
    assert code == 0 and "layer 1" in out and "travelled" in out
    assert (tmp_path / "proportions.png").read_bytes().startswith(b"\x89PNG")
    found = json.loads((tmp_path / "results.json").read_text())
    assert all(each["half_life"] > 0 and each["spread"] > 0 for each in found["layers"])
    rows = (tmp_path / "proportions.csv").read_text().splitlines()
    assert rows[0] == "layer,part,head,token,value" and len(rows) > 100


def test_what_a_classifier_does_not_read_is_told(capsys, classifier, tmp_path):
    numbers = tmp_path / "why.json"
    page = tmp_path / "why.html"
    files = ("--json", numbers, "--html", page)
    code, out, _ = run(capsys, "text", "--run", classifier, "good " * 20, *files)
    assert code == 0 and "the last 36 tokens were left out" in out
    found = json.loads(numbers.read_text())
    assert found["left_out"] == 36 and len(found["pieces"]) == 64
    assert "the last 36 tokens of the text were not read" in page.read_text()


@pytest.fixture(scope="module")
def arena(tmp_path_factory):
    """Folders of Long Range Arena: a small task, and runs of it."""
    from leap.tasks.lra import cache
    from leap.tasks.lra.cache import Examples, Sequences
    from leap.tasks.lra.data import TASKS

    folder = tmp_path_factory.mktemp("arena")
    info = replace(TASKS["listops"], max_length=12)
    rows = Examples(
        Sequences.join([bytes([i % 3, 2, 1, i % 5]) for i in range(20)]),
        (np.arange(20) % 10).astype(np.uint8),
    )
    splits = dict.fromkeys(("train", "valid", "test"), rows)
    cache.write(folder / "data" / "listops", splits, {"task": asdict(info)})
    main(
        [
            *("lra", "train", "--task", "listops", "--data", str(folder / "data")),
            *("--attention", "leapformer", "leapformer:travelled:gate", "--steps", "4"),
            *("--batch", "4", "--evaluate-every", "2", "--output", str(folder / "runs")),
        ]
    )
    return folder


def test_proportions_of_an_arena_run_are_those_of_a_test_example(capsys, arena, tmp_path):
    pytest.importorskip("pandas")
    data = ("--data", arena / "data", "--output", tmp_path)
    runs = arena / "runs" / "listops"
    for name, kind in (("leapformer", "learned"), ("leapformer-travelled-gate", "travelled")):
        code, out, err = run(capsys, "proportions", "--run", runs / name / "seed-0", *data)
        assert (code, err) == (0, "") and out.count(kind) == 2
        found = json.loads((tmp_path / "results.json").read_text())
        assert found["pieces"] == ["0", "2", "1", "0"]
    assert all(each["half_life"] > 0 for each in found["layers"])
    code, _, err = run(capsys, "proportions", "--run", runs / "leapformer", *data)
    assert code == 1 and err.endswith("is no run, but holds some (seed-0); give one of them\n")
    code, _, err = run(capsys, "proportions", "--run", runs / "leapformer" / "seed-0", *data,
                       "--text", "a")  # fmt: skip
    assert code == 1 and "is of listops, and reads no text; give none" in err


def test_proportions_of_a_translation_are_of_source_and_target(capsys, tmp_path):
    for module in ("pandas", "num2words", "sentencepiece"):
        pytest.importorskip(module)
    toy = ("--output", tmp_path / "toy", "--limit", 60)
    small = [
        *("--hidden-size", 16, "--feed-forward-size", 16, "--n-head", 2, "--n-layer", 1),
        *("--encoder-layers", 1, "--steps", 4, "--evaluate-every", 2, "--log-every", 2),
    ]
    main([*map(str, ("simul", "prepare", *toy))])
    given = ("simul", "train", "--data", tmp_path / "toy", "--output", tmp_path / "run", *small)
    main([*map(str, given)])
    capsys.readouterr()
    code, out, err = run(
        capsys, "proportions", "--run", tmp_path / "run", "--output", tmp_path, "--text",
        "one hundred and nine",
    )  # fmt: skip
    assert (code, err) == (0, "")
    assert "encoder layer 0" in out and "decoder layer 0 cross" in out
    found = json.loads((tmp_path / "results.json").read_text())
    assert found["pieces"][-1] == "</s>" and found["written"][0] == "<s>"
    rows = (tmp_path / "proportions.csv").read_text().splitlines()
    read = [row for row in rows if row.startswith("encoder layer 0,place,0,")]
    assert len(read) == len(found["pieces"])


def test_proportions_of_a_classifier_show_its_focus(capsys, classifier, tmp_path):
    pytest.importorskip("pandas")
    code, out, _ = run(capsys, "proportions", "--run", classifier, "--output", tmp_path)
    assert code == 0 and "leap" in out


def test_faithfulness_has_a_row_per_method(capsys, run_folder, tmp_path, monkeypatch):
    monkeypatch.setattr("leap.tasks.explain.faithfulness.GAIN", -9.0)
    code, out, _ = run(
        capsys, "faithfulness", "--run", run_folder, "--texts", 3, "--length", 12,
        "--methods", "weights", "roll-up", "random", "--output", tmp_path,
    )  # fmt: skip
    assert code == 0 and "3 texts" in out and "largest gap: " in out
    assert {path.name for path in tmp_path.iterdir()} == {
        "results.md", "results.csv", "results.json", "curves.png"
    }  # fmt: skip
    assert "| random |" in (tmp_path / "results.md").read_text()


def test_faithfulness_reads_texts_of_a_file(capsys, classifier, tmp_path):
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(json.dumps({"text": f"film {i} was good"}) + "\n" for i in range(9)))
    arguments = ["--run", classifier, "--texts", 4, "--methods", "logit", "--output", tmp_path]
    code, out, _ = run(capsys, "faithfulness", *arguments, "--data", texts)
    assert code == 0 and "4 texts" in out
    texts.write_text("no JSON\n")
    code, _, err = run(capsys, "faithfulness", *arguments, "--data", texts)
    assert code == 1 and "has a line without a JSON object with a text" in err
    code, _, err = run(capsys, "faithfulness", *arguments, "--data", tmp_path / "none.jsonl")
    assert code == 1 and "cannot read texts from" in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["text", "--run", "nowhere", "a"], "no run folder at nowhere"),
        (["text", "--run", "nowhere", ""], "--text is empty; give a text"),
        (["text", "--run", "nowhere", "\udcff"], "is not text in UTF-8"),
        (["text", "--run", "nowhere", "a", "--method", "x"], "--method='x' is not known"),
        (["text", "--run", "nowhere", "a", "--html", "."], "--html=. is a folder; give a file"),
        (["text", "--run", "nowhere", "a", "--json", "."], "--json=. is a folder; give a file"),
        (["proportions", "--run", "nowhere"], "no run folder at nowhere"),
        (["proportions", "--run", "nowhere", "--quiet", "-1"], "--quiet=-1"),
        (["faithfulness", "--run", "nowhere", "--texts", "1"], "--texts=1 must be 2 or more"),
    ],
)
def test_bad_input_is_one_line(capsys, arguments, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, _, err = run(capsys, *arguments)
    assert code == 1 and words in err and err.count("\n") == 1


def test_a_token_that_is_not_there_is_named(capsys, run_folder):
    code, _, err = run(capsys, "text", "--run", run_folder, "ab", "--token", 9)
    assert code == 1 and "--token=9 is not among the 3 of this text" in err


def test_a_translation_model_has_no_class(capsys, tmp_path):
    config = LeapformerSeq2SeqConfig(
        vocab_size=61, hidden_size=16, n_head=2, n_layer=1, encoder_layers=1
    )
    LeapformerForSeq2SeqLM(config).save_pretrained(tmp_path)
    capsys.readouterr()
    code, _, err = run(capsys, "text", "--run", tmp_path, "a")
    assert code == 1 and err.startswith("leap: ") and err.count("\n") == 1
