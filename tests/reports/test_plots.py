"""Promises of every figure."""

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text

from leap.reports.plots import Line, Panel, line_styles, plot, plot_curves


def test_no_two_mechanisms_look_alike():
    variants = ["", "-bidirectional", "-cache", "-reencode"]
    names = [f"softmax{variant}" for variant in variants]
    names += ["leap", "leap-w4", "leap-w64", "new", "newer"]
    styles = [tuple(style.items()) for style in line_styles(names).values()]
    assert len(set(styles)) == len(names)


def test_variants_have_the_colour_of_their_mechanism_unless_all_are_of_one():
    styles = line_styles(["leap", "leap:windowed", "leap-w4", "softmax"])
    assert len({style["color"] for style in styles.values()}) == 2
    assert (
        styles["softmax"]["color"]
        == line_styles(["gpt2", "softmax:rotary"])["softmax:rotary"]["color"]
    )
    alone = line_styles(["leap:global", "leap:windowed", "leap-w4"])
    assert len({style["color"] for style in alone.values()}) == 3


@pytest.mark.parametrize("low", [0.002, 1.0, 990.0])
@pytest.mark.parametrize("ratio", [1.01, 1.3, 3.0, 20.0, 1e3, 1e5])
@pytest.mark.parametrize("axis", ["x", "y"])
def test_a_log_axis_has_ticks_however_close_the_values_are(axis, ratio, low):
    line = Line("a", [(low, low), (low * ratio, low * ratio)])
    (axes,) = plot([Panel(x="x", y="y", lines=[line], x_scale="log", y_scale="log")], "").axes
    least, most = axes.get_xlim() if axis == "x" else axes.get_ylim()
    drawn = (axes.xaxis if axis == "x" else axes.yaxis).get_majorticklocs()
    assert 2 <= sum(least <= tick <= most for tick in drawn) <= 10


def test_sizes_have_ticks_of_their_own_where_there_is_room():
    sizes = [256, 512, 1000, 1024, 16384]
    line = Line("a", [(size, 1.0) for size in sizes])
    (axes,) = plot([Panel(x="tokens", y="ms", lines=[line], x_scale="sizes")], "").axes
    assert axes.xaxis.get_majorticklocs().tolist() == [256, 512, 1024, 16384]
    texts = [label.get_text() for label in axes.xaxis.get_majorticklabels()]
    assert texts == ["256", "512", "1,024", "16,384"]


def test_panels_that_share_an_axis_show_all_their_points():
    panels = [
        Panel(x="x", y="y", lines=[Line("a", [(1, 1), (2, top)])], y_scale="log")
        for top in (10, 1000)
    ]
    for axes in plot(panels, "", shared=True).axes:
        assert axes.get_ylim()[0] < 1 and axes.get_ylim()[1] > 1000


def test_the_legend_names_lines_kinds_and_what_is_marked():
    lines = [Line("a", [(1, 1)], kind="training", thin=True), Line("a", [(1, 2)], kind="held-out")]
    panel = Panel(x="x", y="y", lines=lines, levels={"guessing": 0.5}, upright={"trained": 1})
    (legend,) = plot([panel], "").legends
    shown = [text.get_text() for text in legend.get_texts()]
    assert shown == ["a", "guessing", "trained", "training", "held-out"]


def test_dots_with_their_names_beside_them_need_no_legend():
    lines = [Line(name, [(1, 1)], names=[name]) for name in "ab"]
    assert plot([Panel(x="x", y="y", lines=lines)], "").legends == []


def test_names_cover_neither_each_other_nor_points():
    places = np.random.default_rng(0).normal(size=(12, 2)) / [4, 8]
    names = [f"attention-{i}" for i in range(len(places))]
    lines = [
        Line(name, [tuple(place)], names=[name]) for name, place in zip(names, places, strict=True)
    ]
    figure = plot([Panel(x="x", y="y", lines=lines)], "")
    renderer = FigureCanvasAgg(figure).get_renderer()
    (axes,) = figure.axes
    boxes = [Text.get_window_extent(text, renderer) for text in axes.texts]
    dots = axes.transData.transform(places)
    for i, box in enumerate(boxes):
        assert not any(box.overlaps(other) for other in boxes[:i])
        assert not any(box.contains(*dot) for dot in dots)


def test_no_curve_is_cut_off(monkeypatch, tmp_path):
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    history = [{"step": 1, "loss": 7.6}, {"step": 70, "loss": 3.0}, {"step": 70, "eval_loss": 3.1}]
    plot_curves({"a": history}, tmp_path / "curve.png", "a run")
    (axes,) = drawn[0].axes
    lowest, highest = axes.get_ylim()
    heights = [y for line in axes.lines for y in line.get_ydata()]
    assert lowest < min(heights) and max(heights) == 7.6 < highest


def test_curves_are_drawn(tmp_path):
    history = [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.5}, {"step": 2, "eval_loss": 1.7}]
    plot_curves({"a": history, "b": []}, tmp_path / "curve.png", "two runs")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    history.append({"step": 2, "eval_accuracy": 0.5})
    plot_curves({"a": history}, tmp_path / "both.png", "one run", measure="accuracy")
    widths = [read_width(tmp_path / name) for name in ("curve.png", "both.png")]
    assert widths[0] < widths[1]


def read_width(path):
    return int.from_bytes(path.read_bytes()[16:20])
