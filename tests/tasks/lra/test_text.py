import json
import lzma
from pathlib import Path

import pytest

from leap.errors import FileError
from leap.tasks.lra import sources
from leap.tasks.lra.text import read

REVIEWS = {"train": [("bad", 0), ("good é", 1), ("dull", 0)], "test": [("fine", 1), ("poor", 0)]}


def write_jsonl(folder):
    folder.mkdir(exist_ok=True)
    for part, reviews in REVIEWS.items():
        lines = [json.dumps({"id": "x", "label": label, "text": text}) for text, label in reviews]
        content = lzma.compress("".join(line + "\n" for line in lines).encode())
        (folder / f"{part}.jsonl.xz").write_bytes(content)
    return folder


def write_folder(folder):
    for part, reviews in REVIEWS.items():
        for i, (text, label) in enumerate(reviews):
            path = folder / part / ("neg", "pos")[label] / f"{i}_5.txt"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    return folder


def from_library(folder, monkeypatch):
    columns = {
        part: {"text": [text for text, _ in reviews], "label": [label for _, label in reviews]}
        for part, reviews in REVIEWS.items()
    }
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets, "load_dataset", lambda name: {"stanfordnlp/imdb": columns}[name])


def reviews(examples):
    pairs = ((bytes(examples.inputs[i]), examples.labels[i]) for i in range(len(examples)))
    return sorted((text.decode(), int(label)) for text, label in pairs)


@pytest.mark.parametrize("source", ["jsonl", "folder", "library"])
def test_reviews_come_from_any_source_byte_by_byte(tmp_path, monkeypatch, source):
    if source == "library":
        folder = from_library(tmp_path, monkeypatch)
    else:
        folder = {"jsonl": write_jsonl, "folder": write_folder}[source](tmp_path)
    found = read(folder, 100, seed=0)
    assert set(found) == set(REVIEWS)
    for part, examples in found.items():
        assert reviews(examples) == sorted(REVIEWS[part])
        assert examples.cut.sum() == 0


def test_a_long_review_is_cut_and_counted(tmp_path):
    found = read(write_jsonl(tmp_path), 4, seed=0)
    assert reviews(found["train"]) == [("bad", 0), ("dull", 0), ("good", 1)]
    assert found["train"].cut.sum() == 1 and found["test"].cut.sum() == 0


def test_the_order_is_drawn_from_the_seed(tmp_path):
    write_jsonl(tmp_path)
    orders = {tuple(read(tmp_path, 9, seed)["train"].labels.tolist()) for seed in range(8)}
    assert len(orders) == 3
    first, again = (read(tmp_path, 9, seed=5)["train"] for _ in range(2))
    assert bytes(first.inputs.tokens) == bytes(again.inputs.tokens)


def test_a_file_that_was_cut_off_is_named(tmp_path):
    path = write_jsonl(tmp_path) / "test.jsonl.xz"
    path.write_bytes(path.read_bytes()[:-15])
    with pytest.raises(FileError, match=r"test\.jsonl\.xz is broken or cut off"):
        read(tmp_path, 100, seed=0)


@pytest.mark.parametrize("line", ["{", "[]", '{"text": "a"}', '{"text": "a", "label": 3}'])
def test_a_line_that_is_no_review_is_named(tmp_path, line):
    write_jsonl(tmp_path)
    (tmp_path / "train.jsonl.xz").write_bytes(lzma.compress(line.encode()))
    with pytest.raises(FileError, match=r"train\.jsonl\.xz is broken .* line 1 is no review"):
        read(tmp_path, 100, seed=0)


def test_missing_and_empty_files_are_named(tmp_path):
    with pytest.raises(FileError, match=r"neither train/pos nor train\.jsonl\.xz"):
        read(tmp_path, 100, seed=0)
    write_folder(tmp_path)
    (tmp_path / "test/pos/0_5.txt").write_text("")
    with pytest.raises(FileError, match=r"test/pos/0_5\.txt is broken or cut off: it is empty"):
        read(tmp_path, 100, seed=0)
    (tmp_path / "test/pos/0_5.txt").unlink()
    with pytest.raises(FileError, match=r"no reviews in .*test/pos"):
        read(tmp_path, 100, seed=0)


def test_a_folder_named_as_the_archive_must_hold_all_of_it(tmp_path, monkeypatch):
    folder = tmp_path / "aclImdb"
    folder.mkdir()
    with pytest.raises(FileError, match=r"train/neg holds 2 of aclImdb's 12,500 examples; get it"):
        read(write_folder(folder), 100, seed=0)
    monkeypatch.chdir(folder)
    with pytest.raises(FileError, match=r"rename the folder aclImdb if that is meant"):
        read(Path(), 100, seed=0)
    assert len(read(folder.rename(tmp_path / "some"), 100, seed=0)["train"]) == 3


def test_a_library_that_has_nothing_says_what_to_give(monkeypatch):
    datasets = pytest.importorskip("datasets")

    def offline(name):
        raise ConnectionError("no network\nat all")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(FileError, match=r"no imdb for us \(no network\); give an aclImdb folder"):
        sources.from_library("imdb", "give an aclImdb folder")


def test_imdb_is_whole(data):
    if not (data / "imdb").is_dir():
        pytest.skip(f"no imdb in {data}")
    found = read(data / "imdb", 4000, seed=0)
    assert [len(part) for part in found.values()] == [25_000, 25_000]
    assert [int(part.labels.sum()) for part in found.values()] == [12_500, 12_500]
    # Counted by those who collected the files.
    assert [int(part.cut.sum()) for part in found.values()] == [792, 718]
