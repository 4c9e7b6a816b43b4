"""Shared by the tests of efficient attentions: softmax attention with a layer's own projections."""

import math

import pytest


@pytest.fixture
def softmax_definition():
    def define(layer, x):
        q, k, v = (layer.split(proj(x)) for proj in (layer.q_proj, layer.k_proj, layer.v_proj))
        weights = (q @ k.mT / math.sqrt(layer.head_width)).softmax(-1)
        return layer.o_proj(layer.join(weights @ v))

    return define
