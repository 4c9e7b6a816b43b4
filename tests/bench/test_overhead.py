"""Promises of `leap lra overhead`."""

import pytest

from leap.bench.overhead import OverheadConfig, measure, page
from leap.errors import ConfigError


@pytest.fixture(scope="module")
def report():
    config = OverheadConfig(lengths=(16, 48), widths=(32, 64), repeats=1, budget=0.02)
    return measure(config)


def test_every_kind_is_measured_at_every_length_and_width(report):
    found = {(c.proportions, c.length, c.width) for c in report.results}
    assert len(found) == len(report.results) == 3 * 2 * 2
    assert all(c.seconds == min(c.turns) > 0 and c.peak_bytes > 0 for c in report.results)


def test_the_nets_are_all_that_is_added_in_parameters(report):
    sizes = {(c.proportions, c.width): c.parameters for c in report.results}
    for width in (32, 64):
        assert sizes["fixed", width] == sizes["none", width]
        assert sizes["learned", width] == sizes["none", width] + 2_180
    assert sizes["none", 64] == 75_650


def test_the_table_says_what_is_added(report, tmp_path):
    shown = page(report)
    (table,) = shown.tables
    assert [row[:2] for row in table.rows] == [
        ["32", "16"],
        ["32", "48"],
        ["64", "16"],
        ["64", "48"],
    ]
    by_kind = {c.proportions: c for c in report.results if (c.length, c.width) == (48, 64)}
    learned, fixed = by_kind["learned"], by_kind["fixed"]
    row = table.rows[-1]
    assert row[3] == f"{100 * (learned.seconds / fixed.seconds - 1):+.0f} %"
    assert row[6] == f"{100 * (learned.peak_bytes / fixed.peak_bytes - 1):+.0f} %"
    assert row[8:] == ["77,830", "+2.88 %"]
    assert [path.name for path in shown.write(tmp_path)][-1] == "overhead.png"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"widths": (48,)}, "widths=48 does not divide into heads of 32"),
        ({"lengths": ()}, "nothing to measure"),
        ({"hidden": 0}, "hidden=0 must be at least 1"),
    ],
)
def test_settings_that_cannot_work_are_named(settings, message):
    with pytest.raises(ConfigError, match=message):
        OverheadConfig(**settings)
