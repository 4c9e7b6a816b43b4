"""Promises of the states: rows, files, merging, and taking tokens back."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch.testing import assert_close

from leap.errors import FileError, InputError
from leap.ops import (
    LinearState,
    causal_linear_attention,
    causal_proportional_attention,
    load_state,
    load_states,
    save_states,
)
from leap.ops.state import TAG


def make_tokens(length, *, batch=2, heads=3, features=4, values=3, seed=0, dtype=torch.float32):
    options = {"dtype": dtype, "generator": torch.Generator().manual_seed(seed)}
    q, k = (torch.rand(batch, heads, length, features, **options) for _ in "qk")
    return q, k, torch.randn(batch, heads, length, values, **options)


def make_state(length=10, gated=False, **options):
    tokens = make_tokens(length, **options)
    gate = -torch.rand(*tokens[0].shape[:3], dtype=tokens[0].dtype) if gated else None
    return causal_linear_attention(*tokens, log_gate=gate)[1]


def distance(a, b):
    return max(
        float((x - y).abs().max() / y.abs().max().clamp_min(1e-30))
        for x, y in zip(a.tensors().values(), b.tensors().values(), strict=True)
    )


# Rows


def test_rows_are_selected_repeated_and_joined():
    state = make_state(batch=3)
    picked = state.select(torch.tensor([2, 0, 0]))
    assert torch.equal(picked.kv, state.kv[[2, 0, 0]])
    assert torch.equal(state.repeat(2).k, state.k[[0, 0, 1, 1, 2, 2]])
    assert torch.equal(state.concat([picked]).kv, torch.cat([state.kv, picked.kv]))


def test_a_trail_follows_its_rows():
    tokens = make_tokens(8)
    state = make_state().record()
    _, after = causal_linear_attention(*tokens, state)
    swapped = after.select(torch.tensor([1, 0])).rollback(8)
    assert_close(swapped.kv, state.kv[[1, 0]])


def test_detaching_cuts_the_graph_and_changes_no_number():
    _, k, v = make_tokens(5)
    _, state = causal_linear_attention(k, k.requires_grad_(), v)
    assert state.kv.requires_grad
    assert not state.detach().kv.requires_grad
    assert torch.equal(state.detach().kv, state.kv)


# Files


def test_a_saved_state_goes_on_where_it_was(tmp_path):
    state = make_state(gated=True)
    state.save(tmp_path / "state.safetensors")
    loaded = load_state(tmp_path / "state.safetensors")
    assert isinstance(loaded, LinearState)
    assert_close(loaded.tensors(), state.tensors(), rtol=0, atol=0)
    tokens = make_tokens(3, seed=1)
    assert torch.equal(
        causal_linear_attention(*tokens, loaded)[0], causal_linear_attention(*tokens, state)[0]
    )


def test_a_file_has_the_mode_of_any_other(tmp_path):
    (tmp_path / "other").touch()
    make_state().save(tmp_path / "state.safetensors")
    assert (tmp_path / "state.safetensors").stat().st_mode == (tmp_path / "other").stat().st_mode
    assert len(list(tmp_path.iterdir())) == 2


def test_several_states_share_a_file(tmp_path):
    states = {"first": make_state(3), "second": make_state(5)}
    save_states(tmp_path / "states.safetensors", states)
    loaded = load_states(tmp_path / "states.safetensors")
    assert list(loaded) == ["first", "second"]
    assert torch.equal(loaded["second"].kv, states["second"].kv)


def test_a_state_saved_in_single_precision_is_read_on_from(tmp_path):
    q, k, v = (torch.rand(2, 3, 70, 4) for _ in "qkv")
    first, second = ([x[:, :, part] for x in (q, k, v)] for part in (slice(0, 60), slice(60, 70)))
    _, state = causal_linear_attention(*first)
    replace(state, kv=state.kv.float(), k=state.k.float()).save(tmp_path / "state.safetensors")
    o, after = causal_linear_attention(*second, load_state(tmp_path / "state.safetensors"))
    assert after.kv.dtype == after.k.dtype == torch.float64
    assert_close(o, causal_linear_attention(q, k, v)[0][:, :, 60:])


@pytest.mark.parametrize("what", ["missing", "empty", "truncated", "text", "tensors", "unknown"])
def test_a_broken_file_is_named(tmp_path: Path, what):
    path = tmp_path / "state.safetensors"
    if what == "empty":
        path.write_bytes(b"")
    elif what == "text":
        path.write_text("to be or not to be")
    elif what == "tensors":
        save_file({"x": torch.zeros(2)}, path)
    elif what == "unknown":
        save_file({"x": torch.zeros(2)}, path, metadata={TAG: json.dumps({"state": "Nothing"})})
    elif what == "truncated":
        make_state().save(path)
        path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(FileError, match=r"state\.safetensors"):
        load_state(path)


# Time


@pytest.mark.parametrize("gated", [False, True])
def test_two_halves_merge_into_the_whole(gated):
    tokens = make_tokens(20, dtype=torch.double)
    gate = -torch.rand(2, 3, 20, 4, dtype=torch.double) if gated else None

    def read(*span):
        part = slice(*span)
        log_gate = None if gate is None else gate[:, :, part]
        return causal_linear_attention(*(x[:, :, part] for x in tokens), log_gate=log_gate)[1]

    whole = read(20)
    assert_close(read(13).merge(read(13, 20)).tensors(), whole.tensors())
    assert_close(read(5).merge(read(5, 9)).merge(read(9, 20)).tensors(), whole.tensors())


def test_tokens_given_again_are_subtracted():
    state = make_state(dtype=torch.double)
    _, k, v = make_tokens(5, seed=1, dtype=torch.double)
    mask = torch.tensor([[True, True, False, True, True], [True, False, False, False, True]])
    after = state.advance(k=k, v=v, key_mask=mask)
    assert after.length.tolist() == [14, 12]
    assert_close(after.without(k=k, v=v, key_mask=mask).tensors(), state.tensors())


def test_a_gated_state_says_why_it_cannot_subtract():
    _, k, v = make_tokens(2)
    with pytest.raises(InputError, match="use record"):
        make_state(gated=True).without(k=k, v=v)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("pads", [False, True])
@pytest.mark.parametrize("n", [0, 1, 4, 7])
def test_the_last_tokens_can_be_taken_back(check_rollback, n, gated, pads):
    state = make_state(gated=gated).record(limit=7)
    tokens = make_tokens(7, seed=1, dtype=torch.double)
    mask = torch.rand(2, 7) < 0.5 if pads else None
    gate = -torch.rand(2, 3, 7, dtype=torch.double) if gated else None

    def read(start, end, before):
        part = slice(start, end)
        return causal_linear_attention(
            *(x[:, :, part] for x in tokens),
            before,
            key_mask=None if mask is None else mask[:, part],
            log_gate=None if gate is None else gate[:, :, part],
        )[1]

    check_rollback(read, state, n)


def test_a_proportional_state_is_recorded_too():
    q, k, v = make_tokens(9, dtype=torch.double)
    p, s = torch.rand(2, 2, 3, 9, dtype=torch.double)
    _, state = causal_proportional_attention(q, k, v, p, s)
    recorded = state.record()
    _, after = causal_proportional_attention(q, k, v, p, s, recorded)
    assert_close(after.rollback(9).tensors(), state.tensors())
    _, shorter = causal_proportional_attention(
        q[:, :, :5], k[:, :, :5], v[:, :, :5], p[:, :, :5], s[:, :, :5], state
    )
    assert_close(after.rollback(4).tensors(), shorter.tensors())


def test_a_long_recording_keeps_what_the_limit_asks_for_and_no_more_than_twice_that():
    state = LinearState.empty(1, 1, 2, 2).record(limit=4)
    plain = LinearState.empty(1, 1, 2, 2)
    history = [plain]
    for seed in range(50):
        tokens = make_tokens(
            1, batch=1, heads=1, features=2, values=2, seed=seed, dtype=torch.double
        )
        _, state = causal_linear_attention(*tokens, state)
        _, plain = causal_linear_attention(*tokens, plain)
        history.append(plain)
        assert state.trail.n_tokens <= 8
        n = min(4, seed)
        assert_close(state.rollback(n).kv, history[-1 - n].kv)


def test_taking_back_more_than_was_recorded_says_how_to_record():
    with pytest.raises(InputError, match=r"cannot take back 3 tokens, 0 are recorded.*limit=3"):
        make_state().rollback(3)
    with pytest.raises(InputError, match="could take nothing back"):
        make_state().record(limit=0)


@pytest.mark.parametrize("how", ["recorded", "subtracted"])
def test_ten_thousand_rejected_drafts_leave_no_drift(how, shapes_unchecked):
    start = make_state(1000, batch=1, heads=1)
    state = start.record(limit=3) if how == "recorded" else start
    drafts = make_tokens(30_000, batch=1, heads=1, seed=1)
    for i in range(0, 30_000, 3):
        q, k, v = (x[:, :, i : i + 3] for x in drafts)
        if how == "recorded":
            state = causal_linear_attention(q, k, v, state)[1].rollback(3)
        else:
            state = state.advance(k=k, v=v).without(k=k, v=v)
    assert distance(state, start) <= (0 if how == "recorded" else 1e-5)
