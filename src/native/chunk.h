/* A chunk: 64 tokens of one head, read where they stand and made ready in the cache.

    q_i = phi(q_i) 2^-n_i        n_i brings the largest feature near 1; a query's scale cancels
    fq_i = [q_i x_i1, ... q_i x_ir] exp(c_i)              for the state before the chunk
    fk_j = [k_j y_j1, ... k_j y_jr] exp(c_n - c_j)        for the state after it
    a_ij = (q_i . k_j) (x_i . y_j) exp(c_i - c_j)         j <= i

c_i = l_1 + ... + l_i adds up the logs of the chunk's gates, in double precision: many that forget
would swallow the digits of those that do not. No exponent is positive. Without re-weighting, r = 0,
and without gates fq and fk are q and k themselves.

Widths are padded with zeros to fp and ep, multiples of 16, so that vectors come out even, and tokens
to a multiple of 8. */

#pragma once
#include "tile.h"

namespace {

constexpr int C = 64;

/* Memory handed out from one block, each piece on a cache line. With no block it only counts. */
struct Memory {
    float *block;
    int64_t used = 0;

    float *take(int64_t n) {
        float *piece = block ? block + used : nullptr;
        used += (n + 15) / 16 * 16;
        return piece;
    }
};

ALWAYS int padded(int64_t n) { return (int)((n + 15) / 16 * 16); }

struct Sizes {
    int f, e, r, fp, ep, parts, F; /* parts: max(r, 1), F: parts fp, the width of the state */
    bool fades;

    explicit Sizes(const Causal &a)
        : f((int)a.features), e((int)a.values), r((int)a.rank), fp(padded(a.features)),
          ep(padded(a.values)), parts(r ? r : 1), F(parts * fp), fades(a.gate.data || a.rate) {}

    int64_t state() const { return (int64_t)F * ep + F; } /* kv and k_sum */
};

struct Chunk {
    const Sizes s;
    int n = 0, rows = 0;          /* tokens, and the same rounded up */
    float *q, *k, *v;             /* [C, fp], [C, fp], [C, ep] */
    float *fq, *fk;               /* [C, F] */
    float *kt;                    /* [fp, C] */
    float *x, *y;                 /* [parts, C] */
    float *scale;                 /* [C] */
    float *since, *until;         /* [C]: exp(c_i) and exp(c_n - c_j) */
    float *between;               /* [C, C]: exp(c_i - c_j) */
    float across = 1;             /* exp(c_n) */
    float *high, *low;            /* [C]: c_i as the sum of two floats */
    bool masked[C];
    bool widens;                  /* whether fq and fk are other than q and k */
    int faded = 0;                /* tokens that a constant rate was last spread over */

    Chunk(const Sizes &sizes, Memory &m) : s(sizes) {
        q = m.take(C * s.fp), k = m.take(C * s.fp), v = m.take(C * s.ep);
        kt = m.take(C * s.fp);
        x = m.take(C * s.parts), y = m.take(C * s.parts);
        scale = m.take(C), since = m.take(C), until = m.take(C);
        high = m.take(C), low = m.take(C);
        between = m.take(s.fades ? C * C : 0);
        widens = s.r > 0 || s.fades;
        fq = widens ? m.take(C * s.F) : q;
        fk = widens ? m.take(C * s.F) : k;
    }

    /* Read tokens t.. of a head; without queries where only the state is to move on. */
    void read(const Causal &a, int64_t b, int64_t h, int64_t t, bool queries) {
        n = (int)(a.tokens - t < C ? a.tokens - t : C);
        rows = (n + 7) / 8 * 8;
        if (s.fades) fade(a, b, h, t);
        for (int i = 0; i < C; i++) {
            masked[i] = i >= n || (a.mask.data && !((const uint8_t *)a.mask.data)[b * a.mask.stride[0] + (t + i) * a.mask.stride[2]]);
            read_token(a, b, h, t, i, masked[i], a.k, a.map_k, k, y, a.y);
            if (masked[i]) clear(v + i * s.ep, s.ep);
            else {
                read_row(v + i * s.ep, at(a.v, b, h, t + i), a.v.type, s.e);
                for (int c = s.e; c < s.ep; c++) v[i * s.ep + c] = 0;
            }
        }
        if (widens) widen(k, y, s.fades ? until : nullptr, fk);
        if (!queries) return;
        for (int i = 0; i < C; i++) {
            read_token(a, b, h, t, i, i >= n, a.q, a.map_q, q, x, a.x);
            scale[i] = bring_near_one(q + i * s.fp);
        }
        if (widens) widen(q, x, s.fades ? since : nullptr, fq);
        transpose(C, s.fp, k, s.fp, kt, C);
    }

    /* How scores of row i and columns j.. are weighed: (x_i . y_j) exp(c_i - c_j). */
    ALWAYS_MEMBER vf weights(int i, int j) const {
        vf w = all(1.0f);
        if (s.r) {
            w = all(x[i]) * load(y + j);
            for (int m = 1; m < s.r; m++) w += all(x[m * C + i]) * load(y + m * C + j);
        }
        return s.fades ? w * load(between + i * C + j) : w;
    }

    /* The gradient of phi at the features of a query or key, times g. */
    ALWAYS_MEMBER void unmap(float *g, const float *feature, float unit, int64_t map, const Causal &a) const {
        if (map == NO_MAP) return;
        vf scaled = all(1 / unit), total = {};
        vf top = exponential(all((float)a.map_limit)), factor = all((float)a.map_scale);
        for (int c = 0; c < s.fp; c += W) {
            vf y = load(feature + c) * scaled, d = load(g + c);
            if (map == RELU) d = keep(d, y > all(0));
            else if (map == ELU_PLUS_ONE) d = d * smaller(y, all(1));
            else if (map == EXP) d = keep(d * y * factor, y < top);
            else d = d * y * factor;
            total += d;
            store(g + c, d);
        }
        if (map != EXP_OF_QUERY) return;
        /* Features are relative to the largest, which takes back what all others gave. */
        int n_top = 0;
        for (int c = 0; c < s.f; c++) n_top += feature[c] == unit;
        float share = n_top ? sum(total) / n_top : 0;
        for (int c = 0; c < s.f; c++)
            if (feature[c] == unit) g[c] -= share;
    }

private:
    void fade(const Causal &a, int64_t b, int64_t h, int64_t t) {
        if (a.rate && faded == n) return;
        bool is_known = a.rate && faded; /* All but the end of the chunk. */
        faded = n;
        double total = 0, c[C];
        for (int i = 0; i < C; i++) {
            if (a.rate) total += a.rate[h];
            else if (i < n) total += *(const float *)at(a.gate, b, h, t + i);
            c[i] = total;
            high[i] = (float)total, low[i] = (float)(total - high[i]);
        }
        across = 0;
        for (int i = 0; i < C; i++) {
            double left = c[n - 1] - c[i];
            since[i] = (float)c[i], until[i] = (float)(left < 0 ? left : 0);
        }
        for (int i = 0; i < C; i += W) {
            store(since + i, exponential(load(since + i)));
            store(until + i, exponential(load(until + i)));
        }
        across = since[n - 1];
        if (is_known) return;
        for (int i = 0; i < C; i++)
            for (int j = 0; j <= i; j += W) {
                vf gap = (all(high[i]) - load(high + j)) + (all(low[i]) - load(low + j));
                store(between + i * C + j, exponential(smaller(gap, all(0))));
            }
        for (int i = 0; i < C; i++) /* What lies above the diagonal is masked, but must be a number. */
            for (int j = i / W * W + W; j < C; j++) between[i * C + j] = 0;
    }

    /* Features of a token, and its numbers of the re-weighting; 0 where there is none. */
    ALWAYS_MEMBER void read_token(const Causal &a, int64_t b, int64_t h, int64_t t, int i, bool none,
                                  const View &from, int64_t map, float *to, float *hands, const View &turns) {
        float *row = to + i * s.fp;
        if (s.r) {
            const float *p = (const float *)turns.data + b * turns.stride[0] + h * turns.stride[1] + (t + i) * turns.stride[2];
            for (int m = 0; m < s.r; m++) hands[m * C + i] = none ? 0 : p[m];
        }
        if (none) return clear(row, s.fp);
        read_row(row, at(from, b, h, t + i), from.type, s.f);
        if (map == RELU)
            for (int c = 0; c < s.fp; c += W) store(row + c, larger(load(row + c), all(0)));
        else if (map == ELU_PLUS_ONE)
            for (int c = 0; c < s.fp; c += W) {
                vf x = load(row + c);
                store(row + c, larger(x, all(0)) + exponential(smaller(x, all(0))));
            }
        else if (map != NO_MAP) {
            float top = row[0];
            for (int c = 1; c < s.f; c++) top = row[c] > top ? row[c] : top;
            vf from_top = all(map == EXP_OF_QUERY ? top : 0), limit = all((float)a.map_limit);
            for (int c = 0; c < s.fp; c += W)
                store(row + c, exponential(smaller(all((float)a.map_scale) * (load(row + c) - from_top), limit)));
        }
        for (int c = s.f; c < s.fp; c++) row[c] = 0;
    }

    /* Scale a query by the power of two that brings its largest feature near 1, and return it. */
    ALWAYS_MEMBER float bring_near_one(float *row) {
        vf most = {};
        for (int c = 0; c < s.fp; c += W) most = larger(magnitude(load(row + c)), most);
        float top = largest(most), unit;
        uint32_t bits;
        memcpy(&bits, &top, 4);
        int exponent = top > 0 ? (int)(bits >> 23) - 126 : 0;
        exponent = exponent > 120 ? 120 : exponent < -120 ? -120 : exponent;
        bits = (uint32_t)(127 - exponent) << 23;
        memcpy(&unit, &bits, 4);
        for (int c = 0; c < s.fp; c += W) store(row + c, load(row + c) * unit);
        return unit;
    }

    void widen(const float *from, const float *hands, const float *left, float *to) {
        for (int i = 0; i < C; i++)
            for (int m = 0; m < s.parts; m++) {
                vf w = all((s.r ? hands[m * C + i] : 1.0f) * (left ? left[i] : 1.0f));
                for (int c = 0; c < s.fp; c += W)
                    store(to + i * s.F + m * s.fp + c, load(from + i * s.fp + c) * w);
            }
    }
};

/* Ask for the tokens of the chunk at t, to find them in the cache when it is their turn. */
ALWAYS void ask_for(const View &x, const Causal &a, int64_t b, int64_t h, int64_t t, int width) {
    if (t < 0 || t >= a.tokens || !x.data) return;
    int64_t n = a.tokens - t < C ? a.tokens - t : C, bytes = width * (x.type == FLOAT32 ? 4 : 2);
    for (int64_t i = 0; i < n; i++) {
        const char *row = (const char *)at(x, b, h, t + i);
        for (int64_t byte = 0; byte < bytes; byte += 64) __builtin_prefetch(row + byte, 0, 2);
    }
}

/* Lanes of columns j.. that row i sees. */
ALWAYS vi up_to(int i, int j) {
    vi lane;
#pragma GCC unroll 16
    for (int l = 0; l < W; l++) lane[l] = l;
    return lane + j <= i;
}

/* Call body(Number<NV>, i, j) for the tiles of a chunk's square that are not all above the diagonal. */
template <class Body> ALWAYS void each_score(int rows, Body body) {
    for (int j = 0; j < rows; j += 2 * W)
        for (int i = j / MR * MR; i < rows; i += MR) body(Number<2>(), i, j);
}

} // namespace
