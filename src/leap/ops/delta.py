"""The gated delta rule: a state that corrects what it holds of a key, in place of adding to it.

    S_t = a_t (I - b_t k_t k_t^T) S_{t-1} + b_t k_t v_t^T        o_t = q_t S_t

    a_t = exp(l_t), l_t <= 0   the forget gate, one per head
    b_t in (0, 1)              beta, the share by which what k_t recalls gives way to v_t
    |k_t| = 1                  or the state may grow without bounds

From Gated Delta Networks: Improving Mamba2 with Delta Rule (Yang, Kautz, Hatamizadeh, 2024, arXiv
2412.06464). With l = 0 it is DeltaNet (Yang et al., 2024, arXiv 2406.06484), from which the chunked
form comes. Written by what each token changes, u_t, a chunk that begins with the state S is

    S_t = a_t S_{t-1} + k_t u_t^T       u_t = b_t (v_t - a_t S_{t-1}^T k_t)
    (I + M) U = b V - b e^L K S         M_ij = b_i e^(L_i - L_j) k_i . k_j     for j < i
    O = e^L Q S + A U                   A_ij = e^(L_i - L_j) q_i . k_j         for j <= i
    S_end = e^L_end S + K'^T U          K'_j = e^(L_end - L_j) k_j             L_i = l_1 + ... + l_i

The triangular system is solved for b V and for b e^L K before S is known, U = V' - W S, so that all
is done for all chunks at once but S_end = (e^L_end I - K'^T W) S + K'^T V', which goes from chunk
to chunk, in O(t). An exponent is the sum of the gates between two tokens, so never positive.

Axes: b batch, h heads, t tokens, f features, e values; r = b h rows, n chunks, c tokens of a chunk.
"""

from dataclasses import replace
from functools import partial

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from leap.errors import InputError
from leap.ops.checks import check_axes, check_floating, check_key_mask, check_same, shape
from leap.ops.linear.gated import LOWEST
from leap.ops.packing import run_packed
from leap.ops.state import Recurrent, accumulator, as_given, count_tokens, mask_tokens, state

CHUNK_SIZE = 32


def causal_delta_attention_reference(
    q: Float[Tensor, "b h t f"],
    k: Float[Tensor, "b h t f"],
    v: Float[Tensor, "b h t e"],
    beta: Float[Tensor, "b h t"],
    *,
    log_gate: Float[Tensor, "b h t"] | None = None,
    key_mask: Bool[Tensor, "b t"] | None = None,
) -> tuple[Float[Tensor, "b h t e"], Float[Tensor, "b h f e"]]:
    """The formula as written, token by token: outputs, and S after the last."""
    s = torch.zeros_like(k[:, :, :1].mT @ v[:, :, :1])
    eye = torch.eye(k.shape[-1], dtype=k.dtype, device=k.device)
    outputs = []
    for i in range(k.shape[2]):
        q_i, k_i, v_i = (x[:, :, i : i + 1] for x in (q, k, v))
        b_i = beta[:, :, i, None, None]
        a_i = torch.ones_like(b_i) if log_gate is None else log_gate[:, :, i, None, None].exp()
        after = a_i * (eye - b_i * k_i.mT @ k_i) @ s + b_i * k_i.mT @ v_i
        s = after if key_mask is None else after.where(key_mask[:, i, None, None, None], s)
        outputs.append(q_i @ s)
    return torch.cat(outputs, dim=2), s


@state
class DeltaState(Recurrent):
    """The matrix that maps keys to values, in float32 (float64 for float64 inputs)."""

    s: Float[Tensor, "b h f e"]

    @classmethod
    def empty(
        cls,
        batch: int,
        heads: int,
        features: int,
        values: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> "DeltaState":
        """The state before the first token."""
        return cls(
            s=torch.zeros(batch, heads, features, values, dtype=dtype, device=device),
            length=torch.zeros(batch, dtype=torch.long, device=device),
        )

    def advance(
        self,
        *,
        k: Float[Tensor, "b h t f"],
        v: Float[Tensor, "b h t e"],
        beta: Float[Tensor, "b h t"],
        log_gate: Float[Tensor, "b h t"] | None = None,
        key_mask: Bool[Tensor, "b t"] | Bool[Tensor, "b 1 t"] | None = None,
    ) -> "DeltaState":
        """Read tokens without attending to anything: the state after them."""
        mask = None if key_mask is None else key_mask.flatten(1)
        before = replace(self, trail=None)
        return causal_delta_attention(k, k, v, beta, before, log_gate=log_gate, key_mask=mask)[1]

    def merge(self, later: "DeltaState") -> "DeltaState":
        """Refused: what B leaves of A is a product of matrices, which B's state does not hold."""
        raise InputError(
            "states of the delta rule cannot be merged: what later tokens leave of an earlier "
            "state is a matrix per head, which is not kept; read them on from the earlier state"
        )


def causal_delta_attention(
    q: Float[Tensor, "b h t f"],
    k: Float[Tensor, "b h t f"],
    v: Float[Tensor, "b h t e"],
    beta: Float[Tensor, "b h t"],
    state: DeltaState | None = None,
    *,
    log_gate: Float[Tensor, "b h t"] | None = None,
    key_mask: Bool[Tensor, "b t"] | None = None,
    cu_seqlens: Int[Tensor, " n"] | None = None,
    chunk_size: int | None = None,
) -> tuple[Float[Tensor, "b h t e"], DeltaState]:
    """Attend causally by the gated delta rule in O(t), carrying the past in a state of fixed size.

    Training, prefill and decoding are the same call: pass no state to begin a sequence, and the
    returned state, with as few as one new token, to go on with it.

    Args:
        q: queries. The op does not scale them.
        k: keys of unit length.
        v: values.
        beta: from 0 to 1, how far what the state holds of a key gives way to the value.
        state: what an earlier call returned; None at the start.
        log_gate: log of the forget factor, at most 0, that fades the past before each token is
            read; None to forget nothing but what is overwritten.
        key_mask: true at real tokens. Pads, wherever they are, change nothing for the others.
        cu_seqlens: where packed sequences begin, and the last one ends, `[0, 3, 5]` for lengths
            3 and 2. The batch is then 1, and the state has a row for each sequence.
        chunk_size: tokens computed at once: more of them make fewer steps, each of more work.

    Returns:
        The attended values, and the state after the last token.
    """
    check_floating(q=q, k=k, v=v, beta=beta, log_gate=log_gate)
    check_axes("b h t width", q=q, k=k, v=v)
    check_axes("b h t", beta=beta, log_gate=log_gate)
    check_same("b h t f", q=q, k=k)
    check_same("b h t", k=k, v=v, beta=beta, log_gate=log_gate)
    check_key_mask(key_mask, k)
    if chunk_size is not None and chunk_size < 1:
        raise InputError(f"chunk_size={chunk_size} holds no token; give 1 or more, or None")
    if cu_seqlens is not None:
        op = partial(causal_delta_attention, chunk_size=chunk_size)
        tokens = {"q": q, "k": k, "v": v, "beta": beta, "log_gate": log_gate}
        return run_packed(op, cu_seqlens, tokens, state, key_mask)

    before = _begin(q, k, v, state)
    if not q.shape[2]:
        return v, before
    k, v, beta = (mask_tokens(x, key_mask) for x in (k, v, beta))
    log_gate = None if log_gate is None else mask_tokens(log_gate, key_mask)
    total = before.s.dtype
    inputs = q.to(total), k.to(total), v.to(total), beta.to(total)
    gate = None if log_gate is None else log_gate.to(total).clamp_min(LOWEST)
    with as_given(q):
        if q.shape[2] == 1:
            o, s = _step(*inputs, gate, before.s)
        else:
            o, s = _chunked(*inputs, gate, before.s, min(chunk_size or CHUNK_SIZE, q.shape[2]))
    after = DeltaState(s=s, length=before.length + count_tokens(k, key_mask))
    if before.trail is not None:
        if key_mask is None:
            key_mask = torch.ones(k.shape[0], k.shape[2], dtype=torch.bool, device=k.device)
        if log_gate is None:
            log_gate = torch.zeros_like(beta)
        read = {"k": k, "v": v, "beta": beta, "log_gate": log_gate}
        after = after.after(before, **read, key_mask=key_mask.unsqueeze(1))
    return o.to(v.dtype), after


def _step(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_gate: Tensor | None, s: Tensor
) -> tuple[Tensor, Tensor]:
    """One token: decoding, where the fewest calls are the fastest."""
    if log_gate is not None:
        s = s * log_gate.exp().unsqueeze(-1)
    change = (v - k @ s) * beta.unsqueeze(-1)
    s = torch.addcmul(s, k.mT, change)
    return q @ s, s


def _chunked(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_gate: Tensor | None, s: Tensor, size: int
) -> tuple[Tensor, Tensor]:
    """Attended values `[b, h, t, e]`, and S after the last token."""
    (b, h, t, f), e = k.shape, v.shape[-1]
    if log_gate is None:
        log_gate = torch.zeros_like(beta)
    q, k, v = (_cut(x, size) for x in (q, k, v))
    beta, log_gate = (_cut(x.unsqueeze(-1), size) for x in (beta, log_gate))

    left = _left_between(log_gate)  # [r, n, c, c]
    since = log_gate.cumsum(2).exp()
    scores = (q @ k.mT) * left
    system = (k @ k.mT) * left * beta  # Its diagonal is taken to be 1.
    given = torch.cat([v, k * since], dim=-1) * beta
    solved = torch.linalg.solve_triangular(system, given, upper=False, unitriangular=True)

    within, of_state = (scores @ solved).split([e, f], dim=-1)
    kept = k * left[:, :, -1].unsqueeze(-1)
    added, removed = (kept.mT @ solved).split([e, f], dim=-1)
    eye = torch.eye(f, dtype=k.dtype, device=k.device)
    passed = eye * since[:, :, -1:] - removed
    states = [s.reshape(b * h, f, e)]
    for passed_c, added_c in zip(passed.unbind(1), added.unbind(1), strict=True):
        states.append(torch.baddbmm(added_c, passed_c, states[-1]))

    o = within + (q * since - of_state) @ torch.stack(states[:-1], dim=1)
    return o.reshape(b, h, -1, e)[:, :, :t], states[-1].view(b, h, f, e)


def _cut(x: Tensor, size: int) -> Tensor:
    """`[b, h, t, width]` in chunks `[r, n, c, width]`, filled up by zeros, which change nothing."""
    x = torch.nn.functional.pad(x, (0, 0, 0, -x.shape[2] % size))
    return x.reshape(x.shape[0] * x.shape[1], -1, size, x.shape[-1])


def _left_between(log_gate: Tensor) -> Tensor:
    """What is left of token j at token i of a chunk, e^(l_{j+1} + ... + l_i), 0 for j > i.

    Sums of the gates between them, by a product with ones: the difference of two sums from the
    chunk's beginning would lose its digits behind a gate that forgets all.
    """
    c = log_gate.shape[2]
    ones = log_gate.new_ones(c, c).tril()
    unseen = torch.full_like(ones, -torch.inf).triu(1)
    return (ones @ (log_gate * ones.tril(-1)) + unseen).exp()


def _begin(q: Tensor, k: Tensor, v: Tensor, state: DeltaState | None) -> DeltaState:
    """The state to go on from: the one given, if it fits these inputs, or an empty one."""
    expected = (*k.shape[:2], k.shape[-1], v.shape[-1])
    if state is None:
        return DeltaState.empty(*expected, dtype=accumulator(q, k, v), device=v.device)
    if not isinstance(state, DeltaState):
        raise InputError(
            f"state is a {type(state).__name__}; the delta rule goes on from a DeltaState"
        )
    if state.s.shape != expected:
        raise InputError(
            f"state.s is {shape(state.s)}; with k {shape(k)} and v {shape(v)} "
            f"it must be {list(expected)}"
        )
    return state
