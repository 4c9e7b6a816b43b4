import math

import pytest
import torch
from torch.testing import assert_close
from transformers import ReformerConfig
from transformers.models.reformer.modeling_reformer import LSHSelfAttention

from leap.layers.efficient import ReformerAttention

LENGTH = 12


def definition(layer, x, sees):
    """Attention with shared queries and keys to those that `sees` shows, `[b, h, t, t]`."""
    q, v = layer.split(layer.qk_proj(x)), layer.split(layer.v_proj(x))
    scores = q @ (q / q.norm(dim=-1, keepdim=True)).mT
    scores = scores.masked_fill(torch.eye(x.shape[1]).bool(), -1e5).masked_fill(~sees, -math.inf)
    return (scores.softmax(-1) @ v), scores.logsumexp(-1)


@pytest.mark.parametrize("chunk_size", [LENGTH, 64])
@pytest.mark.parametrize("n_hash", [1, 3])
def test_in_one_chunk_it_is_softmax_with_shared_queries_and_keys(
    chunk_size, n_hash, make_tokens, assert_same
):
    layer = ReformerAttention(12, 3, chunk_size=chunk_size, n_hash=n_hash).double()
    x = make_tokens(LENGTH)
    o, _ = definition(layer, x, torch.ones(LENGTH, LENGTH).bool())
    assert_same(layer(x)[0], layer.o_proj(layer.join(o)), layer, x)


@pytest.mark.parametrize("n_real", [LENGTH, 7])
def test_in_one_chunk_it_is_the_attention_of_transformers(n_real, make_tokens):
    layer, x = ReformerAttention(12, 3, bias=False).double(), make_tokens(LENGTH)
    config = ReformerConfig(
        hidden_size=12, num_attention_heads=3, attention_head_size=4, is_decoder=False
    )
    theirs = LSHSelfAttention(config).double().eval()
    with torch.no_grad():
        layer.qk_proj.weight.mul_(8)  # Beside this the 1e-6 that they add to squares is little.
        theirs.query_key.weight.copy_(layer.qk_proj.weight)
        theirs.value.weight.copy_(layer.v_proj.weight)
    real = (torch.arange(LENGTH) < n_real).expand(2, -1)
    expected = layer.o_proj(theirs(x, attention_mask=real).hidden_states)
    actual, _ = layer(x, key_mask=real)
    assert_close(actual[:, :n_real], expected[:, :n_real], rtol=0, atol=1e-5)
    assert not torch.allclose(actual[:, :n_real], expected[:, :n_real].roll(1, 1), atol=1e-3)


def test_tokens_see_their_chunk_and_the_one_before_when_sorted(make_tokens, assert_same):
    layer, x = ReformerAttention(12, 3, chunk_size=3).double(), make_tokens(LENGTH)
    bucket = layer.buckets(layer.split(layer.qk_proj(x)), torch.tensor([LENGTH, LENGTH]))
    os, log_zs = [], []
    for r in range(2):
        chunk = bucket[:, :, r].argsort(dim=-1, stable=True).argsort(dim=-1) // 3
        back = chunk.unsqueeze(-1) - chunk.unsqueeze(-2)
        o, log_z = definition(layer, x, (back == 0) | (back == 1))
        os.append(o)
        log_zs.append(log_z)
    z = torch.stack(log_zs).exp().unsqueeze(-1)
    o = (z * torch.stack(os)).sum(0) / z.sum(0)
    assert_same(layer(x)[0], layer.o_proj(layer.join(o)), layer, x)


def test_near_vectors_share_a_bucket_and_opposite_ones_never():
    layer = ReformerAttention(64, 1, chunk_size=4).double()
    q = torch.randn(1, 1, 200, 64).double()
    n = torch.tensor([200])
    bucket = layer.buckets(q, n)
    assert (layer.buckets(q + 1e-3 * torch.randn_like(q), n) == bucket).double().mean() > 0.9
    assert not (layer.buckets(-q, n) == bucket).any()
    assert (layer.buckets(q.flip(2), n) == bucket).double().mean() < 0.1


def test_a_short_row_has_few_buckets():
    layer = ReformerAttention(16, 1, chunk_size=4, max_bucket=32).double()
    bucket = layer.buckets(torch.randn(2, 1, 100, 16).double(), torch.tensor([8, 100]))
    assert len(bucket[0, 0, 0, :8].unique()) <= 4
    assert len(bucket[1, 0, 0].unique()) > 16


def test_a_token_alone_attends_to_itself(make_tokens):
    layer, x = ReformerAttention(12, 3).double(), make_tokens(1)
    assert_close(layer(x)[0], layer.o_proj(layer.v_proj(x)))
