"""Linear attention under a read schedule: query i sees the first `visible_i` keys of a source.

    o_i = sum_{j < g_i} (q_i . k_j) v_j  /  max(sum_{j < g_i} q_i . k_j, eps)        g = visible

with g non-decreasing: wait-k and every other way of reading while writing, and chunk-causal
self-attention, where g is the end of the chunk that i stands in. Three exact ways:

    square        all scores, masked by the staircase; the fastest for sentences
    blocks        some queries at a time: a state for what all of them see, a masked square for
                  the keys that only the later ones see; one schedule for the whole batch
    interleaved   reads and writes merged into one stream for `causal_linear_attention`, with no
                  query at a read and no key at a write; any schedule for each sentence

Axes: b batch, h heads, t queries, n keys, f features, e values.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from leap.errors import InputError
from leap.ops.checks import shape
from leap.ops.linear import Reweighting, causal_linear_attention, check_inputs, square
from leap.ops.linear.parts import (
    normalised,
    precision,
    unit_scale,
    wide_keys,
    wide_queries,
    without_pads,
)
from leap.ops.linear.state import sums
from leap.ops.state import as_given, finest

QUERIES_AT_ONCE = 64


def staircase_linear_attention(
    q: Float[Tensor, "b h t f"],
    k: Float[Tensor, "b h n f"],
    v: Float[Tensor, "b h n e"],
    visible: Int[Tensor, " t"] | Int[Tensor, "b t"],
    *,
    reweighting: Reweighting | None = None,
    key_mask: Bool[Tensor, "b n"] | None = None,
    normalise: bool = True,
    eps: float = 1e-6,
) -> Float[Tensor, "b h t e"]:
    """Attend from query i to the first `visible[..., i]` keys, in O(t + n).

    Args:
        q, k: features of the queries and keys, non-negative for a weighted mean.
        v: values.
        visible: how many keys each query sees, pads counted: non-decreasing, from 0 (the result
            is 0) to n; one schedule `[t]`, or one for each sentence `[b, t]`.
        reweighting: x `[b, h, t, r]` and y `[b, h, n, r]`, which multiply scores by x_i . y_j.
        key_mask: true at real keys; the rest count in neither numerator nor denominator.
        normalise: divide by the sum of scores; without it, the weighted sum itself.
        eps: floor of the normaliser, reached where no visible key shares a feature with the query.
    """
    tokens = check_inputs(q, k, v, key_mask, reweighting)
    check_schedule(visible, q, k)
    tokens = without_pads(tokens, key_mask)
    if square.is_cheaper(q, k, v):
        return square.attend(tokens, sees=sees(visible, k), normalise=normalise, eps=eps)
    q, k, values = wide_queries(tokens), wide_keys(tokens), tokens.v.to(precision(tokens))
    scale = unit_scale(q)
    q = q * scale
    # Attending to a column of ones yields the normaliser.
    values = torch.cat([values, torch.ones_like(values[..., :1])], dim=-1)

    with as_given(q):
        if visible.ndim == 1 and not torch.compiler.is_compiling():
            attended = blocks(q, k, values, visible)
        else:
            attended = interleaved(q, k, values, visible)
    num, den = attended.split([v.shape[-1], 1], dim=-1)
    return (normalised(num, den, eps * scale) if normalise else num / scale).to(v.dtype)


def blocks(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """Weighted sums of the visible values, some queries at a time, for one schedule `[t]`."""
    steps: list[int] = visible.tolist()
    kv = k.new_zeros(*k.shape[:2], k.shape[-1], v.shape[-1], dtype=finest(k.device))
    outputs, read = [], 0
    for start in range(0, len(steps), QUERIES_AT_ONCE):
        mine = slice(start, start + QUERIES_AT_ONCE)
        shared, seen = steps[mine][0], steps[mine][-1]
        kv = kv + sums(k[:, :, read:shared], v[:, :, read:shared])[0]
        q_mine, new = q[:, :, mine], slice(shared, seen)
        scores = (q_mine @ k[:, :, new].mT).where(sees(visible[mine] - shared, k[:, :, new]), 0)
        outputs.append(q_mine @ kv.to(q.dtype) + scores @ v[:, :, new])
        read = shared
    return torch.cat(outputs, dim=2)


def interleaved(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """Weighted sums of the visible values, as causal attention over reads and writes in turn."""
    (b, _, t, _), n = q.shape, k.shape[2]
    visible = visible.expand(b, t).contiguous()
    reads = torch.arange(n, device=k.device).expand(b, n).contiguous()
    # Write i comes after i writes and g_i reads; read j after j reads and what was written by then.
    write_slots = torch.arange(t, device=k.device) + visible
    read_slots = reads + torch.searchsorted(visible, reads, right=True)
    order = torch.cat([read_slots, write_slots], dim=1).argsort(dim=1)

    o, _ = causal_linear_attention(
        _merged(q.new_zeros(*k.shape), q, order),
        _merged(k, k.new_zeros(*q.shape), order),
        _merged(v, v.new_zeros(*q.shape[:3], v.shape[-1]), order),
        normalise=False,
    )
    return o.take_along_dim(write_slots[:, None, :, None], dim=2)


def _merged(read: Tensor, written: Tensor, order: Tensor) -> Tensor:
    return torch.cat([read, written], dim=2).take_along_dim(order[:, None, :, None], dim=2)


def sees(visible: Tensor, k: Tensor) -> Tensor:
    """True where a query sees a key, `[1, 1, t, n]` or `[b, 1, t, n]`."""
    order = torch.arange(k.shape[2], device=k.device)
    return order < visible.reshape(-1, 1, visible.shape[-1], 1)


def check_schedule(visible: Tensor, q: Tensor, k: Tensor) -> None:
    """A schedule is `[t]` or `[b, t]` of whole numbers that never fall, from 0 to n."""
    (b, _, t, _), n = q.shape, k.shape[2]
    if visible.is_floating_point() or visible.shape not in {(t,), (b, t)}:
        raise InputError(
            f"visible is {shape(visible)} of {visible.dtype}; "
            f"with {t} queries it must be integers [{t}] or [{b}, {t}]"
        )
    if torch.compiler.is_compiling() or not visible.numel():
        return  # Looking at values would break the graph.
    if bool((visible.diff(dim=-1) < 0).any()):
        raise InputError("visible falls somewhere; what was read stays read: it must not decrease")
    low, high = int(visible.min()), int(visible.max())
    if low < 0 or high > n:
        raise InputError(f"visible runs from {low} to {high}; with {n} keys it must stay in 0..{n}")
