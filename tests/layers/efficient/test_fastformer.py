import math

import pytest
import torch
from torch.testing import assert_close

from leap.errors import ConfigError, InputError
from leap.layers import FastformerAttention, LeapAttention

LENGTH, WIDTH = 6, 4


def build(**options):
    layer = FastformerAttention(12, 3, **options).double()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return layer


def definition(layer, x, score_q, score_k):
    """Section 8.1, head by head."""
    q, k = layer.q_proj(x), layer.k_proj(x)
    v = q if layer.v_proj is None else layer.v_proj(x)
    heads = [slice(h * WIDTH, (h + 1) * WIDTH) for h in range(3)]

    def pooled(y, score):
        weights = (score(y) / math.sqrt(WIDTH)).softmax(dim=1)
        means = [(weights[..., h, None] * y[..., s]).sum(1) for h, s in enumerate(heads)]
        return torch.cat(means, dim=-1).unsqueeze(1)

    p = pooled(q, score_q) * k
    u = pooled(p, score_k) * v
    return layer.o_proj(layer.t_proj(u) + q)


@pytest.mark.parametrize("share_qv", [True, False])
def test_full_scores_are_the_authors_code(share_qv, make_tokens, assert_same):
    layer, x = build(share_qv=share_qv), make_tokens(LENGTH)
    assert_same(layer(x)[0], definition(layer, x, layer.q_score, layer.k_score), layer, x)


def test_scores_of_each_head_are_the_paper_s_equations(make_tokens, assert_same):
    layer, x = build(score="per_head"), make_tokens(LENGTH)

    def score(vectors):
        return lambda y: torch.stack(
            [y[..., h * WIDTH : (h + 1) * WIDTH] @ vectors[h] for h in range(3)], dim=-1
        )

    expected = definition(layer, x, score(layer.q_score.weight), score(layer.k_score.weight))
    assert_same(layer(x)[0], expected, layer, x)


def test_it_keeps_no_state_and_takes_no_steps(make_tokens):
    layer, x = build(), make_tokens(LENGTH)
    assert layer(x)[1] is None
    _, state = LeapAttention(12, 3).double()(x)
    with pytest.raises(InputError, match="goes on from no state"):
        layer(x, state)
    with pytest.raises(InputError, match="takes no steps"):
        layer.step(x[:, 0], None)


def test_the_focus_is_the_weight_of_each_token(make_tokens):
    layer, x = build(), make_tokens(LENGTH)
    mask = torch.arange(LENGTH) < torch.tensor([[4], [6]])
    focus = layer.focus(x, key_mask=mask)
    q = layer.split(layer.q_proj(x))
    weights = focus.query_logits.masked_fill(~mask[:, None], -math.inf).softmax(-1)
    global_q = layer.join((weights.unsqueeze(-1) * q).sum(2, keepdim=True))
    logits = layer.k_score(global_q * layer.k_proj(x)).transpose(1, 2) / math.sqrt(WIDTH)
    assert_close(focus.logits, logits)


def test_its_first_mean_is_the_causal_one_s_last(make_tokens):
    # Section 8.3. Only the second mean differs: there, keys meet the mean query of their own time.
    x = make_tokens(LENGTH)
    causal = LeapAttention(12, 3, formulation="fastformer", rescale=None).double()
    both = build(score="per_head", share_qv=False, bias=False)
    both.q_proj.weight = causal.q_proj.weight
    both.q_score.weight = causal.q_focus
    assert_close(both.focus(x).query_logits, causal.focus(x).query_logits)


@pytest.mark.usefixtures("shapes_unchecked")
def test_an_unknown_score_is_an_error_that_lists_the_known():
    with pytest.raises(ConfigError, match="score='half' is not known; there are full, per_head"):
        FastformerAttention(12, 3, score="half")
