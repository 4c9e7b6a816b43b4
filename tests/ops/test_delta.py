"""Promises of the gated delta rule."""

import math

import pytest
import torch
from torch.nn.functional import normalize
from torch.testing import assert_close

from leap.errors import InputError
from leap.ops import DeltaState, LinearState, causal_delta_attention, load_state
from leap.ops.delta import CHUNK_SIZE, causal_delta_attention_reference
from leap.ops.delta.chunked import attend_chunks
from leap.ops.tolerance import TOLERANCES, relative_error


def make_inputs(length, *, batch=2, heads=3, features=5, values=4, lowest=-1.0, seed=0):
    """q, k, v, beta and log_gate, in double precision."""
    options = {"dtype": torch.double, "generator": torch.Generator().manual_seed(seed)}
    q, k = (torch.randn(batch, heads, length, features, **options) for _ in "qk")
    v = torch.randn(batch, heads, length, values, **options)
    beta, gate = (torch.rand(batch, heads, length, **options) for _ in "bg")
    inputs = normalize(q, dim=-1), normalize(k, dim=-1), v, beta, lowest * gate
    return tuple(x.detach().requires_grad_() for x in inputs)


def attend(q, k, v, beta, log_gate, state=None, *, chunk_size=8, **options):
    return causal_delta_attention(
        q, k, v, beta, state, log_gate=log_gate, chunk_size=chunk_size, **options
    )


def define(q, k, v, beta, log_gate, **options):
    return causal_delta_attention_reference(q, k, v, beta, log_gate=log_gate, **options)


def cut(tensors, *span):
    return tuple(x[:, :, slice(*span)] for x in tensors)


def assert_same_with_gradients(actual, expected, inputs):
    """Tuples of tensors agree, and so do the gradients of what led to them."""
    assert_close(actual, expected)
    upstream = [torch.randn_like(x) for x in expected]
    assert_close(
        torch.autograd.grad(actual, inputs, upstream),
        torch.autograd.grad(expected, inputs, upstream),
    )


# The formula


@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 15, 16, 17, 50], ids=lambda n: f"{n}-tokens")
def test_agrees_with_the_definition(length):
    inputs = make_inputs(length)
    o, state = attend(*inputs)
    assert_same_with_gradients((o, state.s), define(*inputs), inputs)


@pytest.mark.parametrize("length", [1, CHUNK_SIZE - 1, CHUNK_SIZE, CHUNK_SIZE + 1, 100])
@pytest.mark.parametrize("gated", [False, True])
def test_agrees_with_the_definition_in_chunks_of_the_usual_size(length, gated):
    *inputs, gate = make_inputs(length)
    used = (*inputs, gate) if gated else tuple(inputs)
    log_gate = gate if gated else None
    o, state = attend(*inputs, log_gate, chunk_size=None)
    assert_same_with_gradients((o, state.s), define(*inputs, log_gate), used)


def test_a_key_s_value_is_replaced():
    _, k, v, _, _ = make_inputs(2, batch=1, heads=1)
    same = k[:, :, :1].expand(-1, -1, 2, -1)
    o, _ = causal_delta_attention(same, same, v, torch.ones(1, 1, 2).double())
    assert_close(o, v)


def test_a_gate_of_one_is_no_gate():
    *inputs, gate = make_inputs(20)
    gated, _ = attend(*inputs, torch.zeros_like(gate))
    assert_close(gated, attend(*inputs, None)[0], rtol=0, atol=0)


def test_without_writing_again_it_is_gated_linear_attention():
    """Keys at right angles recall nothing of each other, so nothing is overwritten."""
    q, _, v, beta, gate = make_inputs(5)
    k = torch.eye(5, dtype=torch.double).expand(2, 3, 5, 5)
    total = gate.cumsum(2)
    kept = (total.unsqueeze(3) - total.unsqueeze(2)).exp() * beta.unsqueeze(2)
    assert_close(attend(q, k, v, beta, gate)[0], ((q @ k.mT) * kept).tril() @ v)


def test_the_future_is_invisible():
    inputs = make_inputs(20)
    before, _ = attend(*inputs)
    edited = tuple(x.detach().clone() for x in inputs)
    for x in edited:
        x[:, :, 13:] *= 0.5
    after, _ = attend(*edited)
    assert torch.equal(before[:, :, :13], after[:, :, :13])
    assert not torch.equal(before[:, :, 13:], after[:, :, 13:])


# The state


@pytest.mark.parametrize("split", [0, 1, 8, 13, 19, 20])
def test_a_sequence_can_be_cut_anywhere(check_cut, split):
    check_cut(attend, make_inputs(20), split, "s")


@pytest.mark.parametrize("gated", [False, True])
def test_token_by_token_is_the_whole(gated):
    *inputs, gate = make_inputs(20)
    used = (*inputs, gate) if gated else tuple(inputs)
    whole, final = attend(*inputs, gate if gated else None)
    outputs, state = [], None
    for i in range(20):
        *token, g = cut((*inputs, gate), i, i + 1)
        o, state = attend(*token, g if gated else None, state)
        outputs.append(o)
    assert_same_with_gradients((torch.cat(outputs, dim=2), state.s), (whole, final.s), used)


def test_gradients_flow_in_and_out_of_the_state():
    inputs = make_inputs(9, features=2, values=2, heads=1)
    start = torch.rand(2, 1, 2, 2, dtype=torch.double, requires_grad=True)

    def run(*given):
        *tokens, s = given
        o, after = attend(*tokens, DeltaState(s=s, length=torch.zeros(2).long()), chunk_size=4)
        return o, after.s

    assert torch.autograd.gradcheck(run, (*inputs, start))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_state_is_of_fixed_size_and_full_precision(dtype):
    sizes = set()
    for length in (1, 5, 100):
        o, state = attend(*(x.to(dtype) for x in make_inputs(length)))
        assert o.dtype == dtype
        assert state.s.dtype == torch.promote_types(dtype, torch.float32)
        assert state.length.tolist() == [length, length]
        sizes.add(state.n_bytes)
    assert len(sizes) == 1


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("pads", [False, True])
@pytest.mark.parametrize("n", [0, 1, 4, 7])
def test_the_last_tokens_can_be_taken_back(check_rollback, n, gated, pads):
    state = attend(*make_inputs(10))[1].record(limit=7)
    *tokens, gate = make_inputs(7, seed=1)
    mask = torch.rand(2, 7) < 0.5 if pads else None

    def read(start, end, before):
        log_gate = gate[:, :, start:end] if gated else None
        key_mask = None if mask is None else mask[:, start:end]
        return attend(*cut(tokens, start, end), log_gate, before, key_mask=key_mask)[1]

    check_rollback(read, state, n)


def test_rejected_drafts_leave_no_drift():
    start = attend(*(x.float() for x in make_inputs(50)))[1]
    state, drafts = start.record(limit=3), [x.float() for x in make_inputs(300, seed=1)]
    for i in range(0, 300, 3):
        state = attend(*cut(drafts, i, i + 3), state)[1].rollback(3)
    assert torch.equal(state.s, start.s)


def test_tokens_are_read_without_attending():
    inputs = make_inputs(20)
    mask = torch.rand(2, 20) < 0.7
    _, expected = attend(*inputs, key_mask=mask)
    _, k, v, beta, gate = inputs
    empty = DeltaState.empty(2, 3, 5, 4, dtype=torch.double)
    read = empty.advance(k=k, v=v, beta=beta, log_gate=gate, key_mask=mask)
    assert_close(read.tensors(), expected.tensors())


def test_a_saved_state_goes_on_where_it_was(tmp_path):
    _, state = attend(*make_inputs(10))
    state.save(tmp_path / "state.safetensors")
    loaded = load_state(tmp_path / "state.safetensors")
    assert isinstance(loaded, DeltaState)
    more = make_inputs(3, seed=1)
    assert torch.equal(attend(*more, loaded)[0], attend(*more, state)[0])


def test_a_merge_says_why_it_cannot_be():
    _, state = attend(*make_inputs(10))
    with pytest.raises(InputError, match=r"cannot be merged.* read them on from the earlier state"):
        state.merge(state)


# Pads and packing


@pytest.mark.parametrize("where", ["left", "right", "holes"])
def test_pads_change_nothing_for_real_tokens(padded_to_17):
    inputs = make_inputs(12)
    real, mask = padded_to_17
    padded = [
        x.new_full((*x.shape[:2], 17, *x.shape[3:]), 1e3).index_copy(2, real, x) for x in inputs
    ]
    for x in padded[1:]:  # What stands at a pad may be anything at all.
        x.data[:, :, ~mask[0]] = math.nan
    expected, final = attend(*inputs)
    actual, state = attend(*padded, key_mask=mask)
    assert state.length.tolist() == [12, 12]
    assert_same_with_gradients((actual[:, :, real], state.s), (expected, final.s), inputs)
    o, s = define(*(x.nan_to_num(0.5) for x in padded), key_mask=mask)
    assert_close((o[:, :, real], s), (expected, final.s))


def test_a_pad_may_come_as_a_token_of_its_own():
    _, state = attend(*make_inputs(10))
    mask = torch.tensor([[True], [False]])
    _, after = attend(*make_inputs(1, seed=1), state, key_mask=mask)
    assert torch.equal(after.s[1], state.s[1])
    assert after.length.tolist() == [11, 10]


@pytest.mark.parametrize("gated", [False, True])
def test_packed_sequences_do_not_see_each_other(gated):
    lengths = [3, 1, 0, 20, 9, 3]
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    *inputs, gate = make_inputs(sum(lengths), batch=1)
    used = (*inputs, gate) if gated else tuple(inputs)

    def run(*span, state=None, **options):
        log_gate = gate[:, :, slice(*span)] if gated else None
        return attend(*cut(inputs, *span), log_gate, state, **options)

    packed, states = run(None, cu_seqlens=bounds)
    pieces, finals = zip(*(run(*span) for span in bounds.unfold(0, 2, 1).tolist()), strict=True)
    expected = torch.cat(pieces, dim=2), torch.cat([final.s for final in finals])
    assert_same_with_gradients((packed, states.s), expected, used)
    assert states.length.tolist() == lengths

    again, _ = run(None, state=states, cu_seqlens=bounds)
    assert_close(again[:, :, 4:24], run(4, 24, state=finals[3])[0])


# Layout, precision, extremes


def test_inputs_need_not_be_contiguous():
    inputs = make_inputs(20)
    expected, _ = attend(*inputs)
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs]
    assert not strided[0].is_contiguous()
    assert_close(attend(*strided)[0], expected)
    spread = [torch.stack([x, x], dim=-1)[..., 0] for x in inputs]
    assert_close(attend(*spread)[0], expected)


@pytest.mark.parametrize("lowest", [-30, -1e3, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_forgetting_everything_leaves_the_token_itself(lowest, dtype):
    q, k, v, beta, gate = (x.detach().to(dtype).requires_grad_() for x in make_inputs(20))
    gate = torch.full_like(gate, lowest).requires_grad_()
    o, state = attend(q, k, v, beta, gate)
    expected = beta.unsqueeze(-1) * (q * k).sum(-1, keepdim=True) * v
    assert_close(o, expected, rtol=1e-5, atol=1e-10)
    assert state.s.isfinite().all()
    for gradient in torch.autograd.grad((o.sum(), state.s.sum()), (q, k, v, beta, gate)):
        assert gradient.isfinite().all()


def test_what_follows_a_token_that_forgets_all_is_exact():
    """Differences of sums of gates would have lost their digits there."""
    inputs = make_inputs(40, lowest=-0.01)
    inputs[-1].data[:, :, 3::16] = -5000
    expected, _ = define(*inputs)
    actual, _ = attend(*(x.float() for x in inputs), chunk_size=None)
    assert relative_error(actual, expected) <= TOLERANCES[torch.float32].output


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_every_dtype_keeps_within_the_published_tolerance(dtype):
    options = {"batch": 1, "heads": 2, "features": 16, "values": 8, "lowest": -0.05}
    rounded = [x.detach().to(dtype).requires_grad_() for x in make_inputs(600, **options)]
    exact = [x.detach().double().requires_grad_() for x in rounded]
    expected, _ = define(*exact)
    actual, _ = attend(*rounded, chunk_size=None)
    assert relative_error(actual, expected) <= TOLERANCES[dtype].output

    upstream = torch.randn(expected.shape, dtype=torch.double).to(dtype)
    gradients = torch.autograd.grad(actual, rounded, upstream)
    references = torch.autograd.grad(expected, exact, upstream.double())
    for name, gradient, reference in zip("qkvbg", gradients, references, strict=True):
        assert gradient.dtype == dtype
        assert relative_error(gradient, reference) <= TOLERANCES[dtype].gradient, name


@pytest.mark.parametrize("t", [1, 50])
def test_autocast_rounds_nothing(t):
    inputs = [x.detach().float().requires_grad_() for x in make_inputs(t)]
    _, state = attend(*(x.detach().float() for x in make_inputs(5)))
    results = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            o, after = attend(*inputs, state)
        results.append((o, after.s, *torch.autograd.grad(o.square().sum(), inputs)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_compiled_gives_the_same_numbers(shapes_unchecked):
    inputs = make_inputs(20)

    def run(*inputs):
        first, state = attend(*cut(inputs, 9), chunk_size=4)
        second, state = attend(*cut(inputs, 9, None), state, chunk_size=4)
        return torch.cat([first, second], dim=2), state.s

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    assert_same_with_gradients(compiled(*inputs), run(*inputs), inputs)


def test_the_compiler_finds_nothing_wrong_with_the_custom_op(shapes_unchecked):
    q, k, v, beta, gate = (x.detach().unflatten(2, (-1, 8)) for x in make_inputs(24, batch=1))
    inputs = q, k, v, beta.unsqueeze(-1), gate.unsqueeze(-1), torch.rand(1, 3, 5, 4).double()
    inputs = [x.flatten(0, 1).requires_grad_() for x in inputs]
    torch.library.opcheck(attend_chunks, inputs)


# Bad input


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.rand(2, 3, 20, 4)}, r"q is \[2, 3, 20, 4\] and k is \[2, 3, 20, 5\].*axis 3"),
        ({"v": torch.rand(2, 3, 19, 4)}, r"k is \[2, 3, 20, 5\] and v is \[2, 3, 19, 4\].*axis 2"),
        ({"q": torch.rand(3, 20, 5)}, r"q is \[3, 20, 5\]; expected axes"),
        ({"k": torch.ones(2, 3, 20, 5).long()}, r"k has dtype torch.int64.*k.float"),
        ({"beta": torch.rand(2, 3, 20, 1)}, r"beta is \[2, 3, 20, 1\]; expected axes \[b, h, t\]"),
        ({"beta": torch.rand(2, 3, 19)}, r"k is .* and beta is \[2, 3, 19\].*axis 2"),
        ({"log_gate": torch.zeros(2, 3, 20, 5)}, r"log_gate is \[2, 3, 20, 5\]; expected axes"),
        ({"key_mask": torch.ones(2, 20)}, r"key_mask has dtype torch.float32; expected bool"),
        ({"chunk_size": 0}, r"chunk_size=0"),
        ({"cu_seqlens": torch.tensor([0, 20])}, r"the batch is 2"),
        ({"state": LinearState.empty(2, 3, 5, 4)}, r"state is a LinearState.* from a DeltaState"),
        ({"state": DeltaState.empty(2, 3, 5, 3)}, r"state.s is \[2, 3, 5, 3\].*\[2, 3, 5, 4\]"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_bad_input_is_named(change, message, shapes_unchecked):
    q, k, v, beta, gate = (x.float() for x in make_inputs(20))
    given = {"q": q, "k": k, "v": v, "beta": beta, "log_gate": gate}
    with pytest.raises(InputError, match=message):
        causal_delta_attention(**given | change)
