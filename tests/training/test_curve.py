from matplotlib.figure import Figure

from leap.training import plot_curves


def test_no_curve_is_cut_off(monkeypatch, tmp_path):
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    history = [{"step": 1, "loss": 7.6}, {"step": 70, "loss": 3.0}, {"step": 70, "eval_loss": 3.1}]
    plot_curves({"a": history}, tmp_path / "curve.png", "a run")
    (axes,) = drawn[0].axes
    lowest, highest = axes.get_ylim()
    heights = [y for line in axes.lines for y in line.get_ydata()]
    assert lowest < min(heights) and max(heights) == 7.6 < highest
