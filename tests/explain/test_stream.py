"""Promises of explaining a stream: the roll-out of a whole text, step by step."""

import pytest
import torch
from torch.testing import assert_close

from leap.errors import ConfigError
from leap.explain import StreamExplainer, trace
from leap.models import LeapConfig, LeapForCausalLM, LeapformerConfig, LeapformerForCausalLM

SMALL = {"vocab_size": 61, "hidden_size": 16, "n_head": 2, "n_positions": 64}
SMALL |= {"feature": "elu_plus_one"}
OPTIONS = {
    "travelled": {"proportion": "travelled", "gate": "head", "convolution": 3},
    "paper": {"proportion": "learned"},
    "alibi": {"attention": "linear", "position_embedding": "alibi"},
    "hybrid": {"attention": ["leap", "leapformer"], "window_sizes": [4, None]},
}
MODELS = {
    "leap": lambda: LeapForCausalLM(LeapConfig(**SMALL, n_layer=3)),
    **{
        name: lambda options=options: LeapformerForCausalLM(
            LeapformerConfig(**SMALL, n_layer=2, **options)
        )
        for name, options in OPTIONS.items()
    },
}


@pytest.fixture(params=MODELS)
def model(request):
    torch.manual_seed(0)
    return MODELS[request.param]().double().eval()


def make_ids(t):
    return torch.randint(1, 61, (1, t), generator=torch.Generator().manual_seed(0))


def test_every_step_has_the_roll_out_of_the_text_so_far(model):
    ids = make_ids(12)
    expected, stream = trace(model, ids), StreamExplainer(model, keep=12)
    for i, token in enumerate(ids[0].tolist()):
        found, logits = stream.read(token)
        shares = torch.zeros(12)
        shares[found.tokens] = torch.tensor(found.shares)
        assert_close(shares, expected.through_layers(i)[0])
        assert found.rest == 0
    assert_close(logits, model(input_ids=ids).logits[0, -1])


def test_what_is_kept_is_exact_and_the_rest_is_told(model):
    ids = make_ids(30)
    expected, stream = trace(model, ids), StreamExplainer(model, keep=5)
    for token in ids[0].tolist():
        found, _ = stream.read(token)
    assert len(found.tokens) == 5 and found.tokens[0] in range(30)
    assert_close(torch.tensor(found.shares), expected.through_layers()[0, found.tokens])
    assert sum(found.shares) + found.rest == pytest.approx(1)


def test_memory_does_not_grow(model):
    stream = StreamExplainer(model, keep=4)
    sizes = []
    for token in make_ids(40)[0].tolist():
        stream.read(token)
        sizes.append(stream.n_bytes)
    assert sizes[20] == sizes[-1]


def test_what_cannot_be_explained_is_named():
    model = LeapformerForCausalLM(LeapformerConfig(**SMALL, n_layer=1, attention="softmax"))
    with pytest.raises(ConfigError, match="SoftmaxAttention cannot be explained while it streams"):
        StreamExplainer(model)
    with pytest.raises(ConfigError, match="keep=0 must be 1 or more"):
        StreamExplainer(MODELS["leap"](), keep=0)
