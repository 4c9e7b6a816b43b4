import json
from dataclasses import dataclass

from matplotlib.image import imread

from leap.bench.report import Page
from leap.reports.plots import Panel, lines_of, plot
from leap.reports.table import tabulate, times

NUMBERS = {("b", 1024): 10.0, ("a-w4", 1024): 0.5, ("b", 2048): 40.0, ("a-w4", 2048): 1.0}


@dataclass(frozen=True)
class Settings:
    lengths: tuple[int, ...] = (1024, 2048)


def make_page():
    figure = plot([Panel(x="tokens", y="ms", lines=lines_of(NUMBERS))], "speed")
    tables = [tabulate("milliseconds", NUMBERS, growth=True), tabulate("speed", NUMBERS, times)]
    return Page("speed", Settings(), "On an abacus.", tables, figure)


def test_markdown_has_every_table_below_the_description():
    text = make_page().text
    assert text.startswith("On an abacus.\n\n**milliseconds**\n\n")
    assert "| tokens | 1024 | 2048 | growth |\n| --- | --: | --: | --: |" in text
    assert "| a-w4 | 0.50x | 1.0x |" in text.splitlines()


def test_files_are_written_and_hold_everything(tmp_path):
    page, folder = make_page(), tmp_path / "not" / "there" / "yet"
    paths = page.write(folder)
    assert sorted(paths) == sorted(folder.iterdir())
    assert json.loads((folder / "results.json").read_text()) == {"lengths": [1024, 2048]}
    assert (folder / "results.md").read_text() == page.text
    assert imread(folder / "speed.png").ndim == 3
