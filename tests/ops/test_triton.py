"""Promises of the Triton backend: the numbers of the others, on any device, and what it refuses."""

import json
import mmap
import os
import subprocess
import sys
from dataclasses import replace
from unittest.mock import Mock, patch

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch.testing import assert_close

from leap.cli import backends
from leap.errors import InputError
from leap.ops import LinearState, additive_attention, causal_linear_attention
from leap.ops.backends import BACKENDS, using
from leap.ops.features import feature_map
from leap.ops.linear import read_and_attend
from leap.ops.tolerance import TOLERANCES, relative_error
from leap.ops.triton import additive, causal, compile, packed_additive, step, whole
from leap.ops.triton.compile import TARGETS, Compiled
from leap.ops.triton.device import Blocks, interpreted

KERNELS = {
    *("decays", "chunk_states", "scan", "outputs", "divide"),
    *("query_gradients", "key_gradients", "value_gradients"),
    *("gate_gradients", "feature_gate_gradients"),
    *("totals", "before", "sums", "step"),
}
DOUBLE = torch.double
PLACE = "cpu" if interpreted() else "cuda"
STRETCH = 1 if interpreted() else 4  # As chunks are longer on a GPU.


def heads_side_by_side(*shape):
    """Random numbers laid out as a projection leaves them."""
    b, h, t, width = shape
    return torch.randn(b, t, h, width).to(PLACE).transpose(1, 2)


class Call:
    """One call of causal linear attention, of inputs that every dtype holds."""

    def __init__(
        self,
        length,
        *,
        widths=(5, 3),
        batch=1,
        rank=0,
        gated="none",
        masked=False,
        state=False,
        packed=None,
        **options,
    ):
        (f, e), (b, h) = widths, (batch, 2)
        if length > 1:
            length *= STRETCH
            packed = None if packed is None else [n * STRETCH for n in packed]
        q, k = (heads_side_by_side(b, h, length, f).abs() for _ in "qk")
        self.inputs = {"q": q, "k": k, "v": heads_side_by_side(b, h, length, e)}
        self.inputs = {name: x.bfloat16().half().float() for name, x in self.inputs.items()}
        if rank:
            self.inputs |= {name: torch.rand(b, h, length, rank) for name in "xy"}
        if gated == "gates":
            self.inputs["gate"] = -0.3 * torch.rand(b, h, length)
        if gated == "features":  # Some forget at once.
            self.inputs["gate"] = -30 * torch.rand(b, h, length, f) ** 8
        wide, n = f * max(rank, 1), b if packed is None else len(packed) - 1
        if state:
            self.inputs |= {"kv": torch.rand(n, h, wide, e).double()}
            self.inputs |= {"k_sum": 3 * torch.rand(n, h, wide).double()}
        self.options = options | {
            "key_mask": torch.rand(b, length).to(PLACE) < 0.7 if masked else None,
            "cu_seqlens": None if packed is None else torch.tensor(packed, device=PLACE),
        }
        if gated == "fade":
            self.options["fade"] = (-0.05, -0.5)
        self.inputs = {name: x.to(PLACE) for name, x in self.inputs.items()}
        self.upstream = (
            torch.randn(b, h, length, e),
            0.01 * torch.randn(n, h, wide, e),
            0.01 * torch.randn(n, h, wide),
        )

    def run(self, backend, dtype):
        """The output and the sums of the state, and the gradients of all inputs, by name."""
        total = torch.promote_types(dtype, torch.float32)
        given = {
            name: x.detach().to(dtype if name in "qkv" else total if name in "xygate" else DOUBLE)
            for name, x in self.inputs.items()
        }
        given = {name: x.requires_grad_() for name, x in given.items()}
        o, state = self.attend(backend, **given)
        outputs = (o, state.kv, state.k)
        assert [x.dtype for x in outputs] == [dtype, DOUBLE, DOUBLE]
        upstream = [g.to(x) for g, x in zip(self.upstream, outputs, strict=True)]
        grads = torch.autograd.grad(outputs, list(given.values()), upstream)
        named = {f"d{name}": g for name, g in zip(given, grads, strict=True)}
        found = {"o": o, "state.kv": state.kv, "state.k": state.k} | named
        if state.log_decay is not None:
            found["state.log_decay"] = state.log_decay
        return found | {"state.length": state.length.double()}

    def attend(self, backend, q, k, v, x=None, y=None, gate=None, kv=None, k_sum=None):
        state = (
            None
            if kv is None
            else LinearState(kv, k_sum, length=torch.zeros(len(kv), dtype=torch.long, device=PLACE))
        )
        weights = None if x is None else (x, y)
        return causal_linear_attention(
            q, k, v, state, reweighting=weights, log_gate=gate, backend=backend, **self.options
        )


def assert_within_tolerance(found, exact, dtype):
    limit = TOLERANCES[dtype]
    for name, x in found.items():
        allowed = limit.gradient if name.startswith("d") else limit.output
        assert relative_error(x, exact[name]) <= allowed, name


CALLS = {
    "a token more than a block": {"length": 17},
    "a token less than a chunk": {"length": 31, "rank": 3, "masked": True, "gated": "fade"},
    "a chunk": {"length": 32, "rank": 1, "state": True, "normalise": False},
    "three chunks": {"length": 65, "rank": 2, "gated": "gates", "masked": True, "state": True},
    "several blocks of features and of values": {
        "length": 18,
        "widths": (66, 65),
        "rank": 2,
        "gated": "gates",
        "state": True,
    },
    "a floor that holds": {"length": 20, "rank": 2, "eps": 4.0},
    "gates per feature": {
        "length": 33,
        "rank": 2,
        "gated": "features",
        "masked": True,
        "state": True,
    },
    "several blocks of gated features": {"length": 17, "widths": (34, 3), "gated": "features"},
    "packed": {
        "length": 40,
        "packed": [0, 1, 1, 35, 40],
        "rank": 2,
        "gated": "gates",
        "masked": True,
        "state": True,
    },
    "packed, fading": {"length": 20, "packed": [0, 17, 20], "gated": "fade"},
    "packed, gates per feature": {
        "length": 20,
        "packed": [0, 18, 20],
        "gated": "features",
        "state": True,
    },
}


@pytest.mark.parametrize("call", CALLS)
def test_outputs_states_and_gradients_are_those_of_torch(call, interpreter):
    call = Call(**CALLS[call])
    assert_within_tolerance(call.run("triton", DOUBLE), call.run("torch", DOUBLE), DOUBLE)


@pytest.mark.parametrize("packed", [None, [0, 3, 40]], ids=["whole", "packed"])
def test_gradients_may_take_smaller_blocks_than_outputs(packed, interpreter, monkeypatch):
    """As they do on a GPU, where they would not fit the registers."""
    blocks = replace(Blocks.of([torch.empty(0, dtype=DOUBLE)], 5, 3), tokens=32, gradient_tokens=16)
    monkeypatch.setattr(Blocks, "of", lambda *args, **options: blocks)
    call = Call(40, rank=2, gated="gates", packed=packed)
    assert_within_tolerance(call.run("triton", DOUBLE), call.run("torch", DOUBLE), DOUBLE)


@pytest.mark.parametrize("gated", ["gates", "features"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_low_precision_keeps_within_the_published_tolerance(dtype, gated, interpreter):
    call = Call(40, widths=(16, 16), rank=2, gated=gated, masked=True, state=True)
    exact = call.run("torch", DOUBLE)
    assert_within_tolerance(call.run("triton", dtype), exact, dtype)


@pytest.mark.parametrize("feature", causal.MAPS)
def test_a_fused_feature_map_is_the_map_itself(feature, interpreter):
    call = Call(20, masked=True, feature=feature)
    for name in "qk":
        call.inputs[name] = torch.randn_like(call.inputs[name]).mul(2).round()  # Some are 0.
    assert_within_tolerance(call.run("triton", DOUBLE), call.run("torch", DOUBLE), DOUBLE)


def test_a_map_that_is_not_fused_is_applied_before(interpreter):
    q, k, v = (heads_side_by_side(1, 2, 20, 4).double() for _ in "qkv")
    phi = feature_map("square")
    expected, _ = causal_linear_attention(phi.query(q), phi.key(k), v, backend="torch")
    actual, _ = causal_linear_attention(q, k, v, feature="square", backend="triton")
    assert_close(actual, expected)


def test_what_stands_at_pads_does_not_matter(interpreter):
    call = Call(20, rank=2, masked=True)
    found = call.run("triton", DOUBLE)
    pads = ~call.options["key_mask"][0]
    for name in "kvy":
        call.inputs[name][:, :, pads] = torch.nan
    again = call.run("triton", DOUBLE)
    assert_close(again, found, rtol=0, atol=0)
    for name in ("dk", "dv", "dy"):
        assert not again[name][:, :, pads].any()


def test_large_denominators_do_not_spoil_half_precision_gradients(interpreter):
    """They are some 60,000 here: their square, in float16, would be infinite."""
    q, k, v = (heads_side_by_side(1, 2, 64, 16).abs().half() * 8 for _ in "qkv")
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    o, _ = causal_linear_attention(*inputs, backend="triton")
    upstream = torch.randn_like(o)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    expected, _ = causal_linear_attention(*exact, backend="torch")
    assert (q.double() @ k.double().mT).tril().sum(-1).max() > 60_000
    assert relative_error(o, expected) <= TOLERANCES[torch.float16].output
    for found, grad in zip(
        torch.autograd.grad(o, inputs, upstream),
        torch.autograd.grad(expected, exact, upstream.double()),
        strict=True,
    ):
        assert relative_error(found, grad) <= TOLERANCES[torch.float16].gradient


def test_offsets_may_be_beyond_32_bits(interpreter):
    """Three rows, 2 ** 30 numbers from one to the next, in memory of which little is touched."""
    if not interpreted():
        pytest.skip("a GPU has no memory that is only promised")
    apart = 2**30
    memory = mmap.mmap(-1, 2 * (2 * apart + 4096), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    far = torch.frombuffer(memory, dtype=torch.float16).as_strided((3, 1, 20, 4), (apart, 80, 4, 1))
    near = torch.rand(3, 1, 20, 4).half()
    far.copy_(near)
    for n in (20, 1):
        expected, _ = causal_linear_attention(*[near[:, :, :n]] * 3, backend="triton")
        actual, _ = causal_linear_attention(*[far[:, :, :n]] * 3, backend="triton")
        assert_close(actual, expected, rtol=0, atol=0)


@pytest.mark.parametrize("window", [None, 1, 20, 35, 90], ids=lambda n: f"window-{n}")
@pytest.mark.parametrize("dtype", [DOUBLE, torch.float16, torch.bfloat16], ids=str)
def test_additive_attention_is_that_of_torch(dtype, window, interpreter):
    """A state of 13 tokens, then 50 that are past it, some of them pads."""
    inputs = 3 * torch.randn(1, 2, 63), torch.randn(1, 2, 63, 3).bfloat16().half()
    mask, upstream = torch.rand(1, 63) < 0.8, torch.randn(1, 2, 50, 3, dtype=dtype).double()

    def run(backend, dtype):
        focus, v = inputs[0].to(torch.promote_types(dtype, torch.float32)), inputs[1].to(dtype)
        given = [x.to(PLACE).requires_grad_() for x in (focus, v)]
        state, outputs = None, []
        for span in (slice(13), slice(13, None)):
            o, state = additive_attention(
                *(x[:, :, span] for x in given),
                state,
                window=window,
                key_mask=mask[:, span].to(PLACE),
                backend=backend,
            )
            outputs.append(o)
        grads = torch.autograd.grad(outputs[1], given, upstream.to(outputs[1]))
        return {"o": torch.cat(outputs, 2), "dfocus": grads[0], "dv": grads[1]}

    assert_within_tolerance(run("triton", dtype), run("torch", DOUBLE), dtype)


@pytest.mark.parametrize("window", [None, 1, 20, 70], ids=lambda n: f"window-{n}")
@pytest.mark.parametrize("dtype", [DOUBLE, torch.bfloat16], ids=str)
def test_packed_additive_attention_is_that_of_torch(dtype, window, interpreter, monkeypatch):
    """From no state and then from one, with pads, a sequence of none and one of several blocks."""
    starts = torch.tensor([0, 1, 1, 51, 60], device=PLACE)
    inputs = 3 * torch.randn(1, 2, 60), torch.randn(1, 2, 60, 3).bfloat16().half()
    mask = (torch.rand(1, 60) < 0.8).to(PLACE)

    def run(backend, dtype):
        focus, v = inputs[0].to(torch.promote_types(dtype, torch.float32)), inputs[1].to(dtype)
        given = [x.to(PLACE).requires_grad_() for x in (focus, v)]
        state, outputs = None, []
        for key_mask in (mask, None):
            options = {"window": window, "key_mask": key_mask, "cu_seqlens": starts}
            o, state = additive_attention(*given, state, backend=backend, **options)
            outputs.append(o)
        named = {"o": outputs[0], "further": outputs[1]}
        named |= {f"state.{name}": x for name, x in state.tensors().items()}
        smooth = [x for x in named.values() if x.requires_grad]
        generator = torch.Generator().manual_seed(0)
        upstream = [torch.randn(x.shape, generator=generator).to(x) for x in smooth]
        grads = torch.autograd.grad(smooth, given, upstream)
        return named | {"dfocus": grads[0], "dv": grads[1]}

    exact = run("torch", DOUBLE)
    padded = Mock(side_effect=AssertionError("a padded batch was attended to"))
    monkeypatch.setattr("leap.ops.triton.additive.attend", padded)
    found = run("triton", dtype)
    for name in [name for name in exact if name.startswith("state.")]:
        limit = TOLERANCES[dtype].output
        assert_close(found.pop(name).double(), exact[name].double(), rtol=limit, atol=limit)
    assert_within_tolerance(found, exact, dtype)


@pytest.mark.parametrize("dtype", [DOUBLE, torch.float16], ids=str)
@pytest.mark.parametrize(("t", "n", "rank"), [(20, 35, 2), (40, 9, 0)])
def test_attention_to_a_whole_sequence_is_that_of_torch(t, n, rank, dtype, interpreter):
    """Of the state that is returned too, and through it."""
    inputs = [heads_side_by_side(1, 2, length, 5).abs().half() for length in (t, n)]
    inputs += [heads_side_by_side(1, 2, n, 3).half()]
    inputs += [torch.rand(1, 2, length, rank).to(PLACE) for length in (t, n) if rank]
    mask = torch.ones(1, n, dtype=torch.bool, device=PLACE)
    mask[:, 3:7] = False
    upstream = torch.randn(1, 2, t, 3).half()

    def run(backend, dtype):
        total = torch.promote_types(dtype, torch.float32)
        given = [x.to(dtype if i < 3 else total).requires_grad_() for i, x in enumerate(inputs)]
        o, state = read_and_attend(
            *given[:3],
            reweighting=tuple(given[3:]) or None,
            key_mask=mask,
            backend=backend,
        )
        outputs = o, state.kv, state.k
        grads = (upstream.to(o), *(0.01 * torch.ones_like(x) for x in outputs[1:]))
        named = zip("qkvxy", torch.autograd.grad(outputs, given, grads), strict=False)
        return {"o": o, "kv": state.kv, "k": state.k} | {f"d{name}": g for name, g in named}

    assert_within_tolerance(run("triton", dtype), run("torch", DOUBLE), dtype)


@pytest.mark.parametrize("dtype", [DOUBLE, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("normalise", "gated"), [(True, "gates"), (False, "features")])
def test_one_token_more_is_that_of_torch(normalise, gated, dtype, interpreter):
    options = {"rank": 3, "gated": gated, "state": True, "normalise": normalise}
    call = Call(1, widths=(40, 70), batch=3, **options)
    total = torch.promote_types(dtype, torch.float32)
    wanted = {"q": dtype, "k": dtype, "v": dtype, "x": total, "y": total, "gate": total}

    def run(backend, given):
        o, state = call.attend(backend, **given)
        return {"o": o} | {name: getattr(state, name) for name in ("kv", "k", "log_decay")}

    exact = run("torch", {name: x.double() for name, x in call.inputs.items()})
    found = run("triton", {name: x.to(wanted.get(name, DOUBLE)) for name, x in call.inputs.items()})
    assert_within_tolerance(found, exact, dtype)
    call.options["key_mask"] = torch.tensor([[False], [True], [False]], device=PLACE)
    given = {name: x.double() for name, x in call.inputs.items()}
    assert_close(run("triton", given)["o"], run("torch", given)["o"])


@pytest.mark.parametrize(
    "options", [{"rank": 2}, {"gated": "features", "packed": [0, 3, 3, 20]}, {"feature": "exp"}]
)
def test_second_derivatives_are_those_of_torch(options, interpreter):
    call = Call(20, **options)
    given = {name: x.double().requires_grad_() for name, x in call.inputs.items()}

    def twice(backend):
        o, _ = call.attend(backend, **given)
        grads = torch.autograd.grad(o.square().sum(), list(given.values()), create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in grads), list(given.values()))

    assert_close(twice("triton"), twice("torch"))


def test_second_derivatives_of_packed_additive_attention_are_those_of_torch(interpreter):
    given = [torch.randn(1, 2, 9), torch.randn(1, 2, 9, 3)]
    given = [x.double().to(PLACE).requires_grad_() for x in given]
    starts = torch.tensor([0, 4, 4, 9], device=PLACE)

    def twice(backend):
        o, state = additive_attention(*given, cu_seqlens=starts, backend=backend)
        some = o.square().sum() + state.sum.square().sum()
        grads = torch.autograd.grad(some, given, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in grads), given)

    assert_close(twice("triton"), twice("torch"))


@pytest.mark.parametrize(
    "kind",
    ["gates per head", "packed, gates per feature", "whole", "step", "additive", "packed additive"],
)
def test_the_compiler_finds_nothing_wrong_with_the_custom_ops(kind, interpreter, shapes_unchecked):
    t = 1 if kind == "step" else 18
    q, k, v = (heads_side_by_side(1, 1, t, 4).abs().requires_grad_() for _ in "qkv")
    x = torch.rand(1, 1, t, 2, device=PLACE, requires_grad=True)
    gate = torch.rand(1, 1, t, device=PLACE).neg().requires_grad_()
    gates = torch.rand(1, 1, t, 4, device=PLACE).neg().requires_grad_()
    starts = torch.tensor([0, 3, 18], device=PLACE)
    last = None, None, None, None, True, 1e-6
    kv = torch.rand(1, 1, 8, 4, dtype=DOUBLE, device=PLACE)
    one = [each.detach() for each in (q, k, v, x, x, gate)]
    h_t = gate.detach()[0].requires_grad_(), v.detach()[0].requires_grad_(), gate.detach()[0].neg()
    op, args = {
        "additive": (additive.attend, (gate, v, None, None, None, None, 5)),
        "packed additive": (packed_additive.attend_op, (*h_t, starts, 5)),
        "gates per head": (causal.attend_op, (q, k, v, x, x, gate, None, None, *last)),
        "packed, gates per feature": (
            causal.attend_op,
            (q, k, v, None, None, gates, None, starts, *last),
        ),
        "whole": (whole.attend, (q, k, v, x, x, None, True, 1e-6)),
        "step": (
            step.attend,
            (*one, None, kv, kv[..., 0].contiguous(), True, 1e-6),
        ),
    }[kind]
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(op, args, test_utils=checks)


@pytest.mark.parametrize("op", ["linear", "additive"])
def test_a_compiled_function_holds_one_op_forward_and_one_backward(
    op, interpreter, shapes_unchecked
):
    graphs = []

    def count(graph, inputs):
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return make_boxed_func(graph.forward)

    def attend(q, k, v, gate):
        if op == "additive":
            return additive_attention(gate.sum(-1), v, backend="triton")[0]
        return causal_linear_attention(q, k, v, log_gate=gate, backend="triton")[0]

    q, k, v = (heads_side_by_side(1, 2, 20, 4).abs().double().requires_grad_() for _ in "qkv")
    gate = -torch.rand(1, 2, 20, 4, device=PLACE).double()
    inputs = [v, gate.requires_grad_()] if op == "additive" else [q, k, v, gate.requires_grad_()]
    compiled = torch.compile(attend, fullgraph=True, backend=aot_autograd(fw_compiler=count))
    expected = attend(q, k, v, gate)
    actual = compiled(q, k, v, gate)
    assert_close(actual, expected)
    upstream = torch.randn_like(expected)
    assert_close(
        torch.autograd.grad(actual, inputs, upstream),
        torch.autograd.grad(expected, inputs, upstream),
    )
    ours = [[name for name in graph if name.startswith("leap.")] for graph in graphs]
    assert [len(names) for names in ours] == [1, 1] and "backward" in ours[1][0]


def test_an_exported_program_holds_one_op(interpreter, shapes_unchecked):
    class Attention(torch.nn.Module):
        def forward(self, q, k, v):
            return causal_linear_attention(q, k, v, feature="relu", backend="triton")[0]

    given = tuple(heads_side_by_side(1, 2, 20, 4).double() for _ in "qkv")
    program = torch.export.export(Attention(), given)
    ours = [str(n.target) for n in program.graph.nodes if str(n.target).startswith("leap.")]
    assert ours == ["leap.triton_causal_linear_attention.default"]
    assert_close(program.module()(*given), Attention()(*given))


def test_a_call_that_no_kernel_takes_says_why(interpreter, monkeypatch):
    q, k, v = (heads_side_by_side(1, 2, 20, 4) for _ in "qkv")
    with pytest.raises(InputError, match=r"no transforms of torch\.func"):
        torch.func.vjp(lambda q: causal_linear_attention(q, k, v, backend="triton")[0], q)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    q, k, v = (x.cpu() for x in (q, k, v))
    with pytest.raises(InputError, match=r"'triton' cannot answer.* TRITON_INTERPRET=1"):
        causal_linear_attention(q, k, v, backend="triton")


def test_nobody_is_given_the_interpreter_unasked(interpreter, monkeypatch):
    def fail(*args, **options):
        raise AssertionError("a kernel ran")

    monkeypatch.setattr(causal, "attend_op", fail)
    q, k, v = (heads_side_by_side(1, 2, 20, 4).double() for _ in "qkv")
    causal_linear_attention(q, k, v)
    with using("triton"), pytest.raises(AssertionError, match="a kernel ran"):
        causal_linear_attention(q, k, v)


def test_what_is_not_here_is_said(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    if not torch.cuda.is_available():
        assert "GPU" in BACKENDS["triton"].missing()
    monkeypatch.setattr("leap.ops.triton.device.find_spec", lambda name: None)
    assert "[triton]" in BACKENDS["triton"].missing()


def test_importing_leap_does_not_import_triton():
    code = "import sys, leap, leap.ops; assert 'triton' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


LENGTHS_COMPARED = """
import torch
from leap.ops.triton import additive, causal
from leap.ops.triton.device import noting

def keys(length, packed):
    q, k, v = (torch.empty(1, 2, length, 16, dtype=torch.bfloat16) for _ in "qkv")
    gate, x = torch.empty(1, 2, length), torch.empty(1, 2, length, 2)
    mask = torch.ones(1, length, dtype=torch.bool)
    starts = torch.tensor([0, length]) if packed else None
    given, last = (q, k, v, x, x, gate, mask, starts), (None, True, 1e-6)
    with noting("sm_90") as launches:
        o, den, _, _, scale, rest = causal.attend_op(*given, None, None, None, *last)
        state = None, None, None, None
        causal.attend_backward(o, *state, *given, o, den, scale, rest, None, *last)
        for window in (None, 5):
            additive.sum_up(gate[0], gate[0], v[0], gate[0], window, starts, backwards=False)
    found = set()
    for kernel, args, options, _ in launches:
        special = [p.name for p in kernel.params if not p.do_not_specialize]
        named = dict(zip(kernel.arg_names, args)) | options
        key = {
            name: (x == 1, x % 16 == 0) if type(x) is int else str(x)
            for name, x in named.items()
            if name in special and not isinstance(x, torch.Tensor)
        }
        found.add(f"{kernel.__name__} {key}")
    return frozenset(found)

for packed in (False, True):
    assert len({keys(length, packed) for length in (2, 129, 512, 2048)}) == 1
"""
"""Kernels are compiled for their constants, and for which integers are 1 or multiples of 16."""


def test_another_length_compiles_no_kernel_anew():
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-c", LENGTHS_COMPARED]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_kernel_compiles_for_every_gpu_and_fits_its_shared_memory(tmp_path):
    pytest.importorskip("triton")
    code = (
        "import json, sys; from dataclasses import asdict; from leap.ops.triton.compile import *; "
        "print(json.dumps([asdict(made) for made in compile_all(sys.argv[1:])]))"
    )
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    names = list(TARGETS)
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", code, *names[start::2]],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for start in range(2)  # One for each of two cores.
    ]
    found = []
    for run in runs:
        said, errors = run.communicate()
        assert run.returncode == 0, errors
        found += [Compiled(**made) for made in json.loads(said)]
    assert {made.target for made in found} == set(TARGETS)
    for target, place in TARGETS.items():
        names = {made.kernel for made in found if made.target == target}
        assert names == KERNELS
        assert max(made.shared for made in found if made.target == target) <= place.shared
    spilling = [made for made in found if made.spilled and made.kind != "gates per feature"]
    assert not {made.target for made in spilling} & {"sm_80", "sm_90"}


def test_estimates_are_bytes_over_bandwidth_or_operations_over_the_rate():
    place, tokens, state = TARGETS["sm_80"], 8 * 16 * 4096, 2 * 64 * 65
    assert compile._seconds("scan", {"CHUNK": 128}, "sm_80") == pytest.approx(
        (tokens * 4 * 4 + 2 * 4 * tokens / 128 * state) / place.bandwidth
    )  # It multiplies nothing.
    slow = replace(place, multiply_tf32=1e9)
    with patch.dict(TARGETS, sm_80=slow):
        found = compile._seconds("chunk_states", {"CHUNK": 128}, "sm_80")
    assert found == pytest.approx(2 * tokens * 2 * 2 * 64 * 64 / 1e9)


def test_the_command_tells_the_most_that_a_form_takes_and_calls_times_estimates(
    tmp_path, monkeypatch, capsys
):
    forms = [
        Compiled("scan", "backward", "sm_80", registers, 2048, 0, 5e-6) for registers in (40, 32)
    ]
    monkeypatch.setattr(compile, "compile_all", lambda targets: iter(forms))
    backends.compile_for(["sm_80"], str(tmp_path / "kernels.md"))
    said = capsys.readouterr().out
    assert "ESTIMATED us" in said and "None was measured" in said
    written = (tmp_path / "kernels.md").read_text()
    assert "| `scan`, backward | 40 / 2 / 0 / 5 |" in written and "ESTIMATED" in written


def test_the_command_names_the_gpus_that_it_knows():
    command = [sys.executable, "-m", "leap.cli", "backends", "--compile", "abacus"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "no GPU is called 'abacus'" in done.stderr
