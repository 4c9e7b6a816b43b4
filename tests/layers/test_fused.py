"""Promises of fused blocks: the numbers and states of the blocks themselves, or a reason not to."""

import copy
import pickle
from dataclasses import replace

import pytest
import torch
from torch import nn

from leap.layers import Block, LeapformerAttention
from leap.layers.equalise import noted
from leap.layers.fused import FusedBlocks
from leap.ops.backends import using
from leap.ops.native import library
from leap.ops.tolerance import TOLERANCES, relative_error

pytestmark = pytest.mark.skipif(
    library.missing() is not None, reason=f"no native library: {library.missing()}"
)

BEST = {"proportion": "travelled", "gate": "head", "convolution": 4, "output_gate": True}
TAKEN = {
    "linear": {"proportion": "none"},
    "no-bias": {"proportion": "none", "bias": False},
    "elu": {"proportion": "none", "feature": "elu_plus_one"},
    "exp": {"proportion": "none", "feature": "exp"},
    "scaled-queries": {"proportion": "none", "scale_query": True, "feature": "exp"},
    "learned": {"proportion": "learned"},
    "learned-single": {"proportion": "learned", "proportion_hidden": 1},
    "learned-projections": {"proportion": "learned", "proportion_input": "projections"},
    "travelled": {"proportion": "travelled"},
    "travelled-clocks": {"proportion": "travelled", "clocks": 3},
    "travelled-hidden": {"proportion": "travelled", "proportion_hidden": 20},
    "travelled-shared": {"proportion": "travelled", "proportion_per_head": False},
    "travelled-constant": {"proportion": "travelled", "constant_steps": True},
    "gate": {"proportion": "none", "gate": "head"},
    "fade": {"proportion": "learned", "alibi": True},
    "gate-and-fade": {"proportion": "travelled", "gate": "head", "alibi": True},
    "two-taps": {"proportion": "none", "convolution": 2},
    "four-taps": {"proportion": "learned", "convolution": 4},
    "output-gate": {"proportion": "none", "output_gate": True},
    "norm": {"proportion": "none", "normaliser": "norm"},
    "norm-travelled": {**BEST, "normaliser": "norm"},
    "floor": {"proportion": "none", "eps": 0.1},
    "narrow-values": {**BEST, "value_width": 5},
    "wide-values": {**BEST, "value_width": 43},
    "best": BEST,
}
REFUSED = {
    "fixed proportions": {"proportion": "fixed", "length": 99},
    "rotary": {"proportion": "none", "rotary": True},
    "not per feature": {"proportion": "none", "gate": "channel"},
    "feature maps": {"proportion": "none", "feature": "square"},
    "one net for all heads": {"proportion": "learned", "proportion_per_head": True},
    "without bins": {"proportion": "learned", "proportion_bins": 4},
}


def make_layers(hidden_size=24, n_head=2, n_layer=2, **options):
    layers = nn.ModuleList(
        nn.ModuleDict(
            {"block": Block(LeapformerAttention(hidden_size, n_head, **options), dropout=0.1)}
        )
        for _ in range(n_layer)
    )
    for parameter in layers.parameters():  # Norms and biases that do something.
        nn.init.normal_(parameter, std=0.3)
    return layers.eval()


@torch.no_grad()
def plain(layers, x, states):
    with using("torch"):
        after = []
        for layer, state in zip(layers, states, strict=True):
            x, state = layer.block(x, state)
            after.append(state)
    return x, after


@torch.no_grad()
def fused(layers, x, states):
    blocks = FusedBlocks()
    assert blocks.refusal(layers, x, states, None) is None
    return blocks.step(x, states)


def after_reading(layers, rows, n_tokens=7, width=24):
    return plain(layers, torch.randn(rows, n_tokens, width), [None] * len(layers))[1]


def assert_same(found, exact):
    limit = TOLERANCES[torch.float32].output
    assert relative_error(found[0], exact[0]) <= limit
    for state, expected in zip(found[1], exact[1], strict=True):
        assert type(state) is type(expected)
        assert state.layout() == expected.layout()
        wanted = expected.tensors()
        for name, x in state.tensors().items():
            kept = torch.float32 if name == "taps.x" else wanted[name].dtype
            assert x.dtype == kept, name
            assert relative_error(x, wanted[name]) <= limit, name


def doubled(layers, states):
    """The same in double precision; only tokens before a convolution are not so already."""
    return copy.deepcopy(layers).double(), [
        state.map(lambda x: x.double() if x.is_floating_point() else x) for state in states
    ]


@pytest.mark.parametrize("rows", [1, 3, 21], ids=lambda n: f"{n}-rows")
@pytest.mark.parametrize("option", TAKEN)
def test_a_token_through_all_blocks_is_that_of_double_precision(option, rows):
    layers = make_layers(**TAKEN[option])
    states = after_reading(layers, rows)
    exact_layers, exact = doubled(layers, states)
    for _ in range(3):
        x = torch.randn(rows, 1, 24)
        y, states = fused(layers, x, states)
        expected, exact = plain(exact_layers, x.double(), exact)
        assert_same((y, states), (expected, exact))


@pytest.mark.parametrize("name", ["AVX-512", "AVX2", "NEON"])
def test_every_instruction_set_gives_them(name):
    before = library.instructions()
    if not library.use_instructions(name):
        pytest.skip(f"no {name} here")
    try:
        for rows in (1, 2, 5, 70):
            layers = make_layers(64, 2, 1, **BEST)
            states = after_reading(layers, rows, width=64)
            exact_layers, exact = doubled(layers, states)
            x = torch.randn(rows, 1, 64)
            assert_same(fused(layers, x, states), plain(exact_layers, x.double(), exact))
    finally:
        assert library.use_instructions(before)


def test_a_state_is_never_written_into():
    layers = make_layers(**BEST)
    states = after_reading(layers, 2)
    before = [x.clone() for state in states for x in state.tensors().values()]
    fused(layers, torch.randn(2, 1, 24), states)
    kept = [x for state in states for x in state.tensors().values()]
    assert all(torch.equal(a, b) for a, b in zip(kept, before, strict=True))


def test_tokens_may_go_either_way_after_a_reorder_and_a_rollback():
    layers = make_layers(**BEST)
    recorded = [state.record() for state in after_reading(layers, 3)]
    blocks = FusedBlocks()
    x = torch.randn(3, 1, 24)
    with torch.no_grad():
        assert "recorded" in blocks.refusal(layers, x, recorded, None)
    _, drafted = plain(layers, torch.randn(3, 4, 24), recorded)
    back = [state.rollback(4).select(torch.tensor([2, 0, 0])) for state in drafted]
    states = [
        replace(state, taps=replace(state.taps, trail=None), inner=replace(state.inner, trail=None))
        for state in back
    ]
    one = fused(layers, x, states)
    exact_layers, exact = doubled(layers, states)
    other = plain(exact_layers, x.double(), exact)
    assert_same(one, other)
    # The plain way goes on from what the fused one kept.
    assert_same(plain(layers, x, one[1]), plain(exact_layers, x.double(), other[1]))


@pytest.mark.parametrize("reason", REFUSED)
def test_what_it_does_not_know_is_refused_with_a_reason(reason):
    layers = make_layers(**REFUSED[reason])
    states = after_reading(layers, 1)
    with torch.no_grad():
        assert reason in FusedBlocks().refusal(layers, torch.randn(1, 1, 24), states, None)


def test_what_is_given_is_refused_where_it_does_not_fit():
    layers = make_layers(**BEST)
    blocks, states, x = FusedBlocks(), after_reading(layers, 2), torch.randn(2, 1, 24)
    assert "no gradient" in blocks.refusal(layers, x, states, None)
    with torch.no_grad():
        assert blocks.refusal(layers, x, states, None) is None
        mask = torch.ones(2, 1, dtype=torch.bool)
        assert "pads" in blocks.refusal(layers, x, states, mask)
        assert "float32" in blocks.refusal(layers, x.double(), states, None)
        assert "one token" in blocks.refusal(layers, torch.randn(2, 2, 24), states, None)
        assert "have read" in blocks.refusal(layers, x, [None, None], None)
        assert "have read" in blocks.refusal(layers, x[:1], states, None)
        with using("torch"):
            assert "torch was named" in blocks.refusal(layers, x, states, None)
        with torch.autocast("cpu"):
            assert "mode of torch" in blocks.refusal(layers, x, states, None)


def test_whoever_looks_at_modules_or_changes_them_is_heeded():
    layers = make_layers(**BEST)
    blocks, states, x = FusedBlocks(), after_reading(layers, 1), torch.randn(1, 1, 24)
    block = layers[0].block
    with torch.no_grad():
        assert blocks.refusal(layers, x, states, None) is None
        hook = block.attention.q_proj.register_forward_hook(lambda *_: None)
        assert "hooks" in blocks.refusal(layers, x, states, None)
        hook.remove()
        with noted(layers):
            assert "looks at" in blocks.refusal(layers, x, states, None)
        block.train()
        assert "dropout" in blocks.refusal(layers, x, states, None)
        block.eval()
        block.feed_forward.forward = lambda y: y
        assert "exchanged" in blocks.refusal(layers, x, states, None)
        del block.feed_forward.forward
        assert blocks.refusal(layers, x, states, None) is None

        for change in (
            lambda: block.attention.o_proj.weight.mul_(2),
            lambda: setattr(block.attention.o_proj.weight, "data", torch.randn(24, 24)),
            lambda: setattr(block.attention, "k_proj", nn.Linear(24, 24)),
            lambda: setattr(block.attention_norm, "bias", nn.Parameter(torch.randn(24))),
        ):
            change()
            assert blocks.refusal(layers, x, states, None) is None
            exact_layers, exact = doubled(layers, states)
            assert_same(blocks.step(x, states), plain(exact_layers, x.double(), exact))

        class Adapted(nn.Linear):
            pass

        block.attention.k_proj = Adapted(24, 24)
        assert "not a plain Linear" in blocks.refusal(layers, x, states, None)
        layers.half()
        assert blocks.refusal(layers, x, states, None) is not None


def test_copies_find_their_own_weights():
    layers = make_layers(**BEST)
    states, x = after_reading(layers, 1), torch.randn(1, 1, 24)
    blocks = FusedBlocks()
    with torch.no_grad():
        assert blocks.refusal(layers, x, states, None) is None
        other = make_layers(**BEST)
        for each in (copy.deepcopy(blocks), pickle.loads(pickle.dumps(blocks)), blocks):
            assert each.refusal(other, x, states, None) is None
            exact_layers, exact = doubled(other, states)
            assert_same(each.step(x, states), plain(exact_layers, x.double(), exact))
