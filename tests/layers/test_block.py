import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from leap.layers import Block, FastformerAttention, LeapAttention, LeapformerAttention


def build(**options):
    return Block(LeapformerAttention(12, 3), **options).double()


def test_a_block_is_its_formula(make_tokens, assert_same):
    block, x = build(feed_forward_size=20), make_tokens(7)
    attended, _ = block.attention(block.attention_norm(x))
    x1 = x + attended
    first, second = block.feed_forward[0], block.feed_forward[3]
    hidden = F.gelu(block.feed_forward_norm(x1) @ first.weight.T + first.bias)
    assert_same(block(x)[0], x1 + hidden @ second.weight.T + second.bias, block, x)


@pytest.mark.parametrize("attention", [LeapformerAttention(12, 3), LeapAttention(12, 3, window=3)])
def test_steps_make_the_whole(attention, make_tokens, assert_same):
    block, x = Block(attention).double(), make_tokens(7)
    whole, _ = block(x)
    ys, state = [], None
    for token in x.unbind(1):
        y, state = block.step(token, state)
        ys.append(y)
    assert_same(torch.stack(ys, dim=1), whole, block, x)


def test_further_inputs_reach_the_attention(make_tokens):
    block, x = Block(FastformerAttention(12, 3)).double(), make_tokens(7)
    mask = torch.arange(7) < torch.tensor([[4], [7]])
    y, _ = block(x, key_mask=mask)
    assert_close(y[:1, :4], block(x[:1, :4])[0])


def test_the_block_of_lra_has_the_paper_s_size():
    block = Block(LeapformerAttention(64, 2), feed_forward_size=128)
    projections, feed_forward, norms = 4 * (64 * 64 + 64), 2 * 64 * 128 + 128 + 64, 4 * 64
    expected = projections + feed_forward + norms + 1090
    assert sum(p.numel() for p in block.parameters()) == expected


def test_dropout_acts_in_training_alone(make_tokens):
    block, x = build(dropout=0.5), make_tokens(7)
    assert not torch.equal(block(x)[0], block(x)[0])
    assert torch.equal(block.eval()(x)[0], block(x)[0])


def test_with_everything_dropped_only_the_residual_is_left(make_tokens):
    x = make_tokens(7)
    assert torch.equal(build(dropout=1.0)(x)[0], x)
