import lzma

import numpy as np
import pytest

from leap.errors import FileError
from leap.tasks.lra.listops import (
    CLOSE,
    FILES,
    MIN,
    OPERATORS,
    VOCABULARY,
    evaluate,
    make_examples,
    read,
    read_tsv,
)

HEADER = "Source\tTarget\n"


def tokens(text):
    return [VOCABULARY.index(token) for token in text.split()]


@pytest.fixture
def sample(data):
    path = data / "listops-lra-sample/basic_sample.tsv.xz"
    if not path.exists():
        pytest.skip(f"no {path}")
    return read_tsv(path, 2000)


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("7", 7),
        ("[MAX 4 [MIN 2 3 ] 1 [MED 1 5 8 9 2 ] ]", 5),
        ("[MED 1 4 ]", 2),
        ("[MED 9 0 3 4 ]", 3),
        ("[SM 9 9 9 ]", 7),
        ("[MIN [SM 5 5 ] 3 ]", 0),
    ],
)
def test_an_expression_has_the_value_of_the_rule(expression, value):
    assert evaluate(tokens(expression)) == value


def test_every_expression_of_the_sample_has_the_value_it_says(sample):
    assert len(sample) == 2000 and sample.cut.sum() == 0
    values = [evaluate(sample.inputs[i]) for i in range(len(sample))]
    assert values == sample.labels.tolist()
    # Counted by those who made the sample.
    assert np.bincount(sample.labels).tolist() == [
        355, 179, 151, 164, 160, 182, 170, 132, 183, 324,
    ]  # fmt: skip
    assert sample.inputs.lengths.min() == 501 and sample.inputs.lengths.max() == 1986


def test_what_is_made_has_the_value_and_the_shape_of_the_rule():
    made = make_examples(300, np.random.default_rng(0))
    assert len(made) == 300
    arguments = set()
    for i in range(300):
        expression = made.inputs[i]
        assert evaluate(expression) == made.labels[i]
        assert 500 < len(expression) < 2000
        opened = ((expression >= MIN) & (expression < CLOSE)).astype(int)
        nested = (opened - (expression == CLOSE)).cumsum()
        assert nested[-1] == 0 and nested[:-1].min() == 1 and nested.max() <= 9
        counts = [0]
        for token in expression:
            if token == CLOSE:
                arguments.add(counts.pop())
            else:
                counts[-1] += 1
                if token >= MIN:
                    counts.append(0)
    assert arguments == set(range(2, 11))


def statistics(examples):
    opened = (examples.inputs.tokens >= MIN) & (examples.inputs.tokens < CLOSE)
    steps = opened.astype(int) - (examples.inputs.tokens == CLOSE)
    depths = steps.cumsum()
    return {
        "length": np.sort(examples.inputs.lengths),
        "label": np.sort(examples.labels),
        "token": np.sort(examples.inputs.tokens[::20]),
        "nesting": np.sort(depths[::20]),
    }


def distance(a, b):
    """Kolmogorov and Smirnov's: the most that two distribution functions differ by."""
    points = np.union1d(a, b)
    at = (np.searchsorted(x, points, side="right") / len(x) for x in (a, b))
    return np.abs(np.subtract(*at)).max()


def test_what_is_made_has_the_statistics_of_the_sample(sample):
    theirs = statistics(sample)
    ours = statistics(make_examples(4000, np.random.default_rng(0)))
    distances = {name: distance(ours[name], theirs[name]) for name in ours}
    # Two samples of one distribution differ by more than this once in a thousand times.
    assert distances["length"] < 0.053
    assert distances["label"] < 0.053
    assert distances["token"] < 0.01
    assert distances["nesting"] < 0.03


def test_digits_and_operators_are_equally_likely():
    made = make_examples(500, np.random.default_rng(1))
    counts = np.bincount(made.inputs.tokens, minlength=len(VOCABULARY))
    assert counts[:10].min() > 0.97 * counts[:10].max()
    assert counts[MIN:CLOSE].min() > 0.97 * counts[MIN:CLOSE].max()
    assert counts[CLOSE] == counts[MIN:CLOSE].sum()
    assert len(OPERATORS) == CLOSE - MIN


def test_the_release_is_read_without_its_parentheses(tmp_path):
    path = tmp_path / "basic_val.tsv"
    nested = "( ( ( [MAX 2 ) ( ( ( [SM 9 ) 8 ) ] ) ) ] )"
    path.write_text(f"{HEADER}{nested}\t7\n3\t3\n")
    found = read_tsv(path, 2000)
    assert found.inputs[0].tolist() == tokens("[MAX 2 [SM 9 8 ] ]")
    assert found.inputs[1].tolist() == [3]
    assert found.labels.tolist() == [7, 3]


def test_too_long_an_expression_is_cut_and_counted(tmp_path):
    path = tmp_path / "basic_val.tsv"
    path.write_text(f"{HEADER}[MAX 1 2 ]\t2\n3\t3\n")
    found = read_tsv(path, 3)
    assert found.inputs.lengths.tolist() == [3, 1] and found.cut.tolist() == [1, 0]


@pytest.mark.parametrize(
    "line",
    ["[MAX 1 2 ]", "[MAX 1 2 ]\t", "[MAX 1 2\t2", "[MAX 1 2 ]\t12", "[MAX a ]\t1", "\t1", ""],
)
def test_a_broken_line_is_named(tmp_path, line):
    path = tmp_path / "basic_test.tsv"
    path.write_text(f"{HEADER}3\t3\n{line}\n")
    with pytest.raises(FileError, match=r"basic_test\.tsv is broken or cut off: line 3"):
        read_tsv(path, 2000)


def test_a_file_cut_off_or_empty_or_missing_is_named(tmp_path):
    path = tmp_path / "basic.tsv.xz"
    path.write_bytes(lzma.compress(HEADER.encode() + b"3\t3\n" * 100)[:-20])
    with pytest.raises(FileError, match=r"basic\.tsv\.xz is broken or cut off"):
        read_tsv(path, 2000)
    path = tmp_path / "basic.tsv"
    path.write_text(HEADER)
    with pytest.raises(FileError, match=r"basic\.tsv is broken .* no expressions"):
        read_tsv(path, 2000)
    path.write_text(f"{HEADER}3\t3\n4\t4")
    with pytest.raises(FileError, match=r"basic\.tsv is broken .* last line has no end"):
        read_tsv(path, 2000)
    with pytest.raises(FileError, match=r"cannot read .*none\.tsv"):
        read_tsv(tmp_path / "none.tsv", 2000)


def test_a_folder_named_as_the_release_must_hold_all_of_it(tmp_path):
    folder = tmp_path / "lra_release" / "listops-1000"
    folder.mkdir(parents=True)
    for name in FILES.values():
        (folder / name).write_text(f"{HEADER}3\t3\n")
    message = r"basic_train\.tsv holds 1 of lra_release's 96,000 examples; get it again, or rename"
    with pytest.raises(FileError, match=message):
        read(tmp_path / "lra_release", 2000)
    (tmp_path / "lra_release").rename(tmp_path / "some")
    assert [len(part) for part in read(tmp_path / "some", 2000).values()] == [1, 1, 1]
