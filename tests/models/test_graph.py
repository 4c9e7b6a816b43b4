"""The backend `graph`, which exports trace: the same numbers as ever, whatever the mechanism."""

import pytest
import torch
from torch.testing import assert_close

from leap.errors import InputError
from leap.models import LeapformerConfig, LeapformerForCausalLM, StateCache
from leap.ops import additive_attention
from leap.ops.backends import using

KINDS = {
    "leapformer": {},
    "gates-of-heads": {"gate": "head", "position_embedding": "none"},
    "gates-of-channels": {"gate": "channel", "position_embedding": "none"},
    "travelled": {"proportion": "travelled", "clocks": 2},
    "alibi": {"position_embedding": "alibi"},
    "norm": {"normaliser": "norm"},
    "convolution": {"convolution": 4},
    "output-gate": {"output_gate": True},
    "learned-positions": {"position_embedding": "learned"},
    "adaptive": {"adaptive_cutoffs": [20, 40], "adaptive_factor": 2},
    "cosformer": {"attention": "cosformer"},
    "rope-linear": {"attention": "rope-linear"},
    "exp": {"attention": "exp"},
    "cubic": {"attention": "cubic"},
    "softmax": {"attention": "softmax", "position_embedding": "rotary"},
    "softmax-with-gates": {
        "attention": "softmax",
        "position_embedding": "alibi",
        "gate": "head",
    },
    "selective": {"attention": "softmax", "position_embedding": "selective"},
    "leap": {"attention": "leap", "window_sizes": [4, None]},
    "leap-alone": {"attention": "leap", "window_sizes": [1, None], "position_embedding": "alibi"},
    "fastformer": {"attention": "leap", "formulation": "fastformer", "window_sizes": [5, None]},
    "gated-delta": {"attention": "gated-delta", "convolution": 4, "position_embedding": "none"},
    "hybrid": {"attention": ["leap", "gated-delta"], "position_embedding": "none"},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cuts", [[40], [13, 1, 1, 25]], ids=["whole", "cut"])
@torch.no_grad()
def test_a_graph_backend_gives_the_logits_of_any_other(kind, cuts):
    sizes = {"vocab_size": 61, "hidden_size": 16, "n_layer": 2, "n_head": 2, "n_positions": 64}
    model = LeapformerForCausalLM(LeapformerConfig(**sizes | KINDS[kind])).eval().double()
    for parameter in model.model.layers.parameters():
        parameter.mul_(3)  # Else all tokens are alike.
    ids = torch.randint(0, 61, (2, 40))
    expected, cache = model(ids).logits, StateCache(2)
    with using("graph"):
        parts = [
            model(part, past_key_values=cache, use_cache=True).logits
            for part in ids.split(cuts, dim=1)
        ]
    assert_close(torch.cat(parts, dim=1), expected)
    after = model(ids, use_cache=True).past_key_values
    cache.reserve()
    after.reserve()
    for layer, other in zip(cache.layers, after.layers, strict=True):
        assert_close(layer.state.tensors(), other.state.tensors())


def test_a_graph_knows_no_pads():
    focus, v = torch.zeros(1, 1, 3), torch.zeros(1, 1, 3, 2)
    mask = torch.tensor([[False, True, True]])
    with pytest.raises(InputError, match=r"'graph' cannot answer .* it knows no pads"):
        additive_attention(focus, v, key_mask=mask, backend="graph")
