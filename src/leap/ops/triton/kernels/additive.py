"""Kernels of additive attention: the one sum of `leap.ops.additive.blocked`, forward and backward.

    S_i = sum_{j seen by i} exp(logit_j - ceiling_i) [values_j, mass_j]

    totals   of each block of tokens: the highest logit, and the sum under it
    before   without a window: the total of all blocks before each, the only loop over blocks
    sums     rows of a block: its own tokens, blocks at the far end of the window token by token,
             and those between by their totals

With BACKWARDS time runs backwards. Nothing is subtracted from a sum, and no two programs write to
the same place. Sequences packed into one row have blocks of their own, in a table `spans`, and are
otherwise computed as if each were alone.
"""

import triton.language as tl

from leap.ops.triton.kernels.jit import jit
from leap.ops.triton.kernels.linear import product


@jit
def elements(values, mass, place, ok, columns, P: tl.constexpr, ACC: tl.constexpr):
    """Values and then the mass of some tokens, as columns 0 to P."""
    at = values + place.to(tl.int64)[:, None] * P + columns[None, :]
    x = tl.load(at, mask=ok[:, None] & (columns < P)[None, :], other=0.0).to(ACC)
    m = tl.load(mass + place, mask=ok, other=0.0).to(ACC)
    return tl.where((columns == P)[None, :], m[:, None], x)


@jit
def left(logit, ceiling, ACC: tl.constexpr):
    """exp(logit - ceiling), which is at most 1; 0 for a logit of -inf."""
    nothing = logit == -float("inf")
    exponent = tl.where(nothing, 0.0, logit) - ceiling  # Never inf - inf.
    return tl.where(nothing, 0.0, tl.exp(tl.minimum(exponent, 0.0).to(ACC)))


@jit
def span_of(spans, index, T):
    """Of a block's sequence: its first token, its length and its first block."""
    if spans is not None:
        entry = spans + index * 3
        return tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
    else:
        return 0, T, 0


@jit
def totals(
    logit, values, mass, spans, peaks, sums, T, n_blocks,
    P: tl.constexpr, BACKWARDS: tl.constexpr,
    BT: tl.constexpr, BP: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """The highest logit of each block, and the sum of its elements under it."""
    row = (tl.program_id(0) // n_blocks).to(tl.int64)
    index = tl.program_id(0) % n_blocks
    begin, length, first = span_of(spans, index, T)
    columns = tl.program_id(1) * BP + tl.arange(0, BP)
    j = (index - first) * BT + tl.arange(0, BT)
    ok = j < length
    place = length - 1 - j if BACKWARDS else j
    start = row * T + begin
    logits = tl.load(logit + start + place, mask=ok, other=-float("inf"))
    peak = tl.max(logits, 0)
    x = elements(values + start * P, mass + start, place, ok, columns, P, ACC)
    total = tl.sum(left(logits, peak, ACC)[:, None] * x, 0)
    at = row * n_blocks + index
    tl.store(sums + at * (P + 1) + columns, total, mask=columns <= P)
    if tl.program_id(1) == 0:
        tl.store(peaks + at, peak)


@jit
def before(
    peaks, sums, bounds, peaks_before, sums_before, n_blocks, n_sequences,
    P: tl.constexpr, BP: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """The total of all blocks of a sequence before each; packed ones begin at `bounds`."""
    row = (tl.program_id(0) // n_sequences).to(tl.int64)
    begin = 0
    end = n_blocks
    if bounds is not None:
        begin = tl.load(bounds + tl.program_id(0) % n_sequences)
        end = tl.load(bounds + tl.program_id(0) % n_sequences + 1)
    columns = tl.program_id(1) * BP + tl.arange(0, BP)
    peak = tl.full([], -float("inf"), ACC)
    total = tl.zeros([BP], tl.float64)
    for n in range(end - begin):
        at = row * n_blocks + begin + n
        tl.store(sums_before + at * (P + 1) + columns, total.to(ACC), mask=columns <= P)
        if tl.program_id(1) == 0:
            tl.store(peaks_before + at, peak)
        new = tl.load(peaks + at)
        high = tl.maximum(peak, new)
        x = tl.load(sums + at * (P + 1) + columns, mask=columns <= P, other=0.0)
        total = total * left(peak, high, tl.float64) + x * left(new, high, tl.float64)
        peak = high


@jit
def sums(
    ceiling, logit, values, mass, spans, peaks, totals, out, T, n_blocks, window,
    P: tl.constexpr, WINDOWED: tl.constexpr, BACKWARDS: tl.constexpr,
    BT: tl.constexpr, BP: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What each row of a block sees; `peaks` and `totals` are of blocks, or of all before them."""
    row = (tl.program_id(0) // n_blocks).to(tl.int64)
    index = tl.program_id(0) % n_blocks
    begin, length, first = span_of(spans, index, T)
    block = index - first
    columns = tl.program_id(1) * BP + tl.arange(0, BP)
    n = tl.arange(0, BT)
    i = block * BT + n
    place_i = length - 1 - i if BACKWARDS else i
    start = row * T + begin
    logit += start
    values += start * P
    mass += start
    peaks += row * n_blocks + first
    totals += (row * n_blocks + first) * (P + 1)
    top = tl.load(ceiling + start + place_i, mask=i < length, other=float("inf"))
    total = tl.zeros([BT, BP], ACC)
    own = block
    whole = block
    if WINDOWED:
        own = tl.maximum(block * BT - window + 1, 0) // BT
        whole = tl.minimum(tl.maximum(block * BT + BT - window + BT - 1, 0) // BT, block)
    for g in range(own, whole):  # The far end of the window.
        j = g * BT + n
        place = length - 1 - j if BACKWARDS else j
        logits = tl.load(logit + place)
        sees = j[None, :] > i[:, None] - window
        weights = tl.where(sees, left(logits[None, :], top[:, None], ACC), 0.0)
        x = elements(values, mass, place, j < length, columns, P, ACC)
        total += product(weights, x, PRECISION, "a")
    if WINDOWED:
        for g in range(whole, block, BT):  # Blocks between, by their totals.
            at = g + n
            logits = tl.load(peaks + at, mask=at < block, other=-float("inf"))
            places = totals + at[:, None] * (P + 1) + columns[None, :]
            x = tl.load(places, mask=(at < block)[:, None] & (columns <= P)[None, :], other=0.0)
            weights = left(logits[None, :], top[:, None], ACC)
            total += product(weights, x, "ieee", "a")
    else:
        x = tl.load(totals + block * (P + 1) + columns, mask=columns <= P, other=0.0)
        total += left(tl.load(peaks + block), top, ACC)[:, None] * x[None, :]
    ok = i < length
    logits = tl.load(logit + place_i, mask=ok, other=-float("inf"))
    sees = i[None, :] <= i[:, None]
    if WINDOWED:
        sees = sees & (i[None, :] > i[:, None] - window)
    weights = tl.where(sees, left(logits[None, :], top[:, None], ACC), 0.0)
    x = elements(values, mass, place_i, ok, columns, P, ACC)
    total += product(weights, x, PRECISION, "a")
    at = out + (start + place_i)[:, None] * (P + 1) + columns[None, :]
    tl.store(at, total, mask=ok[:, None] & (columns <= P)[None, :])
