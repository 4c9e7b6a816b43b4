import zipfile

import pytest

from leap.errors import ConfigError, FileError
from leap.tasks.simul.corpora.corpus import texts
from leap.tasks.simul.corpora.tatoeba import read_tatoeba
from leap.tasks.simul.prepare import PrepareConfig, read_corpus


@pytest.fixture
def archive(tmp_path, monkeypatch):
    monkeypatch.setenv("LEAP_DATA", str(tmp_path))
    path = tmp_path / "tatoeba" / "deu-eng.zip"
    path.parent.mkdir()
    lines = [f"Hello {i}.\tHallo {i}.\nHello {i}.\tGuten Tag {i}.\n" for i in range(500)]
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("deu.txt", "".join(lines))
    return path


def test_parts_share_no_english_sentence_and_held_out_ones_stand_once(archive):
    corpus = read_corpus(PrepareConfig(corpus="tatoeba"))
    sources = {part: [s.source for s in found] for part, found in corpus.parts.items()}
    assert set(sources) == {"train", "valid", "test"}
    assert not set(sources["train"]) & (set(sources["valid"]) | set(sources["test"]))
    assert len(sources["train"]) == 2 * len(set(sources["train"]))
    for part in ("valid", "test"):
        assert sources[part]
        assert len(sources[part]) == len(set(sources[part]))
    assert all(text.startswith("Hello") for text in texts(corpus.parts["valid"])[::2])


def test_what_is_not_there_is_named(archive):
    with pytest.raises(FileError, match=r"no Tatoeba at .*spa-eng\.zip"):
        read_tatoeba("es")
    archive.write_bytes(archive.read_bytes()[:1000])
    with pytest.raises(FileError, match=r"deu-eng\.zip is no archive with deu\.txt"):
        read_tatoeba("de")
    with pytest.raises(ConfigError, match="from en to de or es, not en to fr"):
        PrepareConfig(corpus="tatoeba", target="fr")
