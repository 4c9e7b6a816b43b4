"""Quality against latency, a line for each family of policies."""

from leap.tasks.simul.scoring.curves import families, plot_quality


def test_policies_that_differ_in_a_number_are_a_family_that_ends_offline():
    names = ["wait-1", "wait-3", "agree-2", "agree-3", "offline"]
    assert families(names) == {
        "wait-*": ["wait-1", "wait-3", "offline"],
        "agree-*": ["agree-2", "agree-3"],
    }


def test_resets_are_families_of_their_own_and_offline_stands_alone_without_waits():
    assert families(["wait-1", "wait-1 reset 5", "offline reset 5"]) == {
        "wait-*": ["wait-1"],
        "wait-* reset 5": ["wait-1 reset 5", "offline reset 5"],
    }
    assert families(["agree-2", "offline"]) == {"agree-*": ["agree-2"], "offline": ["offline"]}


def test_dots_are_in_the_order_of_latency_and_named_where_asked():
    points = {"wait-3": (3.0, 20.0), "wait-1": (1.0, 10.0)}
    figure = plot_quality({"a": points, "b": points}, "words", "title", named=["b"])
    (axes,) = figure.axes
    assert [line.get_xdata().tolist() for line in axes.lines[:2]] == [[1, 3], [1, 3]]
    assert {"wait-1", "wait-3"} <= {text.get_text() for text in axes.texts}
    assert "LAAL (words)" in axes.get_xlabel() and "BLEU" in axes.get_ylabel()
