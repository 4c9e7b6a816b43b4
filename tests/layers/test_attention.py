"""What every attention layer promises, whatever is inside."""

import subprocess
import sys
from itertools import pairwise

import pytest
import torch
from torch.testing import assert_close

from leap.errors import ConfigError, InputError
from leap.layers import (
    FORMULATIONS,
    FastformerAttention,
    ForgetGate,
    GatedDeltaAttention,
    LeapAttention,
    LeapformerAttention,
    SoftmaxAttention,
)
from leap.layers.attention import token_positions
from leap.ops.state import load_state

LENGTH = 9

LEAPFORMERS = {
    "leapformer": {},
    "cosformer": {"proportion": "fixed", "length": 3 * LENGTH},
    "linear": {"proportion": "none"},
    "one-layer": {"proportion_hidden": 1},
    "per-head": {"proportion_per_head": True},
    "bins": {"proportion_bins": 4},
    "pre-relu": {"proportion_input": "projections", "scale_query": True},
    "exp": {"feature": "exp"},
    "signed": {"feature": "cubic", "proportion": "none"},
    "rotary": {"feature": "elu_plus_one", "rotary": True},
    "norm": {"normaliser": "norm"},
    "wide-values": {"value_width": 5, "bias": False},
    "travelled": {"proportion": "travelled"},
    "travelled-clocks": {"proportion": "travelled", "clocks": 2, "proportion_hidden": 5},
    "travelled-constant": {"proportion": "travelled", "constant_steps": True},
    "travelled-shared": {"proportion": "travelled", "proportion_per_head": False},
    "travelled-norm": {"proportion": "travelled", "normaliser": "norm"},
    "travelled-rotary": {"proportion": "travelled", "feature": "elu_plus_one", "rotary": True},
}
CAUSAL = {
    **{name: (LeapformerAttention, options) for name, options in LEAPFORMERS.items()},
    "gate-head": (LeapformerAttention, {"gate": "head", "feature": "elu_plus_one"}),
    "gate-channel": (LeapformerAttention, {"gate": "channel", "feature": "elu_plus_one"}),
    "alibi": (LeapformerAttention, {"alibi": True}),
    "alibi-gate": (LeapformerAttention, {"alibi": True, "gate": "channel", "rotary": True}),
    "gated-delta": (GatedDeltaAttention, {}),
    "gated-delta-wide-values": (GatedDeltaAttention, {"value_width": 5, "bias": False}),
    "convolved": (LeapformerAttention, {"convolution": 4, "gate": "head"}),
    "travelled-gate": (LeapformerAttention, {"proportion": "travelled", "gate": "head"}),
    "travelled-channels": (LeapformerAttention, {"proportion": "travelled", "gate": "channel"}),
    "travelled-all": (
        LeapformerAttention,
        {"proportion": "travelled", "gate": "head", "alibi": True, "convolution": 4, "clocks": 2},
    ),
    "selective": (LeapformerAttention, {"rotary": "selective", "feature": "elu_plus_one"}),
    "selective-norm": (
        LeapformerAttention,
        {"rotary": "selective", "normaliser": "norm", "feature": "elu_plus_one"},
    ),
    "output-gate": (LeapformerAttention, {"output_gate": True, "value_width": 5}),
    "gated-delta-convolved": (GatedDeltaAttention, {"convolution": 4}),
    "cosformer-convolved": (
        LeapformerAttention,
        {"proportion": "fixed", "length": 3 * LENGTH, "value_width": 5, "convolution": 3},
    ),
    "softmax": (SoftmaxAttention, {}),
    "softmax-rotary": (SoftmaxAttention, {"rotary": True}),
    "softmax-selective": (SoftmaxAttention, {"rotary": "selective"}),
    "softmax-selective-all": (
        SoftmaxAttention,
        {"rotary": "selective", "convolution": 3, "gate": "head", "output_gate": True},
    ),
    "softmax-gate": (SoftmaxAttention, {"gate": "head"}),
    "softmax-convolved": (SoftmaxAttention, {"rotary": True, "convolution": 4, "value_width": 5}),
    "softmax-all": (SoftmaxAttention, {"alibi": True, "gate": "head", "convolution": 2}),
    "leap-convolved": (LeapAttention, {"window": 4, "convolution": 4}),
    "fastformer-convolved": (LeapAttention, {"formulation": "fastformer", "convolution": 4}),
    "softmax-alibi": (SoftmaxAttention, {"alibi": True}),
    "leap-alibi": (LeapAttention, {"alibi": True, "window": 4}),
    "fastformer-alibi": (LeapAttention, {"alibi": True, "formulation": "fastformer"}),
    **{
        f"{name}-{window or 'global'}": (LeapAttention, {"formulation": name, "window": window})
        for name in FORMULATIONS
        for window in (None, 4)
    },
    "leap-bias": (LeapAttention, {"bias": True, "rescale": None}),
}
BIDIRECTIONAL = {
    **{
        name: (LeapformerAttention, options | {"form": "bidirectional"})
        for name, options in LEAPFORMERS.items()
    },
    "cosformer-own-length": (
        LeapformerAttention,
        {"proportion": "fixed", "form": "bidirectional"},
    ),
    "travelled-divided": (
        LeapformerAttention,
        {"proportion": "travelled", "places": "divided", "form": "bidirectional"},
    ),
    "gate-both-ways": (
        LeapformerAttention,
        {"gate": "head", "proportion": "travelled", "form": "bidirectional"},
    ),
    "output-gate": (LeapformerAttention, {"form": "bidirectional", "output_gate": True}),
    "alibi-both-ways": (LeapformerAttention, {"alibi": True, "form": "bidirectional"}),
    "softmax": (SoftmaxAttention, {"form": "bidirectional"}),
    "softmax-rotary": (SoftmaxAttention, {"form": "bidirectional", "rotary": True}),
    **{
        f"{name}-{window or 'global'}": (
            LeapAttention,
            {"formulation": name, "window": window, "form": "bidirectional"},
        )
        for name in FORMULATIONS
        for window in (None, 4)
    },
    "fastformer": (FastformerAttention, {}),
    "fastformer-per-head": (FastformerAttention, {"score": "per_head", "share_qv": False}),
}


def build(kind, options, *, hidden_size=12, n_head=3):
    layer = kind(hidden_size, n_head, **options).double()
    for parameter in layer.parameters():  # Fresh score vectors are too small to matter.
        torch.nn.init.normal_(parameter, std=0.5)
    for module in layer.modules():
        if isinstance(module, ForgetGate):  # One that forgets all leaves half precision nothing.
            module.last.weight.data *= 0.1
            module.last.bias.data += 4
    return layer


@pytest.fixture(params=CAUSAL)
def causal(request):
    return build(*CAUSAL[request.param])


@pytest.fixture(params=BIDIRECTIONAL)
def bidirectional(request):
    return build(*BIDIRECTIONAL[request.param])


@pytest.fixture(params=[*CAUSAL, *(f"{name} (bidirectional)" for name in BIDIRECTIONAL)])
def any_layer(request):
    name = request.param.removesuffix(" (bidirectional)")
    return build(*(CAUSAL if name == request.param else BIDIRECTIONAL)[name])


@pytest.mark.parametrize("cut", [0, 1, 5, LENGTH])
def test_a_sequence_can_be_cut_anywhere(causal, cut, make_tokens, assert_same):
    x = make_tokens(LENGTH)
    whole, final = causal(x)
    head, state = causal(x[:, :cut])
    tail, resumed = causal(x[:, cut:], state)
    assert_same(torch.cat([head, tail], dim=1), whole, causal, x)
    assert_close(resumed.length, final.length)


def test_steps_make_the_whole(causal, make_tokens, assert_same):
    x = make_tokens(LENGTH)
    whole, _ = causal(x)
    ys, state = [], None
    for token in x.unbind(1):
        y, state = causal.step(token, state)
        ys.append(y)
    assert_same(torch.stack(ys, dim=1), whole, causal, x)


def test_the_future_is_invisible(causal, make_tokens):
    x = make_tokens(LENGTH).detach()
    changed = x.clone()
    changed[:, 6:] = 1e6
    assert torch.equal(causal(x)[0][:, :6], causal(changed)[0][:, :6])


PADS = {
    "left": [[0, 0, 0, 1, 1, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1, 1, 1, 1]],
    "right": [[1, 1, 1, 1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 1, 1, 1, 1]],
    "holes": [[0, 1, 0, 1, 1, 1, 0, 0, 1], [1, 1, 1, 0, 0, 0, 0, 1, 0]],
}


@pytest.mark.parametrize("pads", PADS)
def test_pads_anywhere_change_nothing(any_layer, pads, make_tokens, assert_same):
    x, mask = make_tokens(LENGTH), torch.tensor(PADS[pads]).bool()
    padded, state = any_layer(x, key_mask=mask)
    for row in range(2):
        alone, _ = any_layer(x[row : row + 1, mask[row]])
        assert_same(padded[row : row + 1, mask[row]], alone, any_layer, x)
    if state is not None:
        assert state.length.tolist() == mask.sum(1).tolist()


def test_pads_change_nothing_in_a_continuation(causal, make_tokens):
    x, mask = make_tokens(LENGTH), torch.tensor(PADS["holes"]).bool()
    _, state = causal(x[:, :5], key_mask=mask[:, :5])
    tail, _ = causal(x[:, 5:], state, key_mask=mask[:, 5:])
    whole, _ = causal(x, key_mask=mask)
    assert_close(tail[mask[:, 5:]], whole[:, 5:][mask[:, 5:]])


def test_a_row_of_nothing_but_pads_is_finite(any_layer, make_tokens):
    x = make_tokens(LENGTH)
    mask = torch.tensor([[False], [True]]).expand(2, LENGTH)
    y, _ = any_layer(x, key_mask=mask)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert y.isfinite().all() and gradient.isfinite().all()


def test_packed_sequences_are_as_if_alone(any_layer, make_tokens, assert_same):
    x, bounds = make_tokens(LENGTH, batch=1), torch.tensor([0, 3, 4, 4, 9])
    packed, _ = any_layer(x, cu_seqlens=bounds)
    alone = [any_layer(x[:, start:end])[0] for start, end in pairwise(bounds) if end > start]
    assert_same(packed, torch.cat(alone, dim=1), any_layer, x)


def test_packed_sequences_go_on_each_from_its_own_state(causal, make_tokens):
    x, y = make_tokens(LENGTH, batch=1), make_tokens(LENGTH, batch=1, seed=1)
    bounds, again = torch.tensor([0, 3, 4, 9]), torch.tensor([0, 2, 8, 9])
    mask = torch.tensor([[1, 1, 1, 0, 1, 1, 1, 1, 1]]).bool()
    _, state = causal(x, cu_seqlens=bounds)
    packed, after = causal(y, state, cu_seqlens=again, key_mask=mask)
    assert after.length.tolist() == [5, 6, 6]
    for i, (start, end) in enumerate(pairwise(again)):
        _, past = causal(x[:, bounds[i] : bounds[i + 1]])
        alone, _ = causal(y[:, start:end], past, key_mask=mask[:, start:end])
        real = mask[0, start:end]
        assert_close(packed[:, start:end][:, real], alone[:, real])


def test_every_token_of_an_encoder_sees_every_other(bidirectional, make_tokens):
    x = make_tokens(4, batch=1)
    for name, bias in bidirectional.named_parameters():
        if name in ("q_proj.bias", "k_proj.bias"):  # or a query and a key might share no feature
            torch.nn.init.constant_(bias, 4)
    jacobian = torch.autograd.functional.jacobian(lambda x: bidirectional(x)[0][0], x)[:, :, 0]
    assert (jacobian.abs().amax(dim=(1, 3)) > 1e-9).all()


def test_tokens_can_be_taken_back(causal, make_tokens):
    x, draft = make_tokens(LENGTH), make_tokens(5, seed=1)
    _, state = causal(x)
    _, drafted = causal(draft, state.record(8))
    expected, _ = causal(x, causal(draft[:, :2], state)[1])
    actual, _ = causal(x, drafted.rollback(3))
    assert_close(actual, expected)


def test_rows_of_a_state_can_be_picked(causal, make_tokens):
    x, more = make_tokens(LENGTH), make_tokens(3, seed=1)
    y, _ = causal(more.flip(0), causal(x)[1].select(torch.tensor([1, 0])))
    assert_close(y.flip(0), causal(more, causal(x)[1])[0])


def test_a_state_survives_a_file(causal, make_tokens, tmp_path):
    x = make_tokens(LENGTH)
    _, state = causal(x)
    state.save(tmp_path / "state.safetensors")
    loaded = load_state(tmp_path / "state.safetensors")
    assert type(loaded) is type(state)
    assert_close(causal(x, loaded)[0], causal(x, state)[0])


def test_a_linear_state_does_not_grow(causal, make_tokens):
    if isinstance(causal, SoftmaxAttention):
        pytest.skip("its state is all keys and values")
    sizes = [causal(make_tokens(t))[1].n_bytes for t in (1, 4, 20, 27)]
    windowed = isinstance(causal, LeapAttention) and causal.window is not None
    assert sizes[2] == sizes[3]
    assert sizes[0] < sizes[1] <= 4 * sizes[0] if windowed else sizes[0] == sizes[1] == sizes[2]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.half], ids=str)
def test_half_precision_keeps_its_dtype_and_is_close(any_layer, dtype, make_tokens):
    x = make_tokens(LENGTH).detach()
    expected, _ = any_layer(x)
    y, state = any_layer.to(dtype)(x.to(dtype))
    assert y.dtype == dtype
    assert_close(y.double(), expected, rtol=0.1, atol=0.1 * expected.abs().max().item())
    if state is not None and not isinstance(any_layer, SoftmaxAttention):
        kept = {name: x for name, x in state.tensors().items() if not name.startswith("taps.")}
        sums = [x for x in kept.values() if x.is_floating_point()]
        assert all(x.dtype in (torch.float, torch.double) for x in sums)


def test_autocast_is_close_to_full_precision(any_layer, make_tokens):
    x = make_tokens(LENGTH).detach().float().requires_grad_()
    expected, _ = any_layer.float()(x)
    with torch.autocast("cpu", torch.bfloat16):
        y, _ = any_layer(x)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    # A cube triples the rounding of the projections, and signed scores cancel.
    signed = isinstance(any_layer, LeapformerAttention) and any_layer.feature.signed
    allowed = 0.2 if signed else 0.05
    assert_close(y.float(), expected, rtol=allowed, atol=allowed * expected.abs().max().item())
    assert gradient.isfinite().all()


def test_large_and_small_tokens_give_finite_numbers(any_layer, make_tokens):
    x = make_tokens(LENGTH).detach().float()
    cubed = isinstance(any_layer, FastformerAttention)  # of its input, with nothing to divide by
    for scale in (1e-18, 1e-9, 1e9, 1e9 if cubed else 1e15):
        y, _ = any_layer.float()((scale * x).requires_grad_())
        assert y.isfinite().all()


def test_gradients_are_those_of_finite_differences(any_layer, make_tokens):
    if getattr(getattr(any_layer, "q_proportion", None), "bins", None):
        pytest.skip("rounded proportions pass gradients as if they had not been")
    x = make_tokens(4, batch=1)
    assert torch.autograd.gradcheck(lambda x: any_layer(x)[0], x, fast_mode=True)


COMPILE = """
import torch
from torch.testing import assert_close
from leap.layers import GatedDeltaAttention, LeapAttention, LeapformerAttention

layers = LeapformerAttention(12, 3), LeapAttention(12, 3, window=4), GatedDeltaAttention(12, 3)
for layer in layers:
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    step = torch.compile(layer.step, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 9, 12)
    (y, state), (expected, past) = compiled(x), layer(x)
    assert_close(y, expected)
    assert_close(step(x[:, 0], state.detach())[0], layer.step(x[:, 0], past)[0])
"""


def test_layers_compile_whole():
    # In a process of its own, because the shape checks of this one get in the compiler's way.
    subprocess.run([sys.executable, "-c", COMPILE], check=True)


def test_positions_count_real_tokens_from_the_past(make_tokens):
    x = make_tokens(5)
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 0, 1, 1, 0]]).bool()
    assert token_positions(x, None, mask).tolist() == [[0, 0, 0, 1, 2], [0, 0, 1, 2, 2]]
    _, past = SoftmaxAttention(12, 3).double()(x, key_mask=mask)
    assert token_positions(x, past).tolist() == [[3, 4, 5, 6, 7]] * 2
    assert token_positions(x, past, mask).tolist() == [[2, 2, 3, 4, 5], [3, 3, 4, 5, 5]]
    bounds = torch.tensor([0, 2, 5])
    assert token_positions(x[:1], None, None, bounds).tolist() == [[0, 1, 0, 1, 2]]
    assert token_positions(x[:1], past, None, bounds).tolist() == [[3, 4, 3, 4, 5]]
    assert token_positions(x[:1], past, mask[1:], bounds).tolist() == [[3, 3, 3, 4, 4]]


@pytest.mark.parametrize("kind", [LeapformerAttention, LeapAttention, SoftmaxAttention])
def test_a_width_that_does_not_divide_is_an_error_that_names_those_that_do(kind):
    with pytest.raises(ConfigError, match=r"hidden_size=100 .* n_head=8 .* 96 and 104"):
        kind(100, 8)
    with pytest.raises(ConfigError, match=r"hidden_size=3 .* n_head=4 .* are 4$"):
        kind(3, 4)
    with pytest.raises(ConfigError, match="n_head=0 must be 1 or more"):
        kind(8, 0)


@pytest.mark.usefixtures("shapes_unchecked")
def test_bad_tokens_are_named(any_layer, make_tokens):
    with pytest.raises(InputError, match=r"x is \[2, 9, 7\]; expected \[batch, tokens, 12\]"):
        any_layer(make_tokens(LENGTH, hidden_size=7))
    with pytest.raises(InputError, match=r"x has dtype torch\.int64"):
        any_layer(make_tokens(LENGTH).long())
    with pytest.raises(InputError, match="key_mask"):
        any_layer(make_tokens(LENGTH), key_mask=torch.ones(2, 4, dtype=torch.bool))
    with pytest.raises(InputError, match="cu_seqlens"):
        any_layer(make_tokens(LENGTH, batch=1), cu_seqlens=torch.tensor([0, 4]))


def test_a_state_of_another_kind_is_an_error(causal, make_tokens):
    other = LeapformerAttention if isinstance(causal, SoftmaxAttention) else SoftmaxAttention
    _, state = other(12, 3).double()(make_tokens(LENGTH))
    with pytest.raises(
        InputError, match=rf"goes on from a .*State, not from a {type(state).__name__}"
    ):
        causal(make_tokens(LENGTH), state)


def test_a_state_of_other_rows_is_an_error(causal, make_tokens):
    _, state = causal(make_tokens(LENGTH))
    with pytest.raises(InputError):
        causal(make_tokens(LENGTH, batch=3), state)


def test_boundaries_that_leave_tokens_over_are_an_error_in_a_continuation_too(causal, make_tokens):
    x = make_tokens(LENGTH, batch=1)
    _, state = causal(x)
    with pytest.raises(InputError, match="cu_seqlens"):
        causal(x, state, cu_seqlens=torch.tensor([0, 4]))


@pytest.mark.usefixtures("shapes_unchecked")
def test_positions_of_another_shape_are_an_error(make_tokens):
    with pytest.raises(InputError, match=r"positions are \[9\]; .* expected \[2, 9\]"):
        build(SoftmaxAttention, {"rotary": True})(make_tokens(9), positions=torch.arange(9))
