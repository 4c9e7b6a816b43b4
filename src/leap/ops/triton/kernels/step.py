"""The kernel of one more token of linear attention: a pass over the state, in and out.

    kv = g kv + fk v^T        k_sum = g k_sum + fk        o = fq kv / max(fq . k_sum, eps)

The state is of float64, and so is what is computed: to move it takes longer than to multiply.
"""

import triton.language as tl

from leap.ops.triton.kernels.jit import jit
from leap.ops.triton.kernels.linear import as_stored


@jit
def step(
    q, k, v, x, y, gate, mask, kv, k_sum, o, kv_after, k_sum_after, heads,
    q_b, q_h, k_b, k_h, v_b, v_h, o_b, o_h,
    F: tl.constexpr, E: tl.constexpr, RANK: tl.constexpr, PER_FEATURE: tl.constexpr,
    NORMALISE: tl.constexpr, EPS: tl.constexpr, BF: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """One token of one row, for some of the values."""
    row = tl.program_id(0).to(tl.int64)
    batch, head = row // heads, row % heads
    e = tl.program_id(1) * BE + tl.arange(0, BE)
    left = tl.full([BF], 1.0, tl.float64)
    if gate is not None and not PER_FEATURE:
        left = left * tl.exp(tl.load(gate + row).to(tl.float64))
    R: tl.constexpr = RANK if RANK > 0 else 1
    kv += row * (R * F * E)
    kv_after += row * (R * F * E)
    k_sum += row * (R * F)
    k_sum_after += row * (R * F)
    value = tl.load(v + batch * v_b + head * v_h + e, mask=e < E, other=0.0)
    value = value.to(tl.float64)
    if mask is not None:
        value = tl.where(tl.load(mask + batch) != 0, value, 0.0)
    num = tl.zeros([BE], tl.float64)
    den = tl.zeros([], tl.float64)
    for r in range(R):
        for start in range(0, F, BF):
            f = start + tl.arange(0, BF)
            fq = tl.load(q + batch * q_b + head * q_h + f, mask=f < F, other=0.0).to(tl.float64)
            fk = tl.load(k + batch * k_b + head * k_h + f, mask=f < F, other=0.0).to(tl.float64)
            if RANK > 0:
                fq = fq * tl.load(x + row * RANK + r).to(tl.float64)
                fk = fk * tl.load(y + row * RANK + r).to(tl.float64)
            if PER_FEATURE:
                left = tl.load(gate + row * F + f, mask=f < F, other=0.0).to(tl.float64)
                left = tl.exp(left)
            if mask is not None:
                fk = tl.where(tl.load(mask + batch) != 0, fk, 0.0)
            place = (r * F + f)[:, None] * E + e[None, :]
            ok = (f < F)[:, None] & (e < E)[None, :]
            state = left[:, None] * tl.load(kv + place, mask=ok, other=0.0)
            state += fk[:, None] * value[None, :]
            tl.store(kv_after + place, state, mask=ok)
            total = left * tl.load(k_sum + r * F + f, mask=f < F, other=0.0) + fk
            if tl.program_id(1) == 0:
                tl.store(k_sum_after + r * F + f, total, mask=f < F)
            num += tl.sum(fq[:, None] * state, 0)
            den += tl.sum(fq * total, 0)
    if NORMALISE:
        num = num / tl.where(den == 0, float("inf"), tl.maximum(den, EPS))
    dtype: tl.constexpr = o.dtype.element_ty
    if dtype == tl.bfloat16:
        num = as_stored(num.to(tl.float32), dtype)
    tl.store(o + batch * o_b + head * o_h + e, num.to(dtype), mask=e < E)
