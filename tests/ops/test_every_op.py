"""What holds for every op of `leap.ops`: any strides, any derivative, no NaN for finite inputs."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import forward_ad
from torch.func import grad, jacrev, jvp, vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import normalize
from torch.testing import assert_close

from leap.ops import (
    DeltaState,
    FocusState,
    LinearState,
    SoftmaxState,
    TapState,
    WindowState,
    additive_attention,
    additive_pool,
    causal_convolution,
    causal_delta_attention,
    causal_linear_attention,
    causal_proportional_attention,
    causal_softmax_attention,
    causal_travelled_attention,
    linear_attention,
    softmax_attention,
    staircase_linear_attention,
    two_way_linear_attention,
)
from leap.ops.additive import surrounding_attention
from leap.ops.block_sparse import block_sparse_attention

pytestmark = pytest.mark.usefixtures("each_backend")

BATCH, HEADS, PAST = 2, 2, 4


@dataclass(frozen=True)
class Op:
    """An op as a function of floating-point tensors, each made as `SHAPES` says of its name."""

    inputs: str
    call: Callable
    needs: int = 1
    """The number of tokens must be a multiple of this."""
    largest: float = 1e15
    """Magnitude of inputs beyond which float32 does not hold what they lead to."""

    def __call__(self, inputs, *, mask=None):
        out = self.call(mask, *inputs)
        return out if isinstance(out, tuple) else (out,)

    def make(self, length, *, dtype=torch.double, batch=BATCH, seed=0):
        length = -(-length // self.needs) * self.needs
        generator = torch.Generator().manual_seed(seed)
        made = []
        for name in self.inputs.split():
            low, *axes = SHAPES[name]
            axes = [{"b": batch, "h": HEADS, "t": length}.get(axis, axis) for axis in axes]
            x = torch.rand(axes, generator=generator, dtype=torch.double)
            made.append((low + (1 - low) * x).to(dtype))  # From `low` to 1.
        return made

    def length(self, inputs):
        return inputs[0].shape[SHAPES[self.inputs.split()[0]].index("t") - 1]


SHAPES = {
    **dict.fromkeys(("q", "k"), (0, "b", "h", "t", 3)),
    **dict.fromkeys(("x", "y"), (0, "b", "h", "t", 2)),
    **dict.fromkeys(("p", "s", "beta"), (0, "b", "h", "t")),
    "v": (-1, "b", "h", "t", 2),
    "focus": (-1, "b", "h", "t"),
    "turn": (0, "b", "h", "t", 1),
    "shut": (-1, "b", "h", "t"),
    "shut_features": (-1, "b", "h", "t", 3),
    "kv": (0, "b", "h", 3, 2),
    "k_sum": (0.5, "b", "h", 3),
    "mass": (0.9, "b", "h"),
    "sum": (-1, "b", "h", 2),
    "past_focus": (-1, "b", "h", PAST),
    "past_k": (-1, "b", "h", PAST, 3),
    "past_v": (-1, "b", "h", PAST, 2),
    "tokens": (-1, "b", "t", 3),
    "weight": (-1, 3, PAST + 1),
    "bias": (-1, 3),
    "past_tokens": (-1, "b", PAST, 3),
}


def numbers(o, state):
    """The output, and those numbers of the state that gradients may flow out of."""
    if isinstance(state, FocusState):
        return o, state.mean()  # Mass and sum are relative to the peak, which has no gradient.
    kept = (x for name, x in state.tensors().items() if name in ("kv", "k", "focus", "v", "s"))
    return o, *(x.masked_fill(x.isinf(), 0) for x in kept)


def lengths(x):
    return torch.full((len(x),), PAST)


def additive(window=None):
    def call(mask, focus, v):
        return numbers(*additive_attention(focus, v, window=window, key_mask=mask))

    return call


def additive_from_a_state(mask, focus, v, mass, sum):
    state = FocusState(torch.zeros_like(mass) + 1, 1 + mass, sum, length=lengths(v))
    return numbers(*additive_attention(focus, v, state, key_mask=mask))


def additive_from_a_window(mask, focus, v, past_focus, past_v):
    state = WindowState(past_focus, past_v, length=lengths(v))
    return numbers(*additive_attention(focus, v, state, window=PAST + 1, key_mask=mask))


def linear(mask, q, k, v, shut=None, **options):
    gate = None if shut is None else -shut.abs()
    return numbers(*causal_linear_attention(q, k, v, key_mask=mask, log_gate=gate, **options))


def linear_from_a_state(mask, q, k, v, x, y, shut, kv, k_sum):
    state = LinearState(torch.cat([kv, kv], 2), torch.cat([k_sum, k_sum], 2), length=lengths(v))
    return linear(mask, q, k, v, shut, state=state, reweighting=(x, y))


def travelled(mask, q, k, v, turn):
    return causal_travelled_attention(q, k, v, turn, key_mask=mask)[0]


def staircase(mask, q, k, v, each=False):
    visible = (torch.arange(q.shape[2]) // 2 + 1).clamp_max(k.shape[2])
    visible = visible.expand(len(q), -1) if each else visible
    return staircase_linear_attention(q, k, v, visible, key_mask=mask)


def delta(mask, q, k, v, beta, shut=None, kv=None):
    state = None if kv is None else DeltaState(kv, length=lengths(v))
    gate = None if shut is None else -shut.abs()
    k = normalize(k + 0.1, dim=-1)
    return numbers(*causal_delta_attention(q, k, v, beta, state, log_gate=gate, key_mask=mask))


def softmax(mask, q, k, v, shut, past_k, past_v):
    state = SoftmaxState(
        past_k, past_v, log_gate=torch.zeros_like(past_v[..., 0]), length=lengths(v)
    )
    return causal_softmax_attention(q, k, v, state, log_gate=-shut.abs(), key_mask=mask)[0]


def convolution(mask, tokens, weight, bias, past_tokens):
    state = TapState(past_tokens, length=lengths(tokens))
    o, after = causal_convolution(tokens, weight, state, bias=bias, key_mask=mask)
    o = o if mask is None else o.masked_fill(~mask.unsqueeze(-1), 0)
    return o, after.x


def block_sparse(mask, q, k, v):
    n_block = q.shape[2] // 5
    own = torch.arange(n_block).expand(len(q), HEADS, -1)
    blocks = torch.stack([own, (own + 1) % n_block], dim=2).mT if n_block > 1 else own.unsqueeze(-1)
    return block_sparse_attention(q, k, v, blocks, key_mask=mask)


OPS = {
    "additive": Op("focus v", additive()),
    "additive-window-1": Op("focus v", additive(1)),
    "additive-window-37": Op("focus v", additive(37)),
    "additive-from-a-state": Op("focus v mass sum", additive_from_a_state),
    "additive-from-a-window": Op("focus v past_focus past_v", additive_from_a_window),
    "pool": Op("focus v", lambda mask, focus, v: additive_pool(focus, v, key_mask=mask)),
    "surrounding": Op(
        "focus v", lambda mask, focus, v: surrounding_attention(focus, v, window=3, key_mask=mask)
    ),
    "causal": Op("q k v", linear),
    "causal-gated": Op("q k v shut", linear),
    "causal-gated-by-feature": Op("q k v shut_features", linear),
    "causal-faded": Op("q k v", lambda *given: linear(*given, fade=[-0.1, -0.5])),
    "causal-sums": Op("q k v", lambda *given: linear(*given, normalise=False), largest=1e9),
    "causal-from-a-state": Op("q k v x y shut kv k_sum", linear_from_a_state),
    "proportional": Op(
        "q k v p s",
        lambda mask, *given: numbers(*causal_proportional_attention(*given, key_mask=mask)),
    ),
    "travelled": Op("q k v turn", travelled),
    "whole": Op("q k v", lambda mask, *qkv: linear_attention(*qkv, key_mask=mask)),
    "whole-reweighted": Op(
        "q k v x y",
        lambda mask, q, k, v, x, y: linear_attention(q, k, v, reweighting=(x, y), key_mask=mask),
    ),
    "two-way": Op(
        "q k v shut",
        lambda mask, q, k, v, shut: two_way_linear_attention(
            q, k, v, log_gate=-shut.abs(), key_mask=mask
        ),
    ),
    "staircase": Op("q k v", staircase),
    "staircase-per-row": Op("q k v", lambda *given: staircase(*given, each=True)),
    "delta": Op("q k v beta", delta),
    "delta-from-a-state": Op("q k v beta shut kv", delta),
    "softmax": Op("q k v", lambda mask, *qkv: softmax_attention(*qkv, key_mask=mask)),
    "causal-softmax": Op("q k v shut past_k past_v", softmax),
    # Values as wide as queries: a kernel of torch's own, whose gradient is NaN at scores of 1e9.
    "softmax-of-one-width": Op(
        "q k shut_features",
        lambda mask, *qkv: softmax_attention(*qkv, key_mask=mask),
        largest=1e3,
    ),
    "causal-softmax-of-one-width": Op(
        "q k shut_features",
        lambda mask, *qkv: causal_softmax_attention(*qkv, key_mask=mask)[0],
        largest=1e3,
    ),
    "convolution": Op("tokens weight bias past_tokens", convolution),
    "block-sparse": Op("q k v", block_sparse, needs=5),
}

lengths_of_both_kinds = pytest.mark.parametrize("length", [5, 70], ids=lambda n: f"{n}-tokens")
every_op = pytest.mark.parametrize("op", OPS.values(), ids=OPS.keys())


def make_mask(length, batch):
    return torch.arange(length) % 3 != torch.arange(batch).unsqueeze(1)


def gradients(op, inputs, upstream=None, **options):
    """Outputs, and the gradients of all inputs."""
    inputs = [x.detach().requires_grad_() for x in inputs]  # The strides stay.
    out = op(inputs, **options)
    upstream = [torch.ones_like(x) for x in out] if upstream is None else upstream
    return out, torch.autograd.grad(out, inputs, upstream, materialize_grads=True)


# Strides


def swapped(x):
    """The last two axes swapped in memory."""
    return x.mT.contiguous().mT


def heads_last(x):
    """Heads beside the width, as a projection leaves them."""
    return x.transpose(1, -2).contiguous().transpose(1, -2)


def sliced(x):
    """Every other element of a larger tensor."""
    return torch.stack([x, x.clone()], dim=-1)[..., 0]


def turned(x):
    """The last axis outermost."""
    return x.movedim(-1, 0).contiguous().movedim(0, -1)


LAYOUTS = (swapped, heads_last, sliced, turned)
few_sizes = pytest.mark.parametrize(
    ("length", "batch"), [(1, 2), (64, 1), (70, 2)], ids=["1-token", "64-tokens", "70-tokens"]
)


@every_op
@few_sizes
@pytest.mark.parametrize("masked", [False, True], ids=["all-real", "masked"])
def test_any_strides_give_the_same(op, length, batch, masked):
    inputs = op.make(length, batch=batch)
    mask = make_mask(op.length(inputs), batch) if masked else None
    upstream = [torch.rand_like(x) for x in op(inputs, mask=mask)]
    expected = gradients(op, inputs, upstream, mask=mask)
    mask = None if mask is None else swapped(mask)
    for layout in LAYOUTS:
        strided, given = ([x if x.ndim < 2 else layout(x) for x in xs] for xs in (inputs, upstream))
        assert_close(gradients(op, strided, given, mask=mask), expected)


@every_op
@few_sizes
def test_expanded_tensors_give_the_same(op, length, batch):
    """Stride 0 along each axis in turn, and upstream gradients that are one number."""
    inputs = op.make(length, batch=batch)
    for axis in range(3):
        expanded = [x if x.ndim <= axis else x.narrow(axis, 0, 1).expand_as(x) for x in inputs]
        upstream = [x.new_ones(1).expand_as(x) for x in op(expanded)]
        expected = gradients(op, [x.contiguous() for x in expanded])
        assert_close(gradients(op, expanded, upstream), expected)


# Derivatives


def scalar(op, **options):
    """An op as a function of its inputs to one number."""

    def loss(*inputs):
        return sum(x.square().sum() for x in op(inputs, **options))

    return loss


@every_op
@lengths_of_both_kinds
@pytest.mark.parametrize("masked", [False, True], ids=["all-real", "masked"])
def test_second_derivatives_are_those_of_differences(op, length, masked):
    inputs = [x.requires_grad_() for x in op.make(length, batch=1)]
    mask = make_mask(op.length(inputs), 1) if masked else None
    loss = scalar(op, mask=mask)
    plain = torch.autograd.grad(loss(*inputs), inputs)
    with sdpa_kernel(SDPBackend.MATH):  # torch's kernels for softmax attention have none.
        first = torch.autograd.grad(loss(*inputs), inputs, create_graph=True)
    assert_close(first, plain)
    along = [torch.randn_like(x) for x in inputs]
    second = torch.autograd.grad(first, inputs, along)

    def gradient_at(step):
        moved = [
            (x.detach() + step * d).requires_grad_() for x, d in zip(inputs, along, strict=True)
        ]
        return torch.autograd.grad(loss(*moved), moved)

    step = 1e-5
    ahead, behind = gradient_at(step), gradient_at(-step)
    expected = tuple((a - b) / (2 * step) for a, b in zip(ahead, behind, strict=True))
    assert_close(second, expected, rtol=1e-5, atol=1e-6)


@every_op
@lengths_of_both_kinds
def test_transforms_of_torch_func_give_the_same(op, length):
    inputs = op.make(length)
    loss = scalar(op)
    places = tuple(range(len(inputs)))
    _, expected = gradients(lambda xs: (loss(*xs),), inputs)
    assert_close(grad(loss, argnums=places)(*inputs), expected)
    assert_close(vjp(loss, *inputs)[1](torch.ones((), dtype=torch.double)), expected)
    rows = jacrev(lambda *xs: op(xs)[0].flatten()[:3], argnums=places)(*inputs)
    for i in range(3):
        _, row = gradients(lambda xs, i=i: (op(xs)[0].flatten()[i],), inputs)
        assert_close(tuple(x[i] for x in rows), row)

    shared = {"weight", "bias"}
    axes = tuple(None if name in shared else 0 for name in op.inputs.split())
    alone = vmap(
        grad(
            lambda *xs: loss(*(x if a is None else x[None] for x, a in zip(xs, axes, strict=True))),
            argnums=places,
        ),
        in_dims=axes,
    )(*inputs)
    for i in range(BATCH):
        mine = [x if a is None else x[i : i + 1] for x, a in zip(inputs, axes, strict=True)]
        _, expected = gradients(lambda xs: (loss(*xs),), mine)
        mine = tuple(
            x[i : i + 1] if a is not None else x[i] for x, a in zip(alone, axes, strict=True)
        )
        assert_close(mine, expected)


@every_op
@lengths_of_both_kinds
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own use of it.
def test_forward_mode_gives_the_same(op, length):
    inputs = op.make(length, batch=1)
    loss, along = scalar(op), [torch.randn_like(x) for x in inputs]
    _, grads = gradients(lambda xs: (loss(*xs),), inputs)
    expected = sum((g * d).sum() for g, d in zip(grads, along, strict=True))
    assert_close(jvp(loss, tuple(inputs), tuple(along))[1], expected)
    with forward_ad.dual_level():
        dual = [forward_ad.make_dual(x, d) for x, d in zip(inputs, along, strict=True)]
        assert_close(forward_ad.unpack_dual(loss(*dual)).tangent, expected)


# Extremes

MAGNITUDES = [0.0, 1e-18, 1e-9, 1e-3, 1.0, 1e3, 1e9, 1e15]
GATES = [0.0, 1e-18, 1e-3, 1.0, 30.0, 100.0]
# From 0 to 1 by what they mean; and sums of the past, which must fit each other.
UNSCALED = ("p", "s", "x", "y", "beta", "turn", "mass", "kv", "k_sum")
extremes = st.fixed_dictionaries(
    {
        name: st.sampled_from(GATES if name.startswith("shut") else MAGNITUDES)
        for name in SHAPES
        if name not in UNSCALED
    }
)


@every_op
@settings(max_examples=12)
@given(
    length=st.sampled_from([1, 2, 17, 67]),
    magnitude=extremes,
    constant=st.booleans(),
    layout=st.sampled_from(LAYOUTS),
    masked=st.booleans(),
    seed=st.integers(0, 99),
)
def test_finite_inputs_of_any_strides_have_finite_gradients(
    op, length, magnitude, constant, layout, masked, seed
):
    inputs = []
    for name, x in zip(
        op.inputs.split(), op.make(length, dtype=torch.float32, seed=seed), strict=True
    ):
        x = torch.ones_like(x) if constant else x
        x = x * min(magnitude.get(name, 1.0), op.largest)
        inputs.append(x if x.ndim < 2 else layout(x))
    mask = make_mask(op.length(inputs), BATCH) if masked else None
    out, grads = gradients(op, inputs, mask=mask)
    assert all(x.isfinite().all() for x in out)
    for name, x in zip(op.inputs.split(), grads, strict=True):
        assert x.isfinite().all(), name


@settings(max_examples=60)
@given(
    length=st.integers(1, 90),
    window=st.integers(1, 100),
    focus=st.sampled_from(MAGNITUDES),
    v=st.sampled_from(MAGNITUDES),
    layout=st.sampled_from(LAYOUTS),
    seed=st.integers(0, 99),
)
def test_windows_of_every_size_have_finite_gradients(length, window, focus, v, layout, seed):
    op = Op("focus v", additive(window))
    inputs = op.make(length, dtype=torch.float32, seed=seed)
    inputs = [layout(x * scale) for x, scale in zip(inputs, (focus, v), strict=True)]
    out, grads = gradients(op, inputs)
    assert all(x.isfinite().all() for x in (*out, *grads))
