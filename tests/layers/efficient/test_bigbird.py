import pytest
import torch
from torch.testing import assert_close

from leap.layers.efficient import BigBirdAttention
from leap.ops.block_sparse import block_sparse_attention_reference

SIZE, N_BLOCK = 3, 12
LENGTH = SIZE * N_BLOCK


def build(**options):
    return BigBirdAttention(12, 3, block_size=SIZE, **options).double()


@pytest.mark.parametrize("t", [1, 4, 24])
def test_with_no_more_blocks_than_it_sees_it_is_softmax(
    t, make_tokens, softmax_definition, assert_same
):
    layer, x = build(), make_tokens(t)
    assert_same(layer(x)[0], softmax_definition(layer, x), layer, x)


def test_so_it_is_when_every_block_is_a_neighbour(make_tokens, softmax_definition):
    # Through the blocks, which the layer itself would not trouble with.
    layer, x = build(window=2 * N_BLOCK - 1), make_tokens(LENGTH)
    q, k, v = (layer.split(proj(x)) for proj in (layer.q_proj, layer.k_proj, layer.v_proj))
    blocks = torch.arange(N_BLOCK).expand(2, 3, N_BLOCK, N_BLOCK)
    o = block_sparse_attention_reference(q, k, v, blocks)
    assert_close(layer.o_proj(layer.join(o)), softmax_definition(layer, x))
    assert_close(layer(x)[0], softmax_definition(layer, x))


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("t", [LENGTH, LENGTH - 1, LENGTH - 2])
def test_it_is_attention_to_the_blocks_seen(t, recompute, make_tokens, assert_same):
    layer, x = build(recompute=recompute), make_tokens(t)
    q, k, v = (layer.split(proj(x)) for proj in (layer.q_proj, layer.k_proj, layer.v_proj))
    sees = torch.zeros(3, N_BLOCK, N_BLOCK).bool()
    sees.scatter_(2, layer.blocks(torch.tensor([N_BLOCK]), N_BLOCK)[0], True)
    sees[:, [0, -1]] = True
    sees = sees.repeat_interleave(SIZE, 1).repeat_interleave(SIZE, 2)[:, :t, :t]
    scores = (q @ k.mT / 2).masked_fill(~sees, -torch.inf)
    o = scores.softmax(-1) @ v
    assert_same(layer(x)[0], layer.o_proj(layer.join(o)), layer, x)


def test_a_block_sees_its_window_the_ends_and_some_at_random():
    layer = build()
    seen = layer.blocks(torch.tensor([40]), 40)[0]
    others = []
    for head in range(3):
        for i, blocks in enumerate(seen[head].tolist()):
            assert len(set(blocks)) == 8
            must = {0, 39} | {j for j in (i - 1, i, i + 1) if 0 <= j < 40}
            assert must <= set(blocks)
            others += set(blocks) - must
    # Random ones are spread: no block is seen far more often than others.
    counts = torch.bincount(torch.tensor(others), minlength=40)[1:-1]
    assert counts.min() >= 1 and counts.max() < 4 * counts.double().mean()


def test_heads_and_layers_draw_blocks_of_their_own():
    n = torch.tensor([40])
    first, second = (build().blocks(n, 40)[0] for _ in range(2))
    assert not torch.equal(first[0], first[1]) and not torch.equal(first, second)


def test_a_row_s_last_block_is_its_own_and_pads_come_last():
    layer = build()
    short, whole = layer.blocks(torch.tensor([10, 40]), 40)
    assert torch.equal(short[:, :10], layer.blocks(torch.tensor([10]), 10)[0])
    assert (short[:, :10] < 10).all() and (short[:, :10] == 9).any(-1).all()
    assert (whole == 39).any(-1).all()


def test_far_tokens_beyond_all_blocks_seen_are_invisible(make_tokens):
    layer, x = build(n_random=0), make_tokens(LENGTH).detach()
    changed = x.clone()
    changed[:, 6 * SIZE : 7 * SIZE] += 1
    same = (layer(x)[0] - layer(changed)[0]).abs().amax(dim=(0, 2)).unflatten(0, (-1, SIZE)) < 1e-12
    # Its neighbours and the ends see it. (Next to the ends a random block fills the window.)
    expected = [i not in (0, 5, 6, 7, 11) for i in range(N_BLOCK)]
    assert same.all(1).tolist()[2:-2] == expected[2:-2]
    assert not same[[0, -1]].any()
