import pytest
from transformers import AutoTokenizer

from leap.errors import ConfigError, FileError
from leap.runtime import text as runtime_text
from leap.tasks.lm import tokenizer as module
from leap.tasks.lm.tokenizer import (
    byte_tokenizer,
    load_tokenizer,
    make_tokenizer,
    train_tokenizer,
)

AWKWARD = "Größe 漢字 🙂\t<|endoftext|>\r\n\n\n  indented\0\x7f \n"


@pytest.fixture(scope="module")
def trained(play):
    return train_tokenizer([play.read_text(encoding="utf-8")], 300)


@pytest.fixture(scope="module")
def sentencepiece(play, tmp_path_factory):
    """A small SentencePiece file of each kind."""
    spm = pytest.importorskip("sentencepiece")
    folder = tmp_path_factory.mktemp("spm")

    def make(kind, **options):
        prefix = folder / "-".join([kind, *map(str, options.values())])
        spm.SentencePieceTrainer.train(
            input=str(play),
            model_prefix=str(prefix),
            vocab_size=70,
            model_type=kind,
            minloglevel=2,
            **options,
        )
        return prefix.with_suffix(".model")

    return make


def test_bytes_are_their_own_numbers():
    tokenizer = byte_tokenizer()
    assert (tokenizer.vocab_size, tokenizer.eos_id) == (257, 256)
    assert tokenizer.encode(AWKWARD).tolist() == list(AWKWARD.encode())
    assert tokenizer.encode("").tolist() == []
    assert tokenizer.encode_documents(["aé", "b"]).tolist() == [97, 195, 169, 256, 98, 256]


@pytest.mark.parametrize("kind", ["bytes", "trained"])
def test_every_text_comes_back_as_it_was(kind, trained):
    tokenizer = byte_tokenizer() if kind == "bytes" else trained
    assert tokenizer.decode(tokenizer.encode(AWKWARD).tolist()) == AWKWARD


def test_a_trained_one_has_the_size_that_was_asked_for_and_shorter_texts(trained, play):
    text = play.read_text(encoding="utf-8")
    assert trained.vocab_size == 300
    assert len(trained.encode(text)) < 0.6 * len(text.encode())
    assert train_tokenizer([text], 300).fingerprint == trained.fingerprint


def test_a_text_is_cut_where_no_token_is(trained, play, monkeypatch):
    text = play.read_text(encoding="utf-8") + "\n\n\n  x\n \n y"
    whole = trained.encode(text).tolist()
    monkeypatch.setattr(runtime_text, "CHUNK", 10)
    assert trained.encode(text).tolist() == whole


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_sentencepiece_makes_the_same_pieces_and_ends_lines(sentencepiece, kind, play):
    path = sentencepiece(kind)
    tokenizer = make_tokenizer(str(path))
    import sentencepiece as spm

    reference = spm.SentencePieceProcessor(model_file=str(path))
    lines = play.read_text(encoding="utf-8").splitlines()[:40]
    expected = [token for line in lines for token in (*reference.encode(line), tokenizer.eos_id)]
    assert tokenizer.encode_documents(["\n".join(lines) + "\n"]).tolist() == expected
    assert tokenizer.encode_documents(["\n".join(lines)]).tolist() == expected
    assert tokenizer.decode(expected) == "\n".join(lines) + "\n"


def test_sentencepiece_falls_back_to_bytes_if_it_can(play):
    spm = pytest.importorskip("sentencepiece")
    path = play.with_name("fallback.model")
    spm.SentencePieceTrainer.train(
        input=str(play),
        model_prefix=str(path.with_suffix("")),
        vocab_size=320,
        byte_fallback=True,
        minloglevel=2,
    )
    tokenizer = make_tokenizer(str(path))
    assert tokenizer.decode(tokenizer.encode("Björn 漢字").tolist()) == "Björn 漢字"


def test_t5_has_its_vocabulary_and_the_end_of_each_line(data):
    path = data / "t5-sentencepiece" / "spiece.model"
    if not path.exists():
        pytest.skip(f"no {path}")
    tokenizer = make_tokenizer(str(path))
    assert (tokenizer.vocab_size, tokenizer.eos_id) == (32100, 1)
    hello = [8774, 296, 6, 48, 19, 3, 9, 794, 5]
    tokens = tokenizer.encode_documents(["Hello world, this is a test.\n\n<unk>\n"])
    assert tokens.tolist() == [*hello, 1, 1, 2, 1]


@pytest.mark.parametrize("kind", ["bytes", "trained", "unigram", "bpe", "t5-like"])
def test_saved_and_loaded_it_is_the_same(kind, trained, sentencepiece, tmp_path):
    if kind == "t5-like":
        path = sentencepiece("unigram", pad_id=0, eos_id=1, unk_id=2, bos_id=-1)
        tokenizer = make_tokenizer(str(path))
    elif kind in ("unigram", "bpe"):
        tokenizer = make_tokenizer(str(sentencepiece(kind)))
    else:
        tokenizer = byte_tokenizer() if kind == "bytes" else trained
    tokenizer.save(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert loaded.fingerprint == tokenizer.fingerprint
    text = "Anna sees the cat.\n\nBjörn <|endoftext|> </s>\n"
    assert loaded.encode(text).tolist() == tokenizer.encode(text).tolist()
    assert AutoTokenizer.from_pretrained(str(tmp_path)).eos_token_id == tokenizer.eos_id


def test_a_tokenizers_file_is_read(trained, tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text(trained.hugging_face.backend_tokenizer.to_str())
    loaded = make_tokenizer(str(path))
    assert loaded.encode(AWKWARD).tolist() == trained.encode(AWKWARD).tolist()
    assert loaded.fingerprint == trained.fingerprint
    assert loaded.fingerprint != byte_tokenizer().fingerprint


@pytest.mark.parametrize("kind", ["bytes", "trained", "unigram"])
def test_streamed_text_is_the_text(kind, trained, sentencepiece, play):
    tokenizer = {
        "bytes": byte_tokenizer,
        "trained": lambda: trained,
        "unigram": lambda: make_tokenizer(str(sentencepiece("unigram"))),
    }[kind]()
    text = play.read_text(encoding="utf-8")[:500].rstrip()
    step = tokenizer.stream()
    pieces = [step(token) for token in tokenizer.encode(text).tolist()]
    assert "".join(pieces) == text
    assert sum(map(bool, pieces)) > len(text) / 4


def test_half_a_character_waits_for_its_other_half():
    step = byte_tokenizer().stream()
    assert [step(byte) for byte in "aé€".encode()] == ["a", "", "é", "", "", "€"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.json", b"{}", r"t\.json is no tokenizers file"),
        ("t.json", b"\0\xff", r"t\.json is no tokenizers file"),
        ("t.model", b"", r"t\.model is no SentencePiece file"),
        ("t.model", b"not a model", r"t\.model is no SentencePiece file"),
    ],
    ids=str,
)
def test_a_file_of_another_kind_is_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(FileError, match=message) as raised:
        make_tokenizer(str(tmp_path / name))
    assert "\n" not in str(raised.value)


def test_a_missing_tokenizer_says_what_would_do():
    with pytest.raises(FileError, match="no tokenizer at byts; give 'bytes', or a SentencePiece"):
        make_tokenizer("byts")


def test_a_tokenizers_file_without_an_end_is_named(tmp_path):
    backend = module.Tokenizer(module.models.BPE(vocab={"a": 0}, merges=[]))
    (tmp_path / "t.json").write_text(backend.to_str())
    with pytest.raises(FileError, match=r"t\.json has no end-of-text token"):
        make_tokenizer(str(tmp_path / "t.json"))


def test_sizes_that_cannot_be_trained_are_named():
    with pytest.raises(ConfigError, match=r"train_tokenizer=100 is too small; .* give 257 or more"):
        make_tokenizer("bytes", 100, ["text"])
    with pytest.raises(FileError, match="too short to find 9999 tokens"):
        make_tokenizer("bytes", 9999, ["text"])
    with pytest.raises(ConfigError, match=r"tokenizer=t\.json and train_tokenizer=300: give one"):
        make_tokenizer("t.json", 300, ["text"])


def test_a_folder_without_a_tokenizer_is_named(tmp_path):
    with pytest.raises(FileError, match="no tokenizer in"):
        load_tokenizer(tmp_path)
