import json
from dataclasses import dataclass

import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from leap.bench import report as reporting
from leap.bench.report import Page, digits, draw, tabulate, times
from leap.errors import FileError

NUMBERS = {("b", 1024): 10.0, ("a-w4", 1024): 0.5, ("b", 2048): 40.0, ("a-w4", 2048): 1.0}


@dataclass(frozen=True)
class Settings:
    lengths: tuple[int, ...] = (1024, 2048)


def make_page():
    figure = Figure()
    draw(figure.subplots(), NUMBERS)
    return Page(
        name="speed",
        report=Settings(),
        description="On an abacus.",
        tables=[tabulate("milliseconds", NUMBERS, growth=True), tabulate("speed", NUMBERS, times)],
        figure=figure,
    )


def test_a_table_has_a_row_for_each_name_and_a_column_for_each_length():
    table = tabulate("milliseconds", NUMBERS)
    assert table.columns == ["tokens", "1024", "2048"]
    assert table.rows == [["b", "10", "40"], ["a-w4", "0.50", "1.0"]]


def test_growth_is_the_exponent_between_the_two_longest_lengths():
    table = tabulate("milliseconds", NUMBERS, growth=True)
    assert table.columns[-1] == "growth"
    assert [row[-1] for row in table.rows] == ["t^2.0", "t^1.0"]


def test_one_length_shows_no_growth():
    assert tabulate("ms", {("a", 8): 1.0}, growth=True).columns == ["tokens", "8"]


@pytest.mark.parametrize(("x", "shown"), [(0.123, "0.12"), (1.23, "1.2"), (12.3, "12")])
def test_digits_that_count(x, shown):
    assert digits(x) == shown


def test_markdown_has_every_table_below_the_description():
    text = reporting.markdown(make_page())
    assert text.startswith("On an abacus.\n\n**milliseconds**\n\n")
    assert "| tokens | 1024 | 2048 | growth |\n| --- | --: | --: | --: |" in text
    assert "| a-w4 | 0.50x | 1.0x |" in text.splitlines()


def test_files_are_written_and_hold_everything(tmp_path):
    page, folder = make_page(), tmp_path / "not" / "there" / "yet"
    paths = reporting.write(page, folder)
    assert sorted(paths) == sorted(folder.iterdir())
    assert json.loads((folder / "results.json").read_text()) == {"lengths": [1024, 2048]}
    assert (folder / "results.md").read_text() == reporting.markdown(page)
    assert imread(folder / "speed.png").ndim == 3


def test_no_two_mechanisms_look_alike():
    variants = ["", "-bidirectional", "-cache", "-reencode"]
    names = [f"softmax{variant}" for variant in variants]
    names += ["leap", "leap-w4", "leap-w64", "new", "newer"]
    styles = [tuple(style.items()) for style in reporting._styles(names).values()]
    assert len(set(styles)) == len(names)


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    taken = tmp_path / "taken"
    taken.write_text("")
    with pytest.raises(FileError, match=f"cannot write to {taken} .*; give another folder"):
        reporting.make_folder(taken)
