"""Parameter counts of the LeaPformer paper's Long Range Arena models."""

import pytest
from torch import nn

from leap.layers import Block, LeapformerAttention, SoftmaxAttention

EMBEDDINGS = 512 * 64 + 4096 * 64  # Of bytes and of positions, for the task Text.


def count(attention, **options):
    """A model of 2 layers, width 64 and 2 heads, without its embeddings."""
    model = nn.ModuleList(
        [
            *(Block(attention(64, 2, **options), feed_forward_size=128) for _ in range(2)),
            nn.LayerNorm(64),
            nn.Linear(64, 128),
            nn.Linear(128, 2),
        ]
    )
    return sum(p.numel() for p in model.parameters())


def test_the_softmax_model_has_the_published_size():
    assert count(SoftmaxAttention, form="bidirectional") + EMBEDDINGS == 370_562


@pytest.mark.parametrize(("hidden", "more"), [(1, 132), (8, 1_092), (16, 2_180)])
def test_learned_proportions_add_as_many_as_published(hidden, more):
    plain = count(SoftmaxAttention, form="bidirectional")
    learned = count(LeapformerAttention, form="bidirectional", proportion_hidden=hidden)
    assert learned - plain == more


def test_fixed_and_absent_proportions_add_none():
    plain = count(SoftmaxAttention, form="bidirectional")
    for proportion in ("fixed", "none"):
        assert count(LeapformerAttention, form="bidirectional", proportion=proportion) == plain
