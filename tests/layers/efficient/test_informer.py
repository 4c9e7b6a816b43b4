import pytest
import torch
from torch.testing import assert_close

from leap.layers.efficient import InformerAttention

LENGTH = 9


@pytest.mark.parametrize("n_query", [LENGTH, 128])
def test_with_every_query_it_is_softmax(n_query, make_tokens, softmax_definition, assert_same):
    layer, x = InformerAttention(12, 3, n_query=n_query).double(), make_tokens(LENGTH)
    assert_same(layer(x)[0], softmax_definition(layer, x), layer, x)


@pytest.mark.parametrize("n_sample", [LENGTH, 128])
def test_queries_that_choose_attend_and_the_others_take_the_mean(n_sample, make_tokens):
    layer = InformerAttention(12, 3, n_query=3, n_sample=n_sample).double()
    x = make_tokens(LENGTH, batch=1)
    q, k, v = (layer.split(proj(x))[0] for proj in (layer.q_proj, layer.k_proj, layer.v_proj))
    heads = []
    for head in range(3):
        scores = q[head] @ k[head].mT / 2
        choosiness = scores.amax(-1) - scores.mean(-1)
        o = v[head].mean(0).repeat(LENGTH, 1)
        for i in choosiness.argsort(descending=True)[:3]:
            o[i] = scores[i].softmax(-1) @ v[head]
        heads.append(o)
    assert_close(layer(x)[0], layer.o_proj(torch.cat(heads, dim=-1)).unsqueeze(0))


def test_a_sample_of_keys_finds_the_query_that_stands_out(make_tokens):
    layer = InformerAttention(12, 1, n_query=1, n_sample=8).double()
    q, k = 0.1 * torch.randn(1, 1, 100, 12).double(), torch.randn(1, 1, 100, 12).double()
    q[0, 0, 42] *= 100
    assert layer.choosiness(q, k, torch.tensor([100])).argmax() == 42
