"""Words go to the sentences they translate."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leap.errors import InputError
from leap.tasks.simul.scoring import resegment as resegmenting
from leap.tasks.simul.scoring.resegment import check_size, resegment

WORDS = st.text("abcdÄ", min_size=1, max_size=4)
TEXTS = st.lists(WORDS, min_size=1, max_size=5).map(" ".join)


def cut(text, references):
    words = text.split()
    found = resegment(words, references)
    return [
        " ".join(word for word, place in zip(words, found, strict=True) if place == i)
        for i in range(len(references))
    ]


def test_a_perfect_translation_is_cut_where_its_references_are():
    references = ["Ein Mann liest.", "Zwei Hunde laufen", "Sie singt ."]
    assert cut(" ".join(references), references) == references


def test_one_with_mistakes_is_cut_where_it_is_most_like_them():
    references = ["ein Mann liest ein Buch", "zwei Hunde laufen durch den Schnee"]
    text = "der Mann liest Bücher drei Hunde rennen im Schnee umher"
    assert cut(text, references) == [
        "der Mann liest Bücher",
        "drei Hunde rennen im Schnee umher",
    ]


def test_a_sentence_that_was_left_out_gets_nothing():
    references = ["aaa bbb", "ccc ddd", "eee fff"]
    assert cut("aaa bbb eee fff", references) == ["aaa bbb", "", "eee fff"]
    assert cut("", references) == ["", "", ""]


def test_a_mark_alone_faces_no_word():
    assert cut("- aaa . bbb", ["aaa .", "bbb"]) == ["- aaa .", "bbb"]


@given(references=st.lists(TEXTS, min_size=1, max_size=4), text=st.lists(WORDS, max_size=15))
def test_sentences_are_in_order_and_nothing_is_lost(references, text):
    found = resegment(text, references)
    assert len(found) == len(text) and found == sorted(found)


@given(references=st.lists(TEXTS, min_size=1, max_size=4), text=st.lists(WORDS, max_size=15))
def test_agrees_with_omnisteval(references, text):
    alignment = pytest.importorskip("omnisteval.alignment", reason="OmniSTEval is not installed")
    expected = [
        alignment.Word(word.lower(), seq_id=i)
        for i, reference in enumerate(references)
        for word in reference.split()
    ]
    words = [alignment.Word(word.lower()) for word in text]
    theirs = alignment.process_alignment(
        *alignment.align_sequences(expected, words, char_level=False), char_level=False
    )
    assert resegment(text, references) == [word.seq_id for word in theirs]


def test_what_cannot_be_aligned_is_refused(monkeypatch):
    with pytest.raises(InputError, match="no words"):
        resegment(["a"], ["", " "])
    monkeypatch.setattr(resegmenting, "MOST", 5)
    with pytest.raises(InputError, match="3 words are too many to be aligned to 2; make shorter"):
        resegment(["a"] * 3, ["a b"])
    with pytest.raises(InputError, match="3 words are too many to be aligned to 3"):
        check_size(3, 3)
    check_size(2, 2)
