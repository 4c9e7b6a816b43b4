import pytest
import torch

from leap.errors import ConfigError, FileError
from leap.tasks.files import read_text
from leap.tasks.lm.data import Blocks, count_bytes, count_words, read_corpus


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def lines(n, word="word"):
    return "".join(f"{word} {i}\n" for i in range(n))


def test_a_file_is_cut_at_line_ends_and_nothing_is_lost(tmp_path):
    text = lines(1000)
    corpus = read_corpus(str(write(tmp_path / "play.txt", text)))
    assert "".join([*corpus.train, *corpus.valid, *corpus.test]) == text
    for part in (corpus.valid, corpus.test):
        assert 0.04 < len("".join(part)) / len(text) < 0.06
        assert part[0].startswith("word ") and part[0].endswith("\n")


def test_a_file_of_one_line_is_cut_too(tmp_path):
    corpus = read_corpus(str(write(tmp_path / "play.txt", "x" * 100)))
    assert [len(part[0]) for part in (corpus.train, corpus.valid, corpus.test)] == [90, 5, 5]


def test_a_folder_with_parts_has_these_parts(tmp_path):
    write(tmp_path / "train.txt", "a b c\n")
    write(tmp_path / "validation.txt", "d\n")
    write(tmp_path / "test.txt", "e\n")
    write(tmp_path / "README.md", "f\n")
    corpus = read_corpus(str(tmp_path))
    assert (corpus.train, corpus.valid, corpus.test) == (["a b c\n"], ["d\n"], ["e\n"])


def test_parts_may_have_a_name_before_theirs(tmp_path):
    for part in ("train", "valid", "test"):
        write(tmp_path / f"wiki.{part}.tokens", f"{part}\n")
    corpus = read_corpus(str(tmp_path))
    assert (corpus.train, corpus.valid, corpus.test) == (["train\n"], ["valid\n"], ["test\n"])
    assert corpus.name == f"{tmp_path} (wiki.train.tokens, wiki.valid.tokens, wiki.test.tokens)"


def test_a_program_called_train_is_no_part(tmp_path):
    write(tmp_path / "train.py", lines(100, "train"))
    write(tmp_path / "model.py", lines(100, "model"))
    corpus = read_corpus(str(tmp_path))
    joined = "".join([*corpus.train, *corpus.valid, *corpus.test])
    assert joined == lines(100, "model") + "\n" + lines(100, "train")
    assert corpus.name == f"{tmp_path} (2 files)"


def test_empty_files_of_a_folder_are_left_out(tmp_path):
    write(tmp_path / "a.py", lines(100))
    write(tmp_path / "__init__.py", "")
    write(tmp_path / "blank.py", " \n")
    corpus = read_corpus(str(tmp_path))
    assert "".join([*corpus.train, *corpus.valid, *corpus.test]) == lines(100)
    assert corpus.name == f"{tmp_path} (1 file, 2 empty left out)"


def test_a_folder_of_empty_files_is_named(tmp_path):
    write(tmp_path / "__init__.py", "")
    with pytest.raises(FileError, match=r"the files in .* are empty; give"):
        read_corpus(str(tmp_path))


def test_a_part_that_is_missing_is_cut_off_the_training_text(tmp_path):
    write(tmp_path / "train.txt", lines(200))
    write(tmp_path / "test.txt", "e\n")
    corpus = read_corpus(str(tmp_path))
    assert corpus.train[0] + corpus.valid[0] == lines(200)
    assert corpus.test == ["e\n"]


def test_two_files_for_one_part_are_an_error(tmp_path):
    write(tmp_path / "train.txt", "a\n")
    write(tmp_path / "train.md", "b\n")
    with pytest.raises(FileError, match=r"train\.md and train\.txt for one part"):
        read_corpus(str(tmp_path))


def test_a_folder_of_many_files_holds_out_whole_files(tmp_path):
    for i in range(40):
        write(tmp_path / f"{i % 3}" / f"{i:02}.txt", f"file {i}\n")
    write(tmp_path / ".git" / "index", "hidden\n")
    corpus = read_corpus(str(tmp_path))
    assert [len(part) for part in (corpus.train, corpus.valid, corpus.test)] == [36, 2, 2]
    documents = [*corpus.train, *corpus.valid, *corpus.test]
    assert sorted(documents) == sorted(f"file {i}\n" for i in range(40))


def test_a_folder_of_few_files_is_cut_as_one_text(tmp_path):
    for i in range(3):
        write(tmp_path / f"{i}.txt", lines(100, str(i)))
    corpus = read_corpus(str(tmp_path))
    joined = "".join([*corpus.train, *corpus.valid, *corpus.test])
    assert joined == "\n".join(lines(100, str(i)) for i in range(3))


def test_by_default_it_is_the_python_library_in_the_same_order_each_time():
    corpus = read_corpus()
    assert count_bytes(corpus.train) > 1_000_000
    assert len(corpus.valid) > 1 and len(corpus.test) > 1
    assert any("def " in text for text in corpus.test)
    assert read_corpus() == corpus


def test_wikitext_2_has_the_published_number_of_words(data, monkeypatch):
    monkeypatch.setenv("LEAP_DATA", str(data.resolve()))
    if not (data / "wikitext-2").is_dir():
        pytest.skip(f"no wikitext-2 in {data}")
    corpus = read_corpus("wikitext-2")
    counts = [count_words(part) for part in (corpus.train, corpus.valid, corpus.test)]
    assert counts == [2_088_628, 217_646, 245_569]


def test_a_hub_that_cannot_be_reached_is_not_tried_over_and_over(monkeypatch):
    datasets = pytest.importorskip("datasets")
    hub = pytest.importorskip("huggingface_hub")
    asked, tried = [], []

    def load_dataset(name, configuration):
        tried.append((hub.constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE))
        raise ConnectionError("Couldn't reach it")

    class Session:
        def head(self, url, timeout):
            asked.append(timeout)
            raise OSError("Name or service not known")

    monkeypatch.setattr(hub, "get_session", Session)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(FileError, match=r"no text at nobody/nothing: .*Couldn't reach it"):
        read_corpus("nobody/nothing")
    assert (asked, tried) == ([5.0], [(True, True)])  # Else it would ask six times.
    assert not hub.constants.HF_HUB_OFFLINE and not datasets.config.HF_HUB_OFFLINE


def test_wikitext_2_comes_from_the_datasets_library_where_there_is_no_folder(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setenv("LEAP_DATA", str(tmp_path))
    asked = []

    def load_dataset(*arguments):
        asked.append(arguments)
        rows = datasets.Dataset.from_dict({"text": ["", " = A = \n", " b \n"]})
        return datasets.DatasetDict(train=rows, validation=rows, test=rows)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    corpus = read_corpus("wikitext-2")
    assert asked == [("Salesforce/wikitext", "wikitext-2-v1")]
    assert corpus.valid == ["\n = A = \n b \n"]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("wikimedia/wikipedia:20231101.en", ("wikimedia/wikipedia", "20231101.en")),
        ("some/data:plain.txt", ("some/data", "plain.txt")),
        ("some/data-v1.5", ("some/data-v1.5", None)),
    ],
)
def test_a_dot_in_the_name_of_a_dataset_is_no_ending(source, expected, monkeypatch):
    datasets = pytest.importorskip("datasets")
    asked = []

    def load_dataset(*arguments):
        asked.append(arguments)
        return datasets.Dataset.from_dict({"text": [f"line {i}" for i in range(100)]})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert read_corpus(source).name == source
    assert asked == [expected]


def test_a_saved_dataset_is_read(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict(
        {"n": list(range(100)), "line": [f"line {i}" for i in range(100)]}
    )
    rows.save_to_disk(str(tmp_path / "one"))
    corpus = read_corpus(str(tmp_path / "one"))
    assert corpus.train[0].startswith("line 0\nline 1\n")
    datasets.DatasetDict(train=rows, dev=rows).save_to_disk(str(tmp_path / "two"))
    corpus = read_corpus(str(tmp_path / "two"))
    assert corpus.valid[0].endswith("line 99\n") and corpus.test[0].endswith("line 99\n")


def test_a_dataset_without_text_says_what_it_has(tmp_path):
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"a": ["x"], "b": ["y"]}).save_to_disk(str(tmp_path / "saved"))
    with pytest.raises(FileError, match="no column of text; it has a, b"):
        read_corpus(str(tmp_path / "saved"))


def test_a_dataset_that_cannot_be_had_is_named(monkeypatch):
    datasets = pytest.importorskip("datasets")

    def load_dataset(*arguments):
        raise ConnectionError("no network\nand more")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(FileError, match=r"no text at tiny: .* no tiny for us \(no network\)$"):
        read_corpus("tiny")


@pytest.mark.parametrize("source", ["missing.txt", "./missing", "~/missing", "/missing/text"])
def test_a_missing_file_is_named(source):
    with pytest.raises(FileError, match=f"^no text file at {source}$"):
        read_corpus(source)


@pytest.mark.parametrize("content", [b"", b" \n\n\t"])
def test_an_empty_file_is_named(tmp_path, content):
    (tmp_path / "play.txt").write_bytes(content)
    with pytest.raises(FileError, match=r"play\.txt is empty"):
        read_corpus(str(tmp_path / "play.txt"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\x89PNG\r\n\x1a\n\0\0\0", "is a binary file"),
        ("Düne".encode("utf-16"), "is a binary file"),
        ("Düne".encode("latin-1"), r"is not text in UTF-8 \(byte 1\)"),
    ],
)
def test_a_file_that_is_not_text_is_named(tmp_path, content, message):
    (tmp_path / "play.txt").write_bytes(content)
    with pytest.raises(FileError, match=rf"play\.txt {message}"):
        read_text(tmp_path / "play.txt")


def test_one_bad_file_in_a_folder_is_named(tmp_path):
    write(tmp_path / "a.txt", "fine")
    (tmp_path / "photo.jpg").write_bytes(b"\xff\xd8\0")
    with pytest.raises(FileError, match=r"photo\.jpg is a binary file"):
        read_corpus(str(tmp_path))


def test_a_folder_without_text_is_named(tmp_path):
    with pytest.raises(FileError, match="no text files in"):
        read_corpus(str(tmp_path))


def test_a_text_too_short_to_hold_out_any_of_it_is_named(tmp_path):
    with pytest.raises(FileError, match=r"the test part of .* is empty"):
        read_corpus(str(write(tmp_path / "play.txt", "x\n")))


def test_a_part_that_is_not_there_is_named(tmp_path):
    corpus = read_corpus(str(write(tmp_path / "play.txt", lines(100))))
    with pytest.raises(ConfigError, match="part='tset' is not known; there are train, valid, test"):
        corpus.part("tset")


def test_words_are_counted_with_line_ends():
    assert count_words([" = A title = \n", "two  words\n\n"]) == 9
    assert count_bytes(["é", "a"]) == 3


@pytest.mark.parametrize("n_tokens", [9, 16, 17, 18, 40])
def test_each_token_is_foretold_and_sees_what_stands_before_it(n_tokens):
    tokens = torch.arange(n_tokens, dtype=torch.int32)
    blocks = [Blocks(tokens, 8, "play")[i] for i in range(len(Blocks(tokens, 8, "play")))]
    for block in blocks:
        assert len(block["input_ids"]) == 8
        assert torch.equal(block["shift_labels"], block["input_ids"] + 1)
    targets = torch.cat([block["shift_labels"] for block in blocks])
    assert sorted(set(targets.tolist())) == list(range(1, n_tokens))
    assert len(targets) - len(set(targets.tolist())) < 8


def test_a_text_shorter_than_a_sequence_is_named():
    with pytest.raises(
        FileError, match=r"play has 8 tokens, too few for .* length=8; give a longer"
    ):
        Blocks(torch.arange(8), 8, "play")
    with pytest.raises(ConfigError, match="length=0 must be 1 or more"):
        Blocks(torch.arange(8), 0, "play")
