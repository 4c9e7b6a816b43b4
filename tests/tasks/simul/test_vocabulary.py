import gzip

import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from leap.errors import ConfigError, FileError
from leap.runtime.streaming.vocabulary import BOS, EOS, PAD, UNK
from leap.tasks.simul.vocabulary import load_vocabulary, read_vocabulary, train_vocabulary

TEXT = st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from("one und (z\t  .,-"))


@pytest.fixture(scope="module", params=["bpe", "unigram"])
def either(request, sentences):
    texts = [text for pair in sentences for text in (pair.source, pair.target)]
    return train_vocabulary(texts, size=60, kind=request.param)


def test_special_pieces_come_first(either):
    assert either.pieces[:4] == ["<s>", "<pad>", "</s>", "<unk>"]
    assert (BOS, PAD, EOS, UNK) == (0, 1, 2, 3)
    assert len(either) == len(either.hugging_face)


@given(text=TEXT)
def test_pieces_of_the_words_are_the_pieces_of_the_sentence(either, text):
    by_word = [piece for word in text.split() for piece in either.encode(word)]
    assert by_word == either.encode(text)


def test_words_come_back_as_they_were(either, sentences):
    for sentence in sentences:
        for text in (sentence.source, sentence.target):
            assert either.decode(either.encode(text)) == text


def test_a_word_is_held_until_the_next_one_begins(vocabulary):
    words = vocabulary.words()
    seen = [words.push(piece) for piece in vocabulary.encode("three hundred")]
    assert ["three"] in seen
    assert all(found in ([], ["three"]) for found in seen)
    assert words.finish() == ["hundred"]
    assert words.finish() == []


@given(pieces=st.lists(st.integers(0, 59), max_size=20))
def test_words_as_they_come_are_what_hugging_face_decodes(vocabulary, pieces):
    known = [piece for piece in pieces if piece < len(vocabulary)]
    whole = vocabulary.hugging_face.decode(known, skip_special_tokens=True)
    assert vocabulary.decode(known) == " ".join(whole.split())


def test_a_text_about_special_pieces_does_not_become_them(vocabulary):
    assert not {BOS, PAD, EOS} & set(vocabulary.encode("one </s> <s> <pad>"))


def test_hugging_face_finds_the_saved_vocabulary(either, tmp_path):
    either.save(tmp_path)
    again = load_vocabulary(tmp_path)
    assert again.pieces == either.pieces
    assert again.encode("seven (one)") == either.encode("seven (one)")
    assert AutoTokenizer.from_pretrained(tmp_path)("seven").input_ids == [
        *either.encode("seven"),
        EOS,
    ]


def test_multi30k_has_the_pieces_that_sentencepiece_finds(data):
    folder = data / "multi30k-en-de"
    texts = [
        line
        for language in ("en", "de")
        for line in gzip.decompress((folder / f"val.{language}.gz").read_bytes())
        .decode()
        .splitlines()
    ]
    ours = train_vocabulary(texts, size=2000)
    theirs = sentencepiece.SentencePieceProcessor(model_proto=ours.model)
    assert len(ours) == theirs.vocab_size() == 2000
    assert ours.encode_all(texts) == theirs.encode(texts)


def test_a_small_text_gets_as_many_pieces_as_it_has():
    assert 4 < len(train_vocabulary(["one two", "eins zwei"], size=6000)) < 40


def test_a_size_below_the_number_of_characters_is_refused():
    with pytest.raises(ConfigError, match=r"vocabulary=9 .* 6 different characters; give 10 or"):
        train_vocabulary(["one two"], size=9)
    assert len(train_vocabulary(["one two"], size=10)) == 10


def test_no_text_is_refused():
    with pytest.raises(FileError, match="no text to make a vocabulary of"):
        train_vocabulary(["", " "])


def test_a_model_of_another_size_is_refused(vocabulary):
    vocabulary.check_fits(len(vocabulary), "the model")
    with pytest.raises(ConfigError, match=r"runs/a knows 9 subwords, but the vocabulary has \d+"):
        vocabulary.check_fits(9, "runs/a")


def test_a_folder_without_a_vocabulary_is_named(tmp_path):
    with pytest.raises(FileError, match=f"no vocabulary in {tmp_path}"):
        load_vocabulary(tmp_path)


def train_other(path, **options):
    """A SentencePiece file that others may have made."""
    with path.open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(["in the park", "in the park", "the one", "in a park"] * 9),
            model_writer=file,
            **{"vocab_size": 40, "hard_vocab_limit": False, "minloglevel": 2} | options,
        )
    return path


def test_a_sentencepiece_file_of_another_layout_is_refused(tmp_path):
    path = train_other(tmp_path / "other.model")
    with pytest.raises(FileError, match=r"at 1, -1, 2, 0; train one with them at 0, 1, 2 and 3"):
        read_vocabulary(path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"byte_fallback": True, "vocab_size": 300}, r"bytes.*without byte_fallback"),
        ({"split_by_whitespace": False}, r"a space elsewhere .* with split_by_whitespace"),
        ({"treat_whitespace_as_suffix": True}, r"such as .*▁; train"),
    ],
    ids=["bytes", "over-spaces", "space-last"],
)
@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_pieces_that_words_cannot_be_told_by_are_refused(tmp_path, options, message, kind):
    ids = {"bos_id": BOS, "pad_id": PAD, "eos_id": EOS, "unk_id": UNK}
    path = train_other(tmp_path / "other.model", **ids, model_type=kind, **options)
    with pytest.raises(FileError, match=rf"other\.model .*{message}"):
        read_vocabulary(path)
