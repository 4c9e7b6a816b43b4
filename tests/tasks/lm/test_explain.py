"""Promises of explaining a trained model."""

from leap.tasks.lm.explain import explain_text
from leap.tasks.lm.model import load_model
from leap.tasks.lm.tokenizer import END

TEXT = "Björn bado.\nBjörn kale"


def test_the_pieces_are_the_text(trained):
    explained = explain_text(*load_model(trained), TEXT)
    assert explained.pieces[0] == END
    assert "".join(explained.pieces[1:]) == TEXT
    assert explained.found.weights.shape[-1] == len(explained.pieces)
