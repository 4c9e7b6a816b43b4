"""Promises of attention that fades with distance."""

import pytest
import torch
from torch.testing import assert_close

from leap.errors import ConfigError
from leap.layers import LeapAttention, LeapformerAttention, SoftmaxAttention
from leap.layers.attention import distance_slopes

LAYERS = {
    "leapformer": (LeapformerAttention, {"feature": "elu_plus_one"}),
    "linear": (LeapformerAttention, {"feature": "elu_plus_one", "proportion": "none"}),
    "rotary": (LeapformerAttention, {"feature": "elu_plus_one", "rotary": True}),
    "gated": (LeapformerAttention, {"feature": "elu_plus_one", "gate": "head"}),
    "softmax": (SoftmaxAttention, {}),
    "leap": (LeapAttention, {}),
    "leap-window": (LeapAttention, {"window": 4}),
}


@pytest.mark.parametrize(("kind", "options"), LAYERS.values(), ids=LAYERS)
@pytest.mark.parametrize("n_pads", [0, 2])
def test_weights_fade_exponentially_with_the_distance_in_real_tokens(
    kind, options, n_pads, make_tokens
):
    x, mask = make_tokens(9), torch.arange(9).expand(2, 9) >= n_pads
    fading = kind(12, 3, alibi=True, **options).double()
    plain = kind(12, 3, **options).double()
    plain.load_state_dict(fading.state_dict())
    at = torch.arange(9.0)
    slopes = torch.tensor(distance_slopes(3), dtype=torch.double)[:, None, None]
    fade = (-slopes * (at[:, None] - at)).exp()
    seen = slice(n_pads, None)
    actual, expected = (
        weights[:, :, seen, seen]
        for weights in (
            fading.weights(x, key_mask=mask),
            plain.weights(x, key_mask=mask) * fade,
        )
    )
    # As shares of the sum, since rotary scores, which may be negative, do not sum to 1.
    actual, expected = (weights / weights.sum(-1, keepdim=True) for weights in (actual, expected))
    assert_close(actual, expected)


def test_slopes_are_those_of_alibi():
    assert distance_slopes(8) == tuple(2.0**-head for head in range(1, 9))


@pytest.mark.parametrize(
    ("kind", "form"),
    [
        (LeapformerAttention, "cross"),
        (SoftmaxAttention, "bidirectional"),
        (SoftmaxAttention, "cross"),
    ],
)
def test_there_is_no_distance_behind_without_a_direction(kind, form):
    with pytest.raises(ConfigError, match=f"alibi is for form='causal', not form='{form}'"):
        kind(12, 3, form=form, alibi=True)
