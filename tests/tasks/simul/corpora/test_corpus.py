import pytest

from leap.errors import FileError
from leap.tasks.simul.corpora.corpus import Corpus, Reader, Sentence, texts, with_held_out


def test_one_bad_sentence_does_not_harm_the_others():
    reader = Reader()
    for number, (source, target) in enumerate([("a", "b"), (" ", "b"), ("a  c\t", "d\u2009e")]):
        with reader.sentence(f"line {number}"):
            reader.add("train", Sentence(source, target))
    corpus = reader.corpus("text", "en", "de")
    assert texts(corpus.parts["train"]) == ["a", "b", "a c", "d e"]
    assert corpus.left_out == ["line 1: it has no text"]


def test_a_corpus_of_nothing_is_refused():
    reader = Reader()
    with reader.sentence("line 1"):
        raise FileError("no sound file at a.wav")
    with pytest.raises(FileError, match=r"no sentence of text can be .* \(line 1: no sound file"):
        reader.corpus("text", "en", "de")


def test_what_is_held_out_is_not_learnt():
    sentences = [Sentence(f"sentence {i // 2}", f"Satz {i}") for i in range(400)]
    parts = with_held_out(Corpus("text", "en", "de", {"train": sentences})).parts
    assert set(parts) == {"train", "valid", "test"}
    assert sum(map(len, parts.values())) == 400
    sources = {part: {sentence.source for sentence in found} for part, found in parts.items()}
    assert 2 < len(sources["valid"]) < 25 and 2 < len(sources["test"]) < 25
    assert not sources["train"] & (sources["valid"] | sources["test"])
    assert not sources["valid"] & sources["test"]


def test_parts_that_are_there_stay_as_they_are():
    sentences = [Sentence(f"sentence {i}", "Satz") for i in range(100)]
    given = {"train": sentences, "valid": sentences[:3], "tst-COMMON": sentences[:2]}
    assert with_held_out(Corpus("text", "en", "de", given)).parts == given


def test_too_few_to_hold_out_are_refused():
    with pytest.raises(FileError, match=r"text has 1 sentences, too few .* a part named valid"):
        with_held_out(Corpus("text", "en", "de", {"train": [Sentence("a", "b")]}))
