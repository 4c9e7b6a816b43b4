"""Promises of tables, in Markdown and CSV."""

import pytest

from leap.reports.table import Table, csv_table, digits, markdown, perplexity, tabulate

NUMBERS = {("b", 1024): 10.0, ("a-w4", 1024): 0.5, ("b", 2048): 40.0, ("a-w4", 2048): 1.0}


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


def test_what_was_not_measured_is_a_dash():
    numbers = {("a", "text"): 1.0, ("a", "image"): 2.0, ("b", "image"): 3.0}
    table = tabulate("ms", numbers, corner="attention")
    assert table.columns == ["attention", "text", "image"]
    assert table.rows == [["a", "1.0", "2.0"], ["b", "-", "3.0"]]


def test_text_and_tables_stand_below_each_other_and_a_title_is_bold():
    text = markdown("Some.", Table("speed", ["x", "y"], [["a", "1"]]), Table("", ["z"], [["b"]]))
    assert text == (
        "Some.\n\n**speed**\n\n| x | y |\n| --- | --: |\n| a | 1 |\n\n| z |\n| --- |\n| b |\n"
    )


def test_csv_has_a_head_and_nothing_for_none():
    assert csv_table([{"a": 1, "b": None}, {"a": 2, "b": 0.5}]) == "a,b\n1,\n2,0.5\n"
    assert csv_table([]) == ""


@pytest.mark.parametrize(
    ("x", "shown"), [(84.468, "84.47"), (3029.81, "3,029.81"), (2e20, "over 1,000,000")]
)
def test_a_perplexity_that_says_nothing_has_no_digits(x, shown):
    assert perplexity(x, 2) == shown
