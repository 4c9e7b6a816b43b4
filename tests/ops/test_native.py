"""Promises of the native backend: the numbers of the others, and what it says it cannot take."""

import runpy
import shutil
from itertools import product
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from leap.errors import InputError
from leap.ops import (
    FocusState,
    LinearState,
    WindowState,
    additive_attention,
    causal_linear_attention,
    linear_attention,
)
from leap.ops.backends import using
from leap.ops.linear import read_and_attend
from leap.ops.native import additive, causal, library, whole
from leap.ops.tolerance import TOLERANCES, relative_error

BUILD = Path(__file__).parents[2] / "src" / "native" / "build.py"

pytestmark = pytest.mark.skipif(
    library.missing() is not None, reason=f"no native library: {library.missing()}"
)


@pytest.fixture(params=["AVX-512", "AVX2", "NEON"])
def instructions(request):
    """Each instruction set that this processor has."""
    before = library.instructions()
    if not library.use_instructions(request.param):
        pytest.skip(f"no {request.param} here")
    yield
    assert library.use_instructions(before)


def heads_side_by_side(*shape):
    """Random numbers laid out as a projection leaves them."""
    b, h, t, width = shape
    return torch.randn(b, t, h, width).transpose(1, 2)


class Call:
    """One call of causal linear attention, its inputs in float32."""

    def __init__(self, length, widths, rank, gated, masked, from_state, **options):
        (f, e), b, h = widths, 2, 3
        q, k = (heads_side_by_side(b, h, length, f).abs() for _ in "qk")
        self.inputs = {"q": q, "k": k, "v": heads_side_by_side(b, h, length, e)}
        if rank:
            self.inputs |= {name: torch.rand(b, h, length, rank) for name in "xy"}
        if gated == "gates":
            self.inputs["gate"] = -0.3 * torch.rand(b, h, length)
        wide = f * max(rank, 1)
        if from_state:
            self.inputs |= {"kv": torch.rand(b, h, wide, e).double()}
            self.inputs |= {"k_sum": 3 * torch.rand(b, h, wide).double()}
        self.options = options | {"key_mask": torch.rand(b, length) < 0.7 if masked else None}
        if gated == "fade":
            self.options["fade"] = (-0.05, -0.5, 0.0)
        # Of the output and of the state after.
        self.upstream = (
            heads_side_by_side(b, h, length, e),
            0.01 * torch.randn(b, h, wide, e).double(),
            0.01 * torch.randn(b, h, wide).double(),
        )

    def run(self, backend, dtype=torch.float32):
        """The output and the sums of the state, and the gradients of all inputs, by name."""
        given = {
            name: x.detach().to(dtype if x.dtype == torch.float32 else x.dtype).requires_grad_()
            for name, x in self.inputs.items()
        }
        o, state = self.attend(backend, **given)
        outputs = (o, state.kv, state.k)
        upstream = [g.to(x.dtype) for g, x in zip(self.upstream, outputs, strict=True)]
        grads = torch.autograd.grad(outputs, list(given.values()), upstream)
        named = {f"d{name}": g for name, g in zip(given, grads, strict=True)}
        return {"o": o, "state.kv": state.kv, "state.k": state.k} | named

    def attend(self, backend, q, k, v, x=None, y=None, gate=None, kv=None, k_sum=None):
        state = None if kv is None else LinearState(kv, k_sum, length=torch.zeros(len(q)).long())
        weights = None if x is None else (x, y)
        return causal_linear_attention(
            q, k, v, state, reweighting=weights, log_gate=gate, backend=backend, **self.options
        )


def assert_within_tolerance(found, exact, dtype=torch.float32):
    for name, x in found.items():
        limit = TOLERANCES[dtype]
        allowed = limit.gradient if name.startswith("d") else limit.output
        assert relative_error(x, exact[name]) <= allowed, name


GATED = ["none", "gates", "fade"]
CASES = [
    (length, widths, rank, gated)
    for (length, widths), rank, gated in product(
        [(9, (8, 8)), (63, (5, 3)), (64, (16, 16)), (65, (24, 40)), (150, (64, 64))],
        [0, 2, 3],
        GATED,
    )
]


@pytest.mark.parametrize(("length", "widths", "rank", "gated"), CASES, ids=str)
def test_outputs_states_and_gradients_are_those_of_double_precision(
    length, widths, rank, gated, instructions
):
    for masked, from_state in product([False, True], repeat=2):
        call = Call(length, widths, rank, gated, masked, from_state)
        assert_within_tolerance(call.run("native"), call.run("torch", torch.double))


@pytest.mark.parametrize("gated", GATED)
def test_sums_that_are_not_divided_are_those_of_double_precision(gated, instructions):
    call = Call(70, (16, 8), 2, gated, False, True, normalise=False)
    assert_within_tolerance(call.run("native"), call.run("torch", torch.double))


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("feature", causal.MAPS)
def test_a_fused_feature_map_is_the_map_itself(feature, normalise, instructions):
    call = Call(70, (24, 8), 2, "gates", True, True, normalise=normalise, feature=feature)
    for name in "qk":
        call.inputs[name] = torch.randn_like(call.inputs[name])
    call.inputs["q"][:, :, :9] = call.inputs["q"][:, :, :9].round()  # Several are the largest.
    assert_within_tolerance(call.run("native"), call.run("torch", torch.double))


@pytest.mark.parametrize(("rank", "gated"), [(0, "none"), (2, "none"), (3, "gates")])
def test_long_texts_keep_within_the_tolerance(rank, gated):
    """Past 8,192 tokens, where the sums of the past are brought to double precision."""
    call = Call(9000, (8, 8), rank, gated, False, False)
    assert_within_tolerance(call.run("native"), call.run("torch", torch.double))


def test_bfloat16_is_summed_in_float32():
    call = Call(200, (16, 16), 2, "none", True, False)
    call.inputs = {n: x.bfloat16().to(x.dtype) if n in "qkv" else x for n, x in call.inputs.items()}
    exact = call.run("torch", torch.double)
    given = {n: x.bfloat16() if n in "qkv" else x for n, x in call.inputs.items()}
    given = {name: x.detach().requires_grad_() for name, x in given.items()}
    o, state = call.attend("native", **given)
    assert o.dtype == torch.bfloat16 and state.kv.dtype == torch.float64
    upstream = [call.upstream[0].bfloat16(), *call.upstream[1:]]
    grads = torch.autograd.grad((o, state.kv, state.k), list(given.values()), upstream)
    found = {"o": o} | {f"d{name}": g for name, g in zip(given, grads, strict=True)}
    assert_within_tolerance(found, exact, torch.bfloat16)


def test_it_is_what_answers_where_nothing_is_named():
    q, k, v = torch.rand(3, 1, 2, 70, 8).unbind(0)
    with using(None):
        assert torch.equal(
            causal_linear_attention(q, k, v)[0],
            causal_linear_attention(q, k, v, backend="native")[0],
        )


def test_what_it_cannot_take_goes_to_torch_unless_it_was_named():
    q, k, v = torch.rand(3, 1, 2, 70, 8, dtype=torch.double).unbind(0)
    with pytest.raises(InputError, match=r"'native' cannot answer this call: .* float64"):
        causal_linear_attention(q, k, v, backend="native")
    with pytest.raises(InputError, match="not per feature"):
        gate = -torch.rand(1, 2, 70, 8)
        causal_linear_attention(*(x.float() for x in (q, k, v)), log_gate=gate, backend="native")
    expected, _ = causal_linear_attention(q, k, v, backend="torch")
    assert torch.equal(causal_linear_attention(q, k, v)[0], expected)


def test_pads_may_hold_anything():
    call = Call(70, (8, 8), 2, "gates", True, False)
    expected = call.run("native")
    pads = ~call.options["key_mask"][:, None, :, None]
    for name in ("k", "v", "y"):
        call.inputs[name] = call.inputs[name].masked_fill(pads, torch.nan)
    assert_close(call.run("native"), expected, rtol=0, atol=0)


@pytest.mark.parametrize("gated", GATED)
@pytest.mark.parametrize("rank", [0, 2, 3])
def test_a_step_of_one_token_is_that_of_double_precision(rank, gated, instructions):
    for masked, from_state, normalise in product([False, True], repeat=3):
        call = Call(1, (8, 24), rank, gated, masked, from_state, normalise=normalise)
        with torch.no_grad():
            found = call.attend("native", **call.inputs)
            given = {name: x.double() for name, x in call.inputs.items()}
            o, state = call.attend("torch", **given)
        assert relative_error(found[0], o) <= TOLERANCES[torch.float32].output
        exact = state.tensors()
        for name, x in found[1].tensors().items():
            assert relative_error(x, exact[name]) <= TOLERANCES[torch.float32].output, name
        if from_state:  # Else there are no gradients but those of rounding.
            assert_within_tolerance(call.run("native"), call.run("torch", torch.double))


class WholeCall:
    """One call of linear attention to a whole sequence, its inputs in float32."""

    def __init__(self, lengths, widths, rank, masked, **options):
        (t, n), (f, e), b, h = lengths, widths, 2, 3
        self.inputs = {
            "q": heads_side_by_side(b, h, t, f).abs(),
            "k": heads_side_by_side(b, h, n, f).abs(),
            "v": heads_side_by_side(b, h, n, e),
        }
        if rank:
            self.inputs |= {"x": torch.rand(b, h, t, rank), "y": torch.rand(b, h, n, rank)}
        self.options = options | {"key_mask": torch.rand(b, n) < 0.7 if masked else None}
        wide = f * max(rank, 1)
        self.upstream = (
            heads_side_by_side(b, h, t, e),
            0.01 * torch.randn(b, h, wide, e).double(),
            0.01 * torch.randn(b, h, wide).double(),
        )

    def run(self, backend, dtype=torch.float32):
        """The output and the sums of the state, and the gradients of all inputs, by name."""
        given = {name: x.detach().to(dtype).requires_grad_() for name, x in self.inputs.items()}
        outputs = self.attend(backend, **given)
        upstream = [g.to(x.dtype) for g, x in zip(self.upstream, outputs, strict=True)]
        grads = torch.autograd.grad(outputs, list(given.values()), upstream)
        named = {f"d{name}": g for name, g in zip(given, grads, strict=True)}
        return dict(zip(("o", "state.kv", "state.k"), outputs, strict=True)) | named

    def attend(self, backend, q, k, v, x=None, y=None):
        weights = None if x is None else (x, y)
        o, state = read_and_attend(q, k, v, reweighting=weights, backend=backend, **self.options)
        return o, state.kv, state.k


@pytest.mark.parametrize("rank", [0, 1, 2, 3, 4])
@pytest.mark.parametrize(
    ("lengths", "widths"),
    [
        ((1, 9), (8, 8)),
        ((9, 63), (5, 3)),
        ((65, 7), (16, 16)),
        ((64, 130), (24, 40)),
        ((150, 150), (64, 64)),
    ],
    ids=str,
)
def test_attention_to_a_whole_sequence_is_that_of_double_precision(
    lengths, widths, rank, instructions
):
    for masked, normalise in product([False, True], repeat=2):
        if rank == 1 and normalise:
            continue  # x cancels, and its gradient is that of rounding.
        call = WholeCall(lengths, widths, rank, masked, normalise=normalise)
        assert_within_tolerance(call.run("native"), call.run("torch", torch.double))


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("feature", whole.MAPS)
def test_a_map_fused_with_attention_to_a_whole_sequence_is_the_map_itself(
    feature, normalise, instructions
):
    call = WholeCall((70, 40), (24, 8), 2, True, normalise=normalise, feature=feature)
    for name in "qk":
        call.inputs[name] = torch.randn_like(call.inputs[name])
    call.inputs["q"][:, :, :9] = call.inputs["q"][:, :, :9].round()  # Several are the largest.
    assert_within_tolerance(call.run("native"), call.run("torch", torch.double))


def test_whole_sequences_that_are_long_keep_within_the_tolerance():
    """Past 8,192 keys, where their sums are brought to double precision."""
    call = WholeCall((100, 20000), (8, 8), 2, True)
    assert_within_tolerance(call.run("native"), call.run("torch", torch.double))


def test_whole_sequences_of_bfloat16_are_summed_in_float32():
    call = WholeCall((200, 150), (16, 24), 2, True)
    call.inputs = {n: x.bfloat16().to(x.dtype) if n in "qkv" else x for n, x in call.inputs.items()}
    exact = call.run("torch", torch.double)
    given = {n: x.bfloat16() if n in "qkv" else x for n, x in call.inputs.items()}
    given = {name: x.detach().requires_grad_() for name, x in given.items()}
    outputs = call.attend("native", **given)
    assert [x.dtype for x in outputs] == [torch.bfloat16, torch.float64, torch.float64]
    upstream = [g.to(x.dtype) for g, x in zip(call.upstream, outputs, strict=True)]
    grads = torch.autograd.grad(outputs, list(given.values()), upstream)
    found = {"o": outputs[0]} | {f"d{name}": g for name, g in zip(given, grads, strict=True)}
    assert_within_tolerance(found, exact, torch.bfloat16)


@pytest.mark.parametrize("lengths", [(0, 5), (5, 0)], ids=str)
def test_no_query_and_no_key_are_fine(lengths):
    call = WholeCall(lengths, (8, 8), 2, False)
    found, exact = call.run("native"), call.run("torch", torch.double)
    for name, x in exact.items():
        assert_close(found[name].float(), x.float())


def test_pads_of_a_whole_sequence_may_hold_anything():
    call = WholeCall((30, 70), (8, 8), 2, True, feature="exp")
    expected = call.run("native")
    pads = ~call.options["key_mask"][:, None, :, None]
    for name in ("k", "v", "y"):
        call.inputs[name] = call.inputs[name].masked_fill(pads, torch.nan)
    assert_close(call.run("native"), expected, rtol=0, atol=0)


@pytest.mark.parametrize("outermost", [1, 2, 3])
def test_a_whole_sequence_of_any_strides_gives_the_same_bits(outermost):
    call = WholeCall((70, 90), (8, 16), 2, True)
    expected = call.run("native")
    for name, x in call.inputs.items():
        call.inputs[name] = x.movedim(outermost, 0).contiguous().movedim(0, outermost)
    call.upstream = (call.upstream[0].mT.contiguous().mT, *call.upstream[1:])
    found = call.run("native")
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_whole_sequence_gives_the_same_bits_on_any_number_of_threads(monkeypatch):
    call = WholeCall((70, 90), (16, 16), 2, True)
    expected = call.run("native")
    monkeypatch.setattr(library, "n_threads", lambda work, rows: min(4, rows))
    found = call.run("native")
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_second_derivatives_of_attention_to_a_whole_sequence_are_there():
    call = WholeCall((10, 12), (8, 8), 2, True, feature="elu_plus_one")
    given = {name: x.requires_grad_() for name, x in call.inputs.items()}
    results = []
    for backend in ("torch", "native"):
        o, *_ = call.attend(backend, **given)
        first = torch.autograd.grad(o.square().sum(), list(given.values()), create_graph=True)
        total = sum(g.square().sum() for g in first)
        results.append(torch.autograd.grad(total, list(given.values())))
    for found, expected in zip(*results, strict=True):
        assert relative_error(found, expected) < 1e-3


def test_the_compiler_finds_nothing_wrong_with_attention_to_a_whole_sequence(shapes_unchecked):
    call = WholeCall((20, 30), (8, 8), 2, True)
    given = [x.requires_grad_() for x in call.inputs.values()]
    torch.library.opcheck(whole.attend_op, (*given, call.options["key_mask"], "relu", True, 1e-6))


def test_what_it_cannot_take_of_a_whole_sequence_goes_to_torch_unless_it_was_named():
    q, k, v = torch.rand(3, 1, 2, 70, 8, dtype=torch.double).unbind(0)
    with pytest.raises(InputError, match=r"'native' cannot answer this call: .* float64"):
        linear_attention(q, k, v, backend="native")
    assert torch.equal(linear_attention(q, k, v), linear_attention(q, k, v, backend="torch"))


class AdditiveCall:
    """One call of additive attention, its inputs in float32."""

    def __init__(self, length, values, window, masked, from_state):
        b, h = 2, 3
        self.inputs = [3 * torch.randn(b, h, length), heads_side_by_side(b, h, length, values)]
        self.window, self.mask = window, torch.rand(b, length) < 0.6 if masked else None
        if from_state and window is None:
            self.inputs += [1 + torch.rand(b, h).double(), torch.randn(b, h, values).double()]
        elif from_state:
            self.inputs += [torch.randn(b, h, window - 1), torch.randn(b, h, window - 1, values)]
        self.upstream = torch.randn(b, h, length, values)

    def state(self, first, second):
        b, h = first.shape[:2]
        if self.window is None:
            peak = torch.ones(b, h, dtype=torch.double)
            return FocusState(peak, first, second, length=torch.full((b,), 4))
        return WindowState(first, second, length=torch.full((b,), self.window - 1))

    def run(self, backend, dtype=torch.float32):
        """The output, the mean of a total, and the gradients of all inputs, by name."""
        given = [
            x.detach().to(dtype if x.dtype == torch.float32 else x.dtype).requires_grad_()
            for x in self.inputs
        ]
        focus, v, *past = given
        state = self.state(*past) if past else None
        options = {"window": self.window, "key_mask": self.mask, "backend": backend}
        o, after = additive_attention(focus, v, state, **options)
        outputs = {"o": o} | ({} if self.window else {"mean": after.mean()})
        upstream = [self.upstream.to(dtype), *(torch.ones_like(x) for x in [*outputs.values()][1:])]
        grads = torch.autograd.grad([*outputs.values()], given, upstream, materialize_grads=True)
        return outputs | {f"d{i}": g for i, g in enumerate(grads) if g.numel()}


@pytest.mark.parametrize("window", [None, 1, 2, 16, 69, 500])
@pytest.mark.parametrize(("length", "values"), [(9, 5), (70, 16)])
def test_additive_attention_is_that_of_double_precision(length, values, window, instructions):
    for masked, from_state in product([False, True], repeat=2):
        call = AdditiveCall(length, values, window, masked, from_state)
        assert_within_tolerance(call.run("native"), call.run("torch", torch.double))


@pytest.mark.parametrize("window", [None, 2000])
def test_additive_attention_over_long_texts_keeps_within_the_tolerance(window):
    call = AdditiveCall(9000, 4, window, False, False)
    assert_within_tolerance(call.run("native"), call.run("torch", torch.double))


@pytest.mark.parametrize("window", [None, 7])
def test_the_compiler_finds_nothing_wrong_with_additive_attention(window, shapes_unchecked):
    call = AdditiveCall(20, 8, window, True, False)
    focus, v = (x.requires_grad_() for x in call.inputs)
    past = [torch.rand(2, 3, 6, requires_grad=True), torch.rand(2, 3, 6, 8, requires_grad=True)]
    for given in ((None, None, None), (*past, torch.ones(2, 3, 6))):
        torch.library.opcheck(additive.attend_op, (focus, v, call.mask, *given, window))


@pytest.mark.parametrize("outermost", [1, 2, 3])
def test_any_strides_give_the_same_bits(outermost):
    call = Call(70, (8, 8), 2, "gates", True, False)
    expected = call.run("native")
    for name, x in call.inputs.items():
        if x.ndim > outermost:
            call.inputs[name] = x.movedim(outermost, 0).contiguous().movedim(0, outermost)
    call.upstream = (call.upstream[0].mT.contiguous().mT, *call.upstream[1:])
    found = call.run("native")
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("threads", [2, 5])
def test_any_number_of_threads_gives_the_same_bits(threads, monkeypatch):
    call = Call(70, (16, 16), 2, "gates", True, True)
    expected = call.run("native")
    monkeypatch.setattr(library, "n_threads", lambda work, rows: min(threads, rows))
    found = call.run("native")
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("gated", GATED)
def test_second_derivatives_are_there(gated):
    call = Call(10, (8, 8), 2, gated, True, True)
    given = {name: x.requires_grad_() for name, x in call.inputs.items()}
    for backend in ("torch", "native"):
        o, _ = call.attend(backend, **given)
        first = torch.autograd.grad(o.square().sum(), list(given.values()), create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), list(given.values()))
        if backend == "torch":
            expected = second
    for found, each in zip(second, expected, strict=True):
        assert relative_error(found, each) < 1e-3


@pytest.mark.parametrize("gated", GATED)
def test_the_compiler_finds_nothing_wrong_with_the_op(gated, shapes_unchecked):
    call = Call(70, (8, 8), 2, gated, True, True)
    given = {name: x.requires_grad_() for name, x in call.inputs.items()}
    q, k, v, x, y, kv, k_sum = (given[name] for name in ["q", "k", "v", "x", "y", "kv", "k_sum"])
    fade = call.options.get("fade")
    rate, mask = None if fade is None else list(fade), call.options["key_mask"]
    arguments = q, k, v, x, y, given.get("gate"), mask, rate, kv, k_sum, "relu", True, 1e-6
    torch.library.opcheck(causal.attend_op, arguments)


def test_who_follows_the_ops_of_torch_sees_one_for_a_call():
    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            seen.append(str(op))
            return op(*args, **(kwargs or {}))

    seen: list[str] = []
    q, k, v = (torch.rand(1, 2, 70, 8, requires_grad=True) for _ in "qkv")
    expected = causal_linear_attention(q, k, v, backend="native")[0]
    with Record():
        followed = causal_linear_attention(q, k, v, backend="native")[0]
    assert seen.count("leap.native_causal_linear_attention.default") == 1
    assert torch.equal(followed, expected)
    upstream = torch.randn_like(expected)
    for one, other in zip(
        *(torch.autograd.grad(o, (q, k, v), upstream) for o in (followed, expected)), strict=True
    ):
        assert torch.equal(one, other)


def test_compiled_gives_the_same_bits(shapes_unchecked):
    q, k, v = (torch.rand(2, 3, 70, 8, requires_grad=True) for _ in "qkv")
    mask = torch.rand(2, 70) < 0.7

    def attend(q, k, v):
        first, state = causal_linear_attention(q, k, v, key_mask=mask, feature="relu")
        second, state = causal_linear_attention(q, k, v, state)
        return first + second + additive_attention(q[..., 0], v, window=5)[0], state.kv

    results = []
    for each in (attend, torch.compile(attend, fullgraph=True, backend="aot_eager")):
        o, kv = each(q, k, v)
        results.append([o, kv, *torch.autograd.grad(o.sum(), (q, k, v))])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_without_a_compiler_it_says_so(tmp_path, monkeypatch):
    built = runpy.run_path(str(BUILD))
    monkeypatch.setenv("CXX", "no-such-compiler")
    reason = built["build"](tmp_path)
    assert "no C++ compiler" in reason
    assert (tmp_path / "not-built.txt").read_text() == reason + "\n"
    assert not (tmp_path / "libleap.so").exists()


def test_a_library_of_other_sources_is_not_used(tmp_path, monkeypatch):
    shutil.copy(Path(library.__file__).parent / library.LIBRARY, tmp_path)
    assert library.load(tmp_path)[1] is None
    monkeypatch.setattr(library, "INTERFACE", 0)
    assert library.load(tmp_path) == (
        None,
        "it was built from other sources; python src/native/build.py builds it anew",
    )


@pytest.mark.skipif(shutil.which("false") is None, reason="needs a program that fails")
def test_a_compiler_that_fails_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "false")
    assert "the compiler false failed" in runpy.run_path(str(BUILD))["build"](tmp_path)


def test_packed_rows_with_gates_may_be_asked_of_it_by_name():
    q, k, v = (torch.rand(1, 2, 10, 16) for _ in "qkv")
    given = {"cu_seqlens": torch.tensor([0, 4, 10]), "log_gate": -torch.rand(1, 2, 10)}
    actual, _ = causal_linear_attention(q, k, v, **given, backend="native")
    expected, _ = causal_linear_attention(q, k, v, **given, backend="torch")
    assert_close(actual, expected)
