import torch
from torch.testing import assert_close

from leap.layers.efficient import JointSinhAttention

LENGTH = 9


def test_it_is_the_formula(make_tokens, assert_same):
    layer, x = JointSinhAttention(12, 3).double(), make_tokens(LENGTH)
    q, k, v = (layer.split(proj(x)) for proj in (layer.q_proj, layer.k_proj, layer.v_proj))
    scores = (q @ k.mT / 2).relu().sinh()
    o = scores @ v / scores.sum(-1, keepdim=True).clamp_min(1e-6)
    assert_same(layer(x)[0], layer.o_proj(layer.join(o)), layer, x)


def test_a_query_that_matches_no_key_gets_zeros_rather_than_nans(make_tokens):
    layer, x = JointSinhAttention(12, 3, bias=False).double(), make_tokens(1)
    with torch.no_grad():
        layer.q_proj.weight.copy_(-layer.k_proj.weight)
    y = layer(x)[0]
    assert_close(y, torch.zeros_like(y))
    assert torch.autograd.grad(y.sum(), x)[0].isfinite().all()
