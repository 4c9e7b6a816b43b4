"""Promises of pages and pictures."""

import pytest
import torch

from leap.explain import Explanation
from leap.explain.page import Struck, depths, explanation_page, importance_picture, tinted

PIECES = ["<start>", "a", "\n", "日本 $x$"]


@pytest.fixture
def found():
    weights = torch.rand(1, 2, 3, 4, 4, generator=torch.Generator().manual_seed(0)).tril()
    return Explanation(weights / weights.sum(-1, keepdim=True), ("leap, window of 4", "softmax"))


def test_a_page_needs_nothing_but_itself(found):
    page = explanation_page(
        PIECES,
        found,
        title="<b>next",
        importance=[0.1, -0.2, 0.0, 0.4],
        struck=[Struck(3, 0.4, 0.5, 0.1)],
    )
    assert "&lt;b&gt;next" in page and "<b>next" not in page
    assert "<td>+0.400<td>0.500<td>0.100" in page
    assert 'rgb(0 114 178 / 0.50)" title="-0.200">a<' in page
    assert "<script" not in page and "http" not in page
    assert "&lt;start&gt;" in page and "<start>" not in page
    assert "layer 0: leap, window of 4" in page and "layer 1: softmax" in page
    assert page.count("<pre>") == 2 + 2 * (1 + 3)
    assert 'src="data:image/png;base64,' in page


def test_the_heaviest_piece_is_the_darkest():
    text = tinted(["a", "b\n"], [0.1, 0.4])
    assert 'rgb(213 94 0 / 0.25)" title="0.100">a<' in text
    assert 'rgb(213 94 0 / 1.00)" title="0.400">b↵\n<' in text


def test_nothing_is_as_light_as_can_be():
    assert depths([0.0, 0.0]) == [0.0, 0.0]


def test_a_picture_is_a_png(found):
    assert importance_picture(PIECES, found).startswith(b"\x89PNG")


def test_a_long_text_is_drawn_without_labels():
    weights = torch.full((1, 1, 1, 100, 100), 0.01)
    assert importance_picture(["x"] * 100, Explanation(weights, ("a",))).startswith(b"\x89PNG")
