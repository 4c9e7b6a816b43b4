import numpy as np
import pytest

from leap.errors import ConfigError, FileError
from leap.tasks.lra.retrieval import FILES, make_standin, read

PAIRS = [(b"1.0", b"a text", b"another"), (b"0.0", b"\xff bytes", b"x"), (b"1", b"y", b"long " * 9)]
SIZES = {"train": 40, "valid": 7, "test": 10}


def write_release(folder, pairs=PAIRS):
    below = folder / "tsv_data"
    below.mkdir(exist_ok=True)
    lines = [b"\t".join([label, b"W01", b"W02", *texts]) + b"\n" for label, *texts in pairs]
    for name in FILES.values():
        (below / name).write_bytes(b"".join(lines))
    return below


def test_pairs_are_read_as_bytes_and_cut_to_length(tmp_path):
    write_release(tmp_path)
    found = read(tmp_path, 10)
    assert list(found) == ["train", "valid", "test"]
    examples = found["valid"]
    assert [bytes(examples.inputs[i]) for i in range(3)] == [b"a text", b"\xff bytes", b"y"]
    assert [bytes(examples.inputs_b[i]) for i in range(3)] == [b"another", b"x", b"long long "]
    assert examples.labels.tolist() == [1, 0, 1]
    assert examples.cut.tolist() == [0, 0, 1]


@pytest.mark.parametrize(
    "line", [b"1.0\tW01\tW02\ta text", b"2.0\ta\tb\tc\td", b"1.0\ta\tb\tc\t", b"1.0\ta\tb\tc\td\te"]
)
def test_a_broken_line_is_named(tmp_path, line):
    path = write_release(tmp_path) / FILES["test"]
    path.write_bytes(path.read_bytes() + line)
    with pytest.raises(FileError, match=r"new_aan_pairs\.test\.tsv is broken .* line 4 is no"):
        read(tmp_path, 10)


def test_a_text_that_was_cut_off_is_noticed(tmp_path):
    path = write_release(tmp_path) / FILES["train"]
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(FileError, match=r"\.train\.tsv is broken .* last line has no end; get"):
        read(tmp_path, 10)


def test_missing_files_are_named(tmp_path):
    with pytest.raises(
        FileError, match=r"give the folder with new_aan_pairs\.train\.tsv .*standin"
    ):
        read(None, 10)
    with pytest.raises(FileError, match=r"must hold one new_aan_pairs\.train\.tsv, and holds none"):
        read(tmp_path, 10)
    with pytest.raises(FileError, match=r"no folder at .*nowhere"):
        read(tmp_path / "nowhere", 10)
    (write_release(tmp_path) / FILES["train"]).write_bytes(b"")
    with pytest.raises(FileError, match=r"new_aan_pairs\.train\.tsv .* empty"):
        read(tmp_path, 10)


def write_articles(folder):
    """Each article repeats a letter of its own; the second of a part is too short to be used."""
    letters = iter("abcdefghijkl")
    for split in SIZES:
        texts = [f" = Title = \n{next(letters) * n}\n" for n in (90, 9, 75, 60)]
        (folder / f"{split}.txt").write_text("".join(texts))
    return folder


def test_the_class_of_a_pair_of_passages_tells_whether_they_are_of_one_article(tmp_path):
    found = make_standin(write_articles(tmp_path), SIZES, 15, seed=0)
    assert {split: len(part) for split, part in found.items()} == SIZES
    for part, articles in zip(found.values(), ("acd", "egh", "ikl"), strict=True):
        assert part.labels.sum() == len(part) // 2
        used = set()
        for i, label in enumerate(part.labels):
            first, second = (bytes(which[i]).decode() for which in (part.inputs, part.inputs_b))
            assert len(first) == len(second) == 15
            assert (first[0] == second[0]) == bool(label)
            used |= {first[0], second[0]}
        assert used <= set(articles) and len(used) > 1


def test_wikitext_makes_pairs_of_whole_passages(data):
    folder = data / "wikitext-2"
    if not folder.is_dir():
        pytest.skip(f"no {folder}")
    found = make_standin(folder, {"train": 50, "valid": 50, "test": 50}, 4000, seed=0)
    for part in found.values():
        assert part.labels.sum() == 25 and part.cut.sum() == 0
        assert (part.inputs.lengths == 4000).all()
        pairs = [(bytes(part.inputs[i]), bytes(part.inputs_b[i])) for i in range(50)]
        assert all(a != b for a, b in pairs) and len(set(pairs)) == 50
    again = make_standin(folder, {"train": 50, "valid": 50, "test": 50}, 4000, seed=0)
    np.testing.assert_array_equal(again["test"].inputs.tokens, found["test"].inputs.tokens)


def test_too_few_passages_are_an_error(tmp_path):
    write_articles(tmp_path)
    with pytest.raises(ConfigError, match=r"train\.txt has 0 pairs .* smaller max_length"):
        make_standin(tmp_path, SIZES, 500, seed=0)
    # One long article and a short one have many pairs together, and few apart.
    for split in SIZES:
        texts = [f" = Title = \n{letter * n}\n" for letter, n in (("a", 150), ("b", 30))]
        (tmp_path / f"{split}.txt").write_text("".join(texts))
    with pytest.raises(ConfigError, match=r"has 92 pairs .* and 40 of two, too few for 160"):
        make_standin(tmp_path, dict.fromkeys(SIZES, 160), 15, seed=0)
    with pytest.raises(FileError, match=r"no WikiText-2"):
        make_standin(None, SIZES, 15, seed=0)
