"""Kernels of linear attention, causal and bidirectional, forward and backward.

The formulas are those of `leap.ops.linear.chunked`. Tokens are cut into chunks, and every chunk of
every row (a head of a sequence) is computed at the same time, in three stages:

    chunk_states   S_c = sum_j until_j fk_j [v_j, 1]^T              over the tokens of chunk c
    scan           S_c becomes what lies before chunk c             the only loop over chunks
    outputs        scores within the chunk, and the state before it

and once more for the gradients, where `chunk_states` and `scan` gather dS from the end:

    chunk_states   dS_c = sum_i since_i fq_i [g_i, h_i]^T           g, h: see `divide`
    query_gradients, key_gradients, value_gradients                 one program per block of tokens

Attention to a whole sequence is the same with one state for all and no scores within chunks.

A program reads blocks of BT tokens, BF features and BE values, and loops where there are more. No
two programs write to the same place, so results do not depend on their order. Numbers are brought
to float32 as they are read (float64 where it is given), which is also what the interpreter needs:
it computes bfloat16 wrongly. The scan adds up in float64, once per chunk.

States lie as `[rows, slots, r f e + r f]`: kv, then the sum of the keys. A chunk's slot holds what
lies before it, and the next one what lies after. Chunks begin every CHUNK tokens, or where `places`
says: sequences packed into one row have chunks of their own, and a slot more for each.

Gates per feature (GATED == 2) fade each feature by itself, exp(c_if - c_jf). Written out as factors
of i and of j, these would over- and underflow; so blocks meet at the token before the later one,
where both factors are at most 1, and a block meets itself pair by pair.
"""

import triton.language as tl

from leap.ops.triton.kernels.jit import jit


@jit
def tile(base, tokens, stride, ok, columns, width, ACC: tl.constexpr):
    """Some columns of some tokens, 0 where there are none.

    Tokens are counted from `base`, which is moved to the first of a block by `at`, so that of
    the offsets only that one needs 64 bits.
    """
    place = base + tokens[:, None] * stride + columns[None, :]
    return tl.load(place, mask=ok[:, None] & (columns < width)[None, :], other=0.0).to(ACC)


@jit
def put(x, base, tokens, stride, ok, columns, width):
    """Write what `tile` reads."""
    place = base + tokens[:, None] * stride + columns[None, :]
    x = as_stored(x, base.dtype.element_ty).to(base.dtype.element_ty)
    tl.store(place, x, mask=ok[:, None] & (columns < width)[None, :])


@jit
def as_stored(x, dtype: tl.constexpr):
    """Rounded as memory of a dtype rounds it: the interpreter would cut off digits for bfloat16."""
    if dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        near = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
        return tl.where(x != x, x, near.to(tl.float32, bitcast=True))
    else:
        return x.to(dtype).to(x.dtype)


@jit
def at(base, batch, head, first, s_b, s_h, s_t):
    """Where the token `first` of a row begins."""
    return base + batch * s_b + head * s_h + first.to(tl.int64) * s_t


@jit
def features(
    base, tokens, stride, ok, columns, width,
    MAP: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile gone through a feature map: 0 none, 1 relu, 2 elu plus one, 3 exp."""
    x = tile(base, tokens, stride, ok, columns, width, ACC)
    if MAP == 1:
        x = tl.where(x < 0, 0.0, x)  # Unlike a maximum, it keeps NaN.
    if MAP == 2:
        x = tl.where(x > 0, x + 1, tl.exp(x))
    if MAP == 3:
        x = tl.exp(limited(x, base.dtype.element_ty))
    if MAP >= 2:
        x = tl.where(ok[:, None] & (columns < width)[None, :], x, 0.0)
        if PRECISION == "tf32":
            x = rounded(x)  # As the map would be in half precision.
    return x


@jit
def limited(x, dtype: tl.constexpr):
    """x, but at most the log of the largest feature, as `features.exp` has it."""
    if dtype == tl.float16:
        return tl.where(x > 10.396719, 10.396719, x)
    else:
        return tl.where(x > 34.538776394910684, 34.538776394910684, x)


@jit
def through_the_map(dx, base, tokens, stride, ok, columns, width, MAP: tl.constexpr):
    """Gradients of what went into `features`."""
    if MAP == 1:
        x = tile(base, tokens, stride, ok, columns, width, dx.dtype)
        dx = tl.where(x > 0, dx, 0.0)
    if MAP == 2:
        x = tile(base, tokens, stride, ok, columns, width, dx.dtype)
        dx = tl.where(x > 0, dx, dx * tl.exp(tl.minimum(x, 0.0)))
    if MAP == 3:
        x = tile(base, tokens, stride, ok, columns, width, dx.dtype)
        ceiling = limited(x, base.dtype.element_ty)
        dx = tl.where(x > ceiling, 0.0, dx * tl.exp(ceiling))
    return dx


@jit
def rounded(x):
    """To the 11 bits of TF32, which the hardware would otherwise cut off, always downwards."""
    bits = x.to(tl.int32, bitcast=True)
    near = ((bits + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
    return tl.where(x != x, x, near)


@jit
def product(a, b, PRECISION: tl.constexpr, COMPUTED: tl.constexpr):
    """a @ b, in full float32 whatever the precision.

    TF32, which matrix units multiply, holds what was read in half precision exactly. The factor
    that was computed, "a" or "b" or "" for none, goes in as a sum of two; both for "ab".
    """
    if PRECISION == "tf32" and COMPUTED == "ab":
        high = rounded(b)
        low = tl.where(b == high, 0.0, b - high)
        c = tl.dot(rounded(a), low, input_precision=PRECISION, out_dtype=a.dtype)
        return c + product(a, high, PRECISION, "a")
    elif PRECISION == "tf32" and COMPUTED == "a":
        high = rounded(a)
        low = tl.where(a == high, 0.0, a - high)
        c = tl.dot(low, b, input_precision=PRECISION, out_dtype=a.dtype)
        return tl.dot(high, b, c, input_precision=PRECISION, out_dtype=a.dtype)
    elif PRECISION == "tf32" and COMPUTED == "b":
        high = rounded(b)
        low = tl.where(b == high, 0.0, b - high)
        c = tl.dot(a, low, input_precision=PRECISION, out_dtype=a.dtype)
        return tl.dot(a, high, c, input_precision=PRECISION, out_dtype=a.dtype)
    else:
        return tl.dot(a, b, input_precision=PRECISION, out_dtype=a.dtype)


@jit
def unit_scale(peak):
    """The power of two that brings `peak` near 1, as `parts.unit_scale`."""
    if peak.dtype == tl.float64:
        exponent = ((peak.to(tl.int64, bitcast=True) >> 52) & 2047) - 1022
        exponent = tl.minimum(tl.maximum(exponent, -120), 120)
        return ((1023 - exponent) << 52).to(tl.float64, bitcast=True)
    else:
        exponent = ((peak.to(tl.int32, bitcast=True) >> 23) & 255) - 126
        exponent = tl.minimum(tl.maximum(exponent, -120), 120)
        return ((127 - exponent) << 23).to(tl.float32, bitcast=True)


@jit
def left(exponent, ACC: tl.constexpr):
    """exp of a difference of decays, at most 1."""
    return tl.exp(tl.minimum(exponent, 0.0).to(ACC))


@jit
def weights_between(
    x, y, decay_i, decay_j, n, ok_i, ok_j,
    RANK: tl.constexpr, GATED: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """x_i . y_j and what gates leave of scores, each 1 where there is none, `[i, j]`."""
    turned = tl.full([n.shape[0], n.shape[0]], 1.0, ACC)
    fade = turned  # Also of gates per feature: they are in the scores.
    if RANK > 0:
        turned = tl.zeros([n.shape[0], n.shape[0]], ACC)
        for r in range(RANK):
            x_r = tl.load(x + n * RANK + r, mask=ok_i, other=0.0)
            y_r = tl.load(y + n * RANK + r, mask=ok_j, other=0.0)
            turned += x_r[:, None] * y_r[None, :]
    if GATED == 1:
        fade = left(decay_i[:, None] - decay_j[None, :], ACC)
    return turned, fade


@jit
def place_of(places, index, T, SIZE: tl.constexpr, CHUNK: tl.constexpr):
    """Of a block of SIZE tokens: the first, the first of its chunk, where that ends, its slot."""
    if places is not None:
        entry = places + index * 4
        return tl.load(entry), tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)
    else:
        chunk = index * SIZE // CHUNK
        return index * SIZE, chunk * CHUNK, tl.minimum((chunk + 1) * CHUNK, T), chunk


@jit
def decays(
    gate, places, out, T, n_chunks, heads, g_b, g_h, g_t,
    F: tl.constexpr, GATED: tl.constexpr, CHUNK: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    """c_i = l_1 + ... + l_i of each chunk, in float64: many that forget would swallow the rest."""
    row = tl.program_id(0) // n_chunks
    first, _, end, _ = place_of(places, tl.program_id(0) % n_chunks, T, CHUNK, CHUNK)
    batch, head, row = (row // heads).to(tl.int64), (row % heads).to(tl.int64), row.to(tl.int64)
    n = tl.arange(0, CHUNK)
    ok = first + n < end
    gate = at(gate, batch, head, first, g_b, g_h, g_t)
    if GATED == 2:
        f = tl.program_id(1) * BF + tl.arange(0, BF)
        x = tile(gate, n, g_t, ok, f, F, tl.float64)
        put(tl.cumsum(x, 0), out + (row * T + first) * F, n, F, ok, f, F)
    else:
        x = tl.load(gate + n.to(tl.int64) * g_t, mask=ok, other=0.0).to(tl.float64)
        tl.store(out + row * T + first + n, tl.cumsum(x, 0), mask=ok)


@jit
def decays_of(decay, token, n, ok, f, F):
    """c of some features of some tokens, `[n, f]`."""
    return tile(decay + token * F, n, F, ok, f, F, tl.float64)


@jit
def faded_to_border(fq, fk, decay, i, j, n, ok_i, ok_j, f, F, ACC: tl.constexpr):
    """Both, and what gates leave of them at the token before i, `[n, f]`; j lies before i."""
    border = tl.load(decay + (i - 1) * F + f, mask=f < F, other=0.0)[None, :]
    left_i = left(decays_of(decay, i, n, ok_i, f, F) - border, ACC)
    left_j = left(border - decays_of(decay, j, n, ok_j, f, F), ACC)
    return fq * left_i, fk * left_j, left_i, left_j


@jit
def left_until(decay, token, last, n, ok, f, F, ACC: tl.constexpr):
    """What gates leave of features from each token of a block to the last of its chunk."""
    end = tl.load(decay + last * F + f, mask=f < F, other=0.0)
    return left(end[None, :] - decays_of(decay, token, n, ok, f, F), ACC)


@jit
def left_between(decay, i, n, ok, f, F, ACC: tl.constexpr):
    """What gates leave between two tokens of a block, `[i, j, f]`; 1 where j is the later one."""
    c = decays_of(decay, i, n, ok, f, F)
    return left(c[:, None, :] - c[None, :, :], ACC)


@jit
def gated_scores(
    fq, fk, decay, i, j, n, ok_i, ok_j, f, F, ACC: tl.constexpr, PRECISION: tl.constexpr
):
    """sum_f fq_if fk_jf exp(c_if - c_jf), from the block at token i to that at j, `[i, j]`."""
    if i == j:
        pairs = left_between(decay, i, n, ok_i, f, F, ACC)
        scores = tl.sum(fq[:, None, :] * fk[None, :, :] * pairs, 2)
    else:
        fq, fk, _, _ = faded_to_border(fq, fk, decay, i, j, n, ok_i, ok_j, f, F, ACC)
        scores = product(fq, tl.trans(fk), PRECISION, "ab")
    return scores


@jit
def gated_to_queries(
    da, fq, fk, decay, i, j, n, ok_i, ok_j, f, F, ACC: tl.constexpr, PRECISION: tl.constexpr
):
    """sum_j da_ij fk_jf exp(c_if - c_jf), `[i, f]`."""
    if i == j:
        pairs = left_between(decay, i, n, ok_i, f, F, ACC)
        grad = tl.sum(da[:, :, None] * fk[None, :, :] * pairs, 1)
    else:
        _, fk, left_i, _ = faded_to_border(fq, fk, decay, i, j, n, ok_i, ok_j, f, F, ACC)
        grad = left_i * product(da, fk, PRECISION, "ab")
    return grad


@jit
def gated_to_keys(
    da, fq, fk, decay, i, j, n, ok_i, ok_j, f, F, ACC: tl.constexpr, PRECISION: tl.constexpr
):
    """sum_i da_ij fq_if exp(c_if - c_jf), `[j, f]`."""
    if i == j:
        pairs = left_between(decay, i, n, ok_i, f, F, ACC)
        grad = tl.sum(da[:, :, None] * fq[:, None, :] * pairs, 0)
    else:
        fq, _, _, left_j = faded_to_border(fq, fk, decay, i, j, n, ok_i, ok_j, f, F, ACC)
        grad = left_j * product(tl.trans(da), fq, PRECISION, "ab")
    return grad


@jit
def chunk_states(
    a, v, w, decay, mask, places, scale, inverse, h, out,
    T, n_chunks, n_slots, heads, a_b, a_h, a_t, v_b, v_h, v_t,
    F: tl.constexpr, E: tl.constexpr, RANK: tl.constexpr, MAP: tl.constexpr,
    GATED: tl.constexpr, MASKED: tl.constexpr, BACKWARD: tl.constexpr,
    CHUNK: tl.constexpr, BT: tl.constexpr, BF: tl.constexpr, BE: tl.constexpr,
    ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What each chunk adds to the state; backward, what its queries add to the gradient of it.

    A program computes one tile of one chunk: features of keys `a` (or queries), with one number
    of their re-weighting `w`, times values `v` (or gradients of the output).
    """
    row = tl.program_id(0) // n_chunks
    begin, _, stop, slot = place_of(places, tl.program_id(0) % n_chunks, T, CHUNK, CHUNK)
    n_f: tl.constexpr = (F + BF - 1) // BF
    r = tl.program_id(1) // n_f
    f = tl.program_id(1) % n_f * BF + tl.arange(0, BF)
    e = tl.program_id(2) * BE + tl.arange(0, BE)
    n = tl.arange(0, BT)
    batch, head, row = (row // heads).to(tl.int64), (row % heads).to(tl.int64), row.to(tl.int64)
    if GATED == 1:
        end = tl.load(decay + row * T + stop - 1)
    kv = tl.zeros([BF, BE], ACC)
    k_sum = tl.zeros([BF], ACC)
    for start in range(0, CHUNK, BT):
        first = begin + start
        token = row * T + first
        inside = first + n < stop
        ok = inside
        if MASKED:
            ok = ok & (tl.load(mask + batch * T + first + n, mask=ok, other=0) != 0)
        x = features(
            at(a, batch, head, first, a_b, a_h, a_t), n, a_t, ok, f, F, MAP, ACC, PRECISION
        )
        values = tile(at(v, batch, head, first, v_b, v_h, v_t), n, v_t, ok, e, E, ACC)
        if RANK > 0:
            x = x * tl.load(w + token * RANK + n * RANK + r, mask=ok, other=0.0)[:, None]
        if GATED == 1:
            c = tl.load(decay + token + n, mask=inside, other=0.0)
            x = x * left(c if BACKWARD else end - c, ACC)[:, None]
        if GATED == 2 and BACKWARD:
            x = x * left(decays_of(decay, token, n, inside, f, F), ACC)
        elif GATED == 2:
            x = x * left_until(decay, token, row * T + stop - 1, n, inside, f, F, ACC)
        if BACKWARD:
            x = x * tl.load(scale + token + n, mask=ok, other=0.0)[:, None]
            k_sum += tl.sum(x * tl.load(h + token + n, mask=ok, other=0.0)[:, None], 0)
            x = x * tl.load(inverse + token + n, mask=ok, other=0.0)[:, None]
        else:
            k_sum += tl.sum(x, 0)
        kv += product(tl.trans(x), values, PRECISION, "a")
    R: tl.constexpr = RANK if RANK > 0 else 1
    out += (row * n_slots + slot) * (R * F * (E + 1))
    put(kv, out + r * F * E, f, E, f < F, e, E)
    if tl.program_id(2) == 0:
        tl.store(out + R * F * E + r * F + f, k_sum, mask=f < F)


@jit
def scan(
    states, decay, places, bounds, kv, k_sum, kv_after, k_sum_after, other, inner,
    T, n_chunks, n_slots, n_rows, heads,
    F: tl.constexpr, E: tl.constexpr,
    N_KV: tl.constexpr, N_ALL: tl.constexpr, GATED: tl.constexpr, FROM_STATE: tl.constexpr,
    KEPT: tl.constexpr, BACKWARD: tl.constexpr, INNER: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Put what lies before each chunk where the chunk's own sums are; backward, what lies after.

    With INNER, also sum the products of the gradient after each chunk and the state there. Packed
    sequence n has the chunks from `bounds[n]` to `bounds[n + 1]`, and a state of its own.
    """
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    in_kv, ok = place < N_KV, place < N_ALL
    feature = tl.where(in_kv, place // E % F, (place - N_KV) % F)
    line = row  # Of the tokens, and of the slots.
    begin = tl.full([], 0, tl.int64)
    end = begin + n_chunks
    slots = begin
    if bounds is not None:
        line = row % heads
        begin = tl.load(bounds + row // heads).to(tl.int64)
        end = tl.load(bounds + row // heads + 1).to(tl.int64)
        slots = row // heads
    states += (line * n_slots + slots) * N_ALL
    total = tl.zeros([BLOCK], tl.float64)
    if FROM_STATE:
        total = tl.load(kv + row * N_KV + place, mask=in_kv, other=0.0)
        rest = k_sum + row * (N_ALL - N_KV) + place - N_KV
        total += tl.load(rest, mask=ok & (place >= N_KV), other=0.0)
    for n in range(end - begin):
        chunk = begin + n
        if BACKWARD:
            chunk = end - 1 - n
        here = states + chunk * N_ALL + place
        new = tl.load(here, mask=ok, other=0.0)
        tl.store(here, total.to(states.dtype.element_ty), mask=ok)
        if INNER:
            after = other + (line * n_slots + slots + chunk + 1) * N_ALL + place
            products = total * tl.load(after, mask=ok, other=0.0).to(tl.float64)
            share = (tl.program_id(1).to(tl.int64) * n_rows + line) * n_chunks + chunk
            tl.store(inner + share, tl.sum(products, 0))
        if GATED:
            _, _, stop, _ = place_of(places, chunk, T, CHUNK, CHUNK)
            last = decay + line * T + stop - 1
            if GATED == 2:
                last = decay + (line * T + stop - 1) * F + feature
            total = total * tl.exp(tl.load(last))
        total += new
    tl.store(states + end * N_ALL + place, total.to(states.dtype.element_ty), mask=ok)
    if KEPT:
        tl.store(kv_after + row * N_KV + place, total, mask=in_kv)
        rest = k_sum_after + row * (N_ALL - N_KV) + place - N_KV
        tl.store(rest, total, mask=ok & (place >= N_KV))


@jit
def block_of(
    mask, decay, batch, row, first, T, end,
    GATED: tl.constexpr, MASKED: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """Of a block of tokens: which there are, which are real, and their decays per head."""
    n = tl.arange(0, BT)
    inside = first + n < end
    ok = inside
    if MASKED:
        ok = ok & (tl.load(mask + batch * T + first + n, mask=ok, other=0) != 0)
    c = tl.zeros([BT], tl.float64)
    if GATED == 1:
        c = tl.load(decay + row * T + first + n, mask=inside, other=0.0)
    return inside, ok, c


@jit
def outputs(
    q, k, v, x, y, decay, mask, places, states, o, rest, den_out, scale_out,
    T, n_blocks, n_slots, heads, q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, o_b, o_h, o_t,
    F: tl.constexpr, E: tl.constexpr, RANK: tl.constexpr, MAP: tl.constexpr,
    GATED: tl.constexpr, MASKED: tl.constexpr, CAUSAL: tl.constexpr,
    NORMALISE: tl.constexpr, EPS: tl.constexpr,
    CHUNK: tl.constexpr, BT: tl.constexpr, BF: tl.constexpr, BE: tl.constexpr,
    ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attended values of a block of queries, their denominators and scales."""
    row = tl.program_id(0) // n_blocks
    block = tl.program_id(0) % n_blocks
    e = tl.program_id(1) * BE + tl.arange(0, BE)
    n = tl.arange(0, BT)
    columns = tl.arange(0, BF)
    batch, head, row = (row // heads).to(tl.int64), (row % heads).to(tl.int64), row.to(tl.int64)
    first, begin, end, slot = place_of(places, block, T, BT, CHUNK)
    token = row * T + first
    _, ok, c_i = block_of(mask, decay, batch, row, first, T, end, GATED, False, BT)
    q = at(q, batch, head, first, q_b, q_h, q_t)
    if RANK > 0:
        x += token * RANK

    peak = tl.zeros([BT], ACC)
    for start in range(0, F, BF):
        fq = features(q, n, q_t, ok, start + columns, F, MAP, ACC, PRECISION)
        peak = tl.maximum(peak, tl.max(tl.abs(fq), 1))
    scale = unit_scale(peak)
    num = tl.zeros([BT, BE], ACC)
    den = tl.zeros([BT], ACC)
    if CAUSAL:
        for before in range((first - begin) // BT + 1):
            first_j = begin + before * BT
            _, ok_j, c_j = block_of(mask, decay, batch, row, first_j, T, end, GATED, MASKED, BT)
            k_j = at(k, batch, head, first_j, k_b, k_h, k_t)
            y_j = y
            if RANK > 0:
                y_j = y + (row * T + first_j) * RANK
            scores = tl.zeros([BT, BT], ACC)
            for start in range(0, F, BF):
                f = start + columns
                fq = features(q, n, q_t, ok, f, F, MAP, ACC, PRECISION) * scale[:, None]
                fk = features(k_j, n, k_t, ok_j, f, F, MAP, ACC, PRECISION)
                if GATED == 2:
                    scores += gated_scores(
                        fq, fk, decay, token, row * T + first_j, n, ok, ok_j, f, F, ACC, PRECISION
                    )
                else:
                    scores += product(fq, tl.trans(fk), PRECISION, "")
            turned, fade = weights_between(x, y_j, c_i, c_j, n, ok, ok_j, RANK, GATED, ACC)
            sees = ((first_j + n)[None, :] <= (first + n)[:, None]) & ok_j[None, :]
            scores = tl.where(sees, scores * turned * fade, 0.0)
            den += tl.sum(scores, 1)
            v_j = tile(at(v, batch, head, first_j, v_b, v_h, v_t), n, v_t, ok_j, e, E, ACC)
            num += product(scores, v_j, PRECISION, "a")

    R: tl.constexpr = RANK if RANK > 0 else 1
    slot = slot if CAUSAL else n_slots - 1
    states += (row * n_slots + slot) * (R * F * (E + 1))
    since = tl.full([BT], 1.0, ACC)
    if GATED == 1:
        since = left(c_i, ACC)
    COMPUTED: tl.constexpr = "ab" if GATED == 2 else "b"
    for r in range(R):
        weight = since
        if RANK > 0:
            weight = weight * tl.load(x + n * RANK + r, mask=ok, other=0.0)
        for start in range(0, F, BF):
            f = start + columns
            fq = features(q, n, q_t, ok, f, F, MAP, ACC, PRECISION) * scale[:, None]
            if GATED == 2:
                fq = fq * left(decays_of(decay, token, n, ok, f, F), ACC)
            k_sum = tl.load(states + R * F * E + r * F + f, mask=f < F, other=0.0)
            kv = tile(states + r * F * E, f, E, f < F, e, E, ACC)
            den += weight * tl.sum(fq * k_sum[None, :], 1)
            num += weight[:, None] * product(fq, kv, PRECISION, COMPUTED)

    if NORMALISE:
        floor = tl.where(den == 0, float("inf"), tl.maximum(den, EPS * scale))
        num = num / floor[:, None]
    else:
        num = num / scale[:, None]
    put(num, at(o, batch, head, first, o_b, o_h, o_t), n, o_t, ok, e, E)
    if rest is not None:  # What rounding took off, without which gradients would be off by it.
        num = num - as_stored(num, o.dtype.element_ty)
        put(num, at(rest, batch, head, first, o_b, o_h, o_t), n, o_t, ok, e, E)
    if tl.program_id(1) == 0:
        tl.store(den_out + token + n, den, mask=ok)
        tl.store(scale_out + token + n, scale, mask=ok)


@jit
def divide(
    do, o, rest, den_in, scale_in, inverse, h,
    T, n_blocks, heads, do_b, do_h, do_t, o_b, o_h, o_t,
    E: tl.constexpr, NORMALISE: tl.constexpr, EPS: tl.constexpr, BT: tl.constexpr, BE: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    """Gradients through the division: g = do times `inverse`, and h of the denominators."""
    row = tl.program_id(0) // n_blocks
    batch, head = (row // heads).to(tl.int64), (row % heads).to(tl.int64)
    first = tl.program_id(0) % n_blocks * BT
    token = row.to(tl.int64) * T + first
    n = tl.arange(0, BT)
    ok = first + n < T
    scale = tl.load(scale_in + token + n, mask=ok, other=1.0)
    if NORMALISE:
        do = at(do, batch, head, first, do_b, do_h, do_t)
        o = at(o, batch, head, first, o_b, o_h, o_t)
        if rest is not None:
            rest = at(rest, batch, head, first, o_b, o_h, o_t)
        dots = tl.zeros([BT], ACC)
        for start in range(0, E, BE):
            e = start + tl.arange(0, BE)
            mean = tile(o, n, o_t, ok, e, E, ACC)
            if rest is not None:
                mean += tile(rest, n, o_t, ok, e, E, ACC)
            dots += tl.sum(tile(do, n, do_t, ok, e, E, ACC) * mean, 1)
        den = tl.load(den_in + token + n, mask=ok, other=0.0)
        part = tl.where(den == 0, 0.0, 1.0 / tl.maximum(den, EPS * scale))
        tl.store(h + token + n, tl.where(den < EPS * scale, 0.0, -dots * part), mask=ok)
    else:
        part = 1.0 / scale
        tl.store(h + token + n, tl.zeros([BT], ACC), mask=ok)
    tl.store(inverse + token + n, part, mask=ok)


@jit
def score_gradients(
    do, do_t, v, v_t, inverse, h, n, sees, ok_i, ok_j,
    E: tl.constexpr, BE: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """da_ij = g_i . v_j + h_i where i sees j, `[i, j]`."""
    inverse_i = tl.load(inverse + n, mask=ok_i, other=0.0)
    h_i = tl.load(h + n, mask=ok_i, other=0.0)
    da = tl.zeros([n.shape[0], n.shape[0]], ACC)
    for start in range(0, E, BE):
        e = start + tl.arange(0, BE)
        v_j = tile(v, n, v_t, ok_j, e, E, ACC)
        da += product(tile(do, n, do_t, ok_i, e, E, ACC), tl.trans(v_j), PRECISION, "")
    return tl.where(sees & ok_i[:, None], da * inverse_i[:, None] + h_i[:, None], 0.0)


@jit
def query_gradients(
    q, k, v, x, y, decay, mask, places, do, scale_in, inverse, h, states, dq, dx_out, qdq,
    T, n_blocks, n_slots, n_rows, heads, q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t,
    do_b, do_h, do_t, dq_b, dq_h, dq_t,
    F: tl.constexpr, E: tl.constexpr, RANK: tl.constexpr, MAP: tl.constexpr,
    GATED: tl.constexpr, MASKED: tl.constexpr, CAUSAL: tl.constexpr, INNER: tl.constexpr,
    CHUNK: tl.constexpr, BT: tl.constexpr, BF: tl.constexpr, BE: tl.constexpr, BR: tl.constexpr,
    ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of a block of queries and of x; with INNER also q . dq, for the gates.

    A program has some of the features; what it adds to dx and q . dq are their shares.
    """
    row = tl.program_id(0) // n_blocks
    block = tl.program_id(0) % n_blocks
    f = tl.program_id(1) * BF + tl.arange(0, BF)
    n = tl.arange(0, BT)
    ranks = tl.arange(0, BR)
    batch, head, row = (row // heads).to(tl.int64), (row % heads).to(tl.int64), row.to(tl.int64)
    first, begin, end, slot = place_of(places, block, T, BT, CHUNK)
    token = row * T + first
    _, ok, c_i = block_of(mask, decay, batch, row, first, T, end, GATED, False, BT)
    q = at(q, batch, head, first, q_b, q_h, q_t)
    do = at(do, batch, head, first, do_b, do_h, do_t)
    if RANK > 0:
        x += token * RANK
    scale = tl.load(scale_in + token + n, mask=ok, other=1.0)
    fq = features(q, n, q_t, ok, f, F, MAP, ACC, PRECISION) * scale[:, None]
    dfq = tl.zeros([BT, BF], ACC)
    dx = tl.zeros([BT, BR], ACC)
    if CAUSAL:
        for before in range((first - begin) // BT + 1):
            first_j = begin + before * BT
            _, ok_j, c_j = block_of(mask, decay, batch, row, first_j, T, end, GATED, MASKED, BT)
            fk = features(
                at(k, batch, head, first_j, k_b, k_h, k_t), n, k_t, ok_j, f, F, MAP, ACC, PRECISION
            )
            v_j = at(v, batch, head, first_j, v_b, v_h, v_t)
            y_j = y
            if RANK > 0:
                y_j = y + (row * T + first_j) * RANK
            sees = ((first_j + n)[None, :] <= (first + n)[:, None]) & ok_j[None, :]
            da = score_gradients(
                do, do_t, v_j, v_t, inverse + token, h + token, n, sees, ok, ok_j,
                E, BE, ACC, PRECISION,
            )  # fmt: skip
            turned, fade = weights_between(x, y_j, c_i, c_j, n, ok, ok_j, RANK, GATED, ACC)
            da = da * fade
            if GATED == 2:
                token_j = row * T + first_j
                dfq += gated_to_queries(
                    da * turned, fq, fk, decay, token, token_j, n, ok, ok_j, f, F, ACC, PRECISION
                )
            else:
                dfq += product(da * turned, fk, PRECISION, "a")
            if RANK > 0:
                if GATED == 2:
                    dweights = da * gated_scores(
                        fq, fk, decay, token, token_j, n, ok, ok_j, f, F, ACC, PRECISION
                    )
                else:
                    dweights = da * product(fq, tl.trans(fk), PRECISION, "")
                for r in range(RANK):
                    y_r = tl.load(y_j + n * RANK + r, mask=ok_j, other=0.0)
                    share = tl.sum(dweights * y_r[None, :], 1)
                    dx += tl.where((ranks == r)[None, :], share[:, None], 0.0)

    R: tl.constexpr = RANK if RANK > 0 else 1
    slot = slot if CAUSAL else n_slots - 1
    states += (row * n_slots + slot) * (R * F * (E + 1))
    inverse_i = tl.load(inverse + token + n, mask=ok, other=0.0)
    h_i = tl.load(h + token + n, mask=ok, other=0.0)
    for r in range(R):
        k_sum = tl.load(states + R * F * E + r * F + f, mask=f < F, other=0.0)
        part = tl.zeros([BT, BF], ACC)
        for start in range(0, E, BE):
            e = start + tl.arange(0, BE)
            kv = tile(states + r * F * E, f, E, f < F, e, E, ACC)
            part += product(tile(do, n, do_t, ok, e, E, ACC), tl.trans(kv), PRECISION, "b")
        part = part * inverse_i[:, None] + h_i[:, None] * k_sum[None, :]
        if GATED == 1:
            part = part * left(c_i, ACC)[:, None]
        if GATED == 2:
            part = part * left(decays_of(decay, token, n, ok, f, F), ACC)
        if RANK > 0:
            dx += tl.where((ranks == r)[None, :], tl.sum(part * fq, 1)[:, None], 0.0)
            part = part * tl.load(x + n * RANK + r, mask=ok, other=0.0)[:, None]
        dfq += part

    grad = through_the_map(dfq * scale[:, None], q, n, q_t, ok, f, F, MAP)
    put(grad, at(dq, batch, head, first, dq_b, dq_h, dq_t), n, dq_t, ok, f, F)
    share = (tl.program_id(1) * n_rows + row) * T + first
    if RANK > 0:
        put(dx, dx_out + share * RANK, n, RANK, ok, ranks, RANK)
    if INNER and GATED == 2:
        put(fq * dfq, qdq + token * F, n, F, ok, f, F)
    elif INNER:
        tl.store(qdq + share + n, tl.sum(fq * dfq, 1), mask=ok)


@jit
def key_gradients(
    q, k, v, x, y, decay, mask, places, do, scale_in, inverse, h, states, dk, dy_out, kdk,
    T, n_blocks, n_slots, n_rows, heads, q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t,
    do_b, do_h, do_t, dk_b, dk_h, dk_t,
    F: tl.constexpr, E: tl.constexpr, RANK: tl.constexpr, MAP: tl.constexpr,
    GATED: tl.constexpr, MASKED: tl.constexpr, CAUSAL: tl.constexpr, INNER: tl.constexpr,
    CHUNK: tl.constexpr, BT: tl.constexpr, BF: tl.constexpr, BE: tl.constexpr, BR: tl.constexpr,
    ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of a block of keys and of y, and k . dk: as `query_gradients`.

    `states` holds the gradient of the state after each chunk.
    """
    row = tl.program_id(0) // n_blocks
    block = tl.program_id(0) % n_blocks
    f = tl.program_id(1) * BF + tl.arange(0, BF)
    n = tl.arange(0, BT)
    ranks = tl.arange(0, BR)
    batch, head, row = (row // heads).to(tl.int64), (row % heads).to(tl.int64), row.to(tl.int64)
    first, _begin, end, slot = place_of(places, block, T, BT, CHUNK)
    token = row * T + first
    inside, ok, c_j = block_of(mask, decay, batch, row, first, T, end, GATED, MASKED, BT)
    k = at(k, batch, head, first, k_b, k_h, k_t)
    v = at(v, batch, head, first, v_b, v_h, v_t)
    if RANK > 0:
        y += token * RANK
    fk = features(k, n, k_t, ok, f, F, MAP, ACC, PRECISION)
    dfk = tl.zeros([BT, BF], ACC)
    dy = tl.zeros([BT, BR], ACC)
    if CAUSAL:
        for after in range((end - first + BT - 1) // BT):
            first_i = first + after * BT
            token_i = row * T + first_i
            _, ok_i, c_i = block_of(mask, decay, batch, row, first_i, T, end, GATED, False, BT)
            x_i = x
            if RANK > 0:
                x_i = x + token_i * RANK
            scale = tl.load(scale_in + token_i + n, mask=ok_i, other=1.0)
            fq = features(
                at(q, batch, head, first_i, q_b, q_h, q_t), n, q_t, ok_i, f, F, MAP, ACC, PRECISION
            )
            fq = fq * scale[:, None]
            sees = ((first + n)[None, :] <= (first_i + n)[:, None]) & ok[None, :]
            da = score_gradients(
                at(do, batch, head, first_i, do_b, do_h, do_t), do_t, v, v_t,
                inverse + token_i, h + token_i, n, sees, ok_i, ok, E, BE, ACC, PRECISION,
            )  # fmt: skip
            turned, fade = weights_between(x_i, y, c_i, c_j, n, ok_i, ok, RANK, GATED, ACC)
            da = da * fade
            if GATED == 2:
                dfk += gated_to_keys(
                    da * turned, fq, fk, decay, token_i, token, n, ok_i, ok, f, F, ACC, PRECISION
                )
            else:
                dfk += product(tl.trans(da * turned), fq, PRECISION, "a")
            if RANK > 0:
                if GATED == 2:
                    dweights = da * gated_scores(
                        fq, fk, decay, token_i, token, n, ok_i, ok, f, F, ACC, PRECISION
                    )
                else:
                    dweights = da * product(fq, tl.trans(fk), PRECISION, "")
                for r in range(RANK):
                    x_r = tl.load(x_i + n * RANK + r, mask=ok_i, other=0.0)
                    share = tl.sum(dweights * x_r[:, None], 0)
                    dy += tl.where((ranks == r)[None, :], share[:, None], 0.0)

    R: tl.constexpr = RANK if RANK > 0 else 1
    slot = slot if CAUSAL else n_slots - 1
    states += (row * n_slots + slot) * (R * F * (E + 1))
    if GATED == 1:
        until = left(tl.load(decay + row * T + end - 1) - c_j, ACC)[:, None]
    if GATED == 2:
        until = left_until(decay, token, row * T + end - 1, n, inside, f, F, ACC)
    for r in range(R):
        k_sum = tl.load(states + R * F * E + r * F + f, mask=f < F, other=0.0)
        part = tl.zeros([BT, BF], ACC) + k_sum[None, :]
        for start in range(0, E, BE):
            e = start + tl.arange(0, BE)
            kv = tile(states + r * F * E, f, E, f < F, e, E, ACC)
            part += product(tile(v, n, v_t, ok, e, E, ACC), tl.trans(kv), PRECISION, "b")
        if GATED:
            part = part * until
        if RANK > 0:
            dy += tl.where((ranks == r)[None, :], tl.sum(part * fk, 1)[:, None], 0.0)
            part = part * tl.load(y + n * RANK + r, mask=ok, other=0.0)[:, None]
        dfk += part

    dfk = tl.where(ok[:, None], dfk, 0.0)
    grad = through_the_map(dfk, k, n, k_t, ok, f, F, MAP)
    put(grad, at(dk, batch, head, first, dk_b, dk_h, dk_t), n, dk_t, inside, f, F)
    share = (tl.program_id(1) * n_rows + row) * T + first
    if RANK > 0:
        put(tl.where(ok[:, None], dy, 0.0), dy_out + share * RANK, n, RANK, inside, ranks, RANK)
    if INNER and GATED == 2:
        put(fk * dfk, kdk + token * F, n, F, inside, f, F)
    elif INNER:
        tl.store(kdk + share + n, tl.sum(fk * dfk, 1), mask=inside)


@jit
def value_gradients(
    q, k, x, y, decay, mask, places, do, scale_in, inverse, states, dv,
    T, n_blocks, n_slots, heads, q_b, q_h, q_t, k_b, k_h, k_t, do_b, do_h, do_t, dv_b, dv_h, dv_t,
    F: tl.constexpr, E: tl.constexpr, RANK: tl.constexpr, MAP: tl.constexpr,
    GATED: tl.constexpr, MASKED: tl.constexpr, CAUSAL: tl.constexpr,
    CHUNK: tl.constexpr, BT: tl.constexpr, BF: tl.constexpr, BE: tl.constexpr,
    ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of a block of values: dv_j = sum_i a_ij g_i + until_j fk_j dkv."""
    row = tl.program_id(0) // n_blocks
    block = tl.program_id(0) % n_blocks
    e = tl.program_id(1) * BE + tl.arange(0, BE)
    n = tl.arange(0, BT)
    columns = tl.arange(0, BF)
    batch, head, row = (row // heads).to(tl.int64), (row % heads).to(tl.int64), row.to(tl.int64)
    first, _begin, end, slot = place_of(places, block, T, BT, CHUNK)
    token = row * T + first
    inside, ok, c_j = block_of(mask, decay, batch, row, first, T, end, GATED, MASKED, BT)
    k = at(k, batch, head, first, k_b, k_h, k_t)
    if RANK > 0:
        y += token * RANK
    grad = tl.zeros([BT, BE], ACC)
    if CAUSAL:
        for after in range((end - first + BT - 1) // BT):
            first_i = first + after * BT
            token_i = row * T + first_i
            _, ok_i, c_i = block_of(mask, decay, batch, row, first_i, T, end, GATED, False, BT)
            q_i = at(q, batch, head, first_i, q_b, q_h, q_t)
            x_i = x
            if RANK > 0:
                x_i = x + token_i * RANK
            scale = tl.load(scale_in + token_i + n, mask=ok_i, other=1.0)
            scores = tl.zeros([BT, BT], ACC)
            for start in range(0, F, BF):
                f = start + columns
                fq = features(q_i, n, q_t, ok_i, f, F, MAP, ACC, PRECISION) * scale[:, None]
                fk = features(k, n, k_t, ok, f, F, MAP, ACC, PRECISION)
                if GATED == 2:
                    scores += gated_scores(
                        fq, fk, decay, token_i, token, n, ok_i, ok, f, F, ACC, PRECISION
                    )
                else:
                    scores += product(fq, tl.trans(fk), PRECISION, "")
            turned, fade = weights_between(x_i, y, c_i, c_j, n, ok_i, ok, RANK, GATED, ACC)
            sees = ((first + n)[None, :] <= (first_i + n)[:, None]) & ok[None, :]
            inverse_i = tl.load(inverse + token_i + n, mask=ok_i, other=0.0)
            scores = tl.where(sees, scores * turned * fade * inverse_i[:, None], 0.0)
            do_i = tile(at(do, batch, head, first_i, do_b, do_h, do_t), n, do_t, ok_i, e, E, ACC)
            grad += product(tl.trans(scores), do_i, PRECISION, "a")

    R: tl.constexpr = RANK if RANK > 0 else 1
    slot = slot if CAUSAL else n_slots - 1
    states += (row * n_slots + slot) * (R * F * (E + 1))
    until = tl.full([BT], 1.0, ACC)
    if GATED == 1:
        until = left(tl.load(decay + row * T + end - 1) - c_j, ACC)
    COMPUTED: tl.constexpr = "ab" if GATED == 2 else "b"
    for r in range(R):
        weight = until
        if RANK > 0:
            weight = weight * tl.load(y + n * RANK + r, mask=ok, other=0.0)
        for start in range(0, F, BF):
            f = start + columns
            fk = features(k, n, k_t, ok, f, F, MAP, ACC, PRECISION)
            kv = tile(states + r * F * E, f, E, f < F, e, E, ACC)
            if GATED == 2:
                fk = fk * left_until(decay, token, row * T + end - 1, n, inside, f, F, ACC)
            grad += weight[:, None] * product(fk, kv, PRECISION, COMPUTED)
    grad = tl.where(ok[:, None], grad, 0.0)
    put(grad, at(dv, batch, head, first, dv_b, dv_h, dv_t), n, dv_t, inside, e, E)


@jit
def gate_gradients(
    qdq, kdk, inner, places, dgate, T, n_chunks, n_rows, n_shares, n_tiles,
    CHUNK: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """dl_i = sum_{m >= i} (q_m . dq_m - k_m . dk_m) + S . dS after the chunk."""
    row = (tl.program_id(0) // n_chunks).to(tl.int64)
    chunk = tl.program_id(0) % n_chunks
    first, _, end, _ = place_of(places, chunk, T, CHUNK, CHUNK)
    i = first + tl.arange(0, CHUNK)
    d = tl.zeros([CHUNK], ACC)
    for n in range(n_shares):
        place = (tl.full([], n, tl.int64) * n_rows + row) * T + i
        d += tl.load(qdq + place, mask=i < end, other=0.0)
        d -= tl.load(kdk + place, mask=i < end, other=0.0)
    after = tl.zeros([], tl.float64)
    for n in range(n_tiles):
        after += tl.load(inner + (tl.full([], n, tl.int64) * n_rows + row) * n_chunks + chunk)
    d = tl.cumsum(d, 0, reverse=True) + after.to(ACC)
    tl.store(dgate + row * T + i, d.to(dgate.dtype.element_ty), mask=i < end)


@jit
def feature_gate_gradients(
    qdq, kdk, states, dstates, places, dgate, T, n_chunks, n_slots,
    F: tl.constexpr, E: tl.constexpr, RANK: tl.constexpr,
    CHUNK: tl.constexpr, BF: tl.constexpr, BE: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """As `gate_gradients`, of each feature by itself."""
    row = (tl.program_id(0) // n_chunks).to(tl.int64)
    first, _, end, slot = place_of(places, tl.program_id(0) % n_chunks, T, CHUNK, CHUNK)
    f = tl.program_id(1) * BF + tl.arange(0, BF)
    R: tl.constexpr = RANK if RANK > 0 else 1
    states += (row * n_slots + slot + 1) * (R * F * (E + 1))
    dstates += (row * n_slots + slot) * (R * F * (E + 1))
    after = tl.zeros([BF], tl.float64)
    for r in range(R):
        k_sum = R * F * E + r * F + f
        total = tl.load(states + k_sum, mask=f < F, other=0.0).to(tl.float64)
        after += total * tl.load(dstates + k_sum, mask=f < F, other=0.0)
        for start in range(0, E, BE):
            e = start + tl.arange(0, BE)
            kv = tile(states + r * F * E, f, E, f < F, e, E, tl.float64)
            after += tl.sum(kv * tile(dstates + r * F * E, f, E, f < F, e, E, tl.float64), 1)
    n = tl.arange(0, CHUNK)
    ok = first + n < end
    token = (row * T + first) * F
    d = tile(qdq + token, n, F, ok, f, F, ACC) - tile(kdk + token, n, F, ok, f, F, ACC)
    d = tl.cumsum(d, 0, reverse=True) + after.to(ACC)[None, :]
    put(d, dgate + token, n, F, ok, f, F)
