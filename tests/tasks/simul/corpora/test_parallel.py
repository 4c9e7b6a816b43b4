import gzip

import pytest

from leap.errors import FileError
from leap.tasks.simul.corpora.corpus import texts
from leap.tasks.simul.corpora.parallel import read_multi30k, read_parallel, write_parallel


@pytest.fixture
def folder(tmp_path):
    for name, lines in {
        "train.en": "one\ntwo\n\nfour",
        "val.en": "five\n",
        "val.de": "fünf\n",
        "test_a.en": "six\n",
        "test_a.de": "sechs\n",
        "notes.txt": "not a text of ours\n",
    }.items():
        (tmp_path / name).write_text(lines, encoding="utf-8")
    (tmp_path / "train.de.gz").write_bytes(gzip.compress(b"eins\nzwei\ndrei\nvier\n"))
    return tmp_path


def test_a_folder_has_a_file_a_language_packed_or_not(folder):
    corpus = read_parallel(folder)
    assert {part: texts(found) for part, found in corpus.parts.items()} == {
        "train": ["one", "eins", "two", "zwei", "four", "vier"],
        "valid": ["five", "fünf"],
        "test_a": ["six", "sechs"],
    }
    assert corpus.left_out == ["line 3 of train.en: it has no text"]
    assert corpus.parts["train"][2].id == "train-4"


def test_what_is_written_is_read_again(folder, tmp_path_factory):
    corpus = read_parallel(folder)
    write_parallel(corpus, tmp_path_factory.mktemp("again") / "new")
    again = read_parallel(tmp_path_factory.getbasetemp() / "again0" / "new")
    assert {part: texts(found) for part, found in again.parts.items()} == {
        part: texts(found) for part, found in corpus.parts.items()
    }


def test_a_file_has_tabs_between_languages(tmp_path):
    path = tmp_path / "deu.txt"
    lines = [f"sentence {i}\tSatz {i}\tCC-BY\n" for i in range(200)]
    path.write_text("".join([*lines, "no tab\n"]), encoding="utf-8")
    corpus = read_parallel(path)
    assert set(corpus.parts) == {"train", "valid", "test"}
    assert sum(map(len, corpus.parts.values())) == 200
    assert all(s.target == s.source.replace("sentence", "Satz") for s in corpus.parts["train"])
    assert corpus.left_out == ["line 201 of deu.txt: there is no tab in it"]


def test_bad_files_are_named(folder):
    with pytest.raises(FileError, match="no parallel text at gone"):
        read_parallel(folder.__class__("gone"))
    with pytest.raises(FileError, match=r"no test_a\.fr beside .*test_a\.en"):
        read_parallel(folder, "en", "fr")
    (folder / "val.de").write_text("fünf\nsechs\n", encoding="utf-8")
    with pytest.raises(FileError, match=r"val\.en has 1 lines, but val\.de has 2"):
        read_parallel(folder)
    (folder / "val.de").write_bytes(b"f\xfcnf\n")
    with pytest.raises(FileError, match=r"val\.de is no text in UTF-8"):
        read_parallel(folder)
    damaged = bytearray((folder / "train.de.gz").read_bytes())
    damaged[10:14] = b"torn"
    for content in (b"torn", damaged):
        (folder / "train.de.gz").write_bytes(content)
        with pytest.raises(FileError, match=r"train\.de\.gz is no text"):
            read_parallel(folder)


def test_multi30k_is_whole(data, monkeypatch, shapes_unchecked):
    monkeypatch.setenv("LEAP_DATA", str(data.resolve()))
    corpus = read_multi30k()
    assert {part: len(found) for part, found in corpus.parts.items()} == {
        "train": 29000,
        "valid": 1014,
        "test_2016_flickr": 1000,
        "test_2017_flickr": 1000,
        "test_2017_mscoco": 461,
        "test_2018_flickr": 1071,
    }
    assert not corpus.left_out


def test_multi30k_that_is_not_there_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("LEAP_DATA", str(tmp_path))
    with pytest.raises(FileError, match=r"no Multi30k at .*multi30k-en-de; .* LEAP_DATA"):
        read_multi30k()
