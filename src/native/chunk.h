/* A chunk: 64 tokens of one head, read where they stand and made ready in the cache. In the causal
form they are queries and keys, in the whole form, without gates, either.

    q_i = phi(q_i) 2^-n_i        n_i brings the largest feature near 1; a query's scale cancels
    a_ij = (q_i . k_j) (x_i . y_j) exp(c_i - c_j)         j <= i
    wq_im = x_im exp(c_i)                                 how a query reads part m of the state
    wk_jm = y_jm exp(c_n - c_j)                           how a key is added to it

c_i = l_1 + ... + l_i adds up the logs of the chunk's gates, in double precision: many that forget
would swallow the digits of those that do not. No exponent is positive. The state has max(r, 1) parts;
without re-weighting, r = 0, and without gates wq and wk are 1 and not there.

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

    explicit Sizes(const Attention &a)
        : f((int)a.features), e((int)a.values), r((int)a.rank), fp(padded(a.features)),
          ep(padded(a.values)), parts(r ? r : 1), F(parts * fp), fades(a.gate.data || a.rate) {}

    int64_t state() const { return (int64_t)F * ep + F; } /* kv and k_sum */
};

/* Tokens of the next chunk, asked for bit by bit while this one is worked on, to be found in the cache. */
struct Ahead {
    const View *views[8];
    int lines[8], n_views = 0; /* cache lines per token */
    int64_t b, h, next, end;

    void add(const View &x, int width) {
        if (!x.data) return;
        lines[n_views] = (width * (x.type == FLOAT32 ? 4 : 2) + 63) / 64;
        views[n_views++] = &x;
    }
    /* Of `total` tokens those from t on; none if t is negative. */
    void begin(int64_t total, int64_t b_, int64_t h_, int64_t t) {
        b = b_, h = h_, next = t < 0 ? total : t;
        end = total - next < C ? total : next + C;
    }
    void some() {
        if (next >= end) return;
        for (int i = 0; i < n_views; i++) {
            const char *row = (const char *)at(*views[i], b, h, next);
            for (int line = 0; line < lines[i]; line++) __builtin_prefetch(row + line * 64, 0, 2);
        }
        next++;
    }
};

struct Chunk {
    const Sizes s;
    int n = 0, rows = 0;          /* tokens, and the same rounded up */
    float *q, *k, *v;             /* [C, fp], [C, fp], [C, ep] */
    float *kt;                    /* [fp, C] */
    float *x, *y;                 /* [r, C] */
    float *wq, *wk;               /* [parts, C], or null */
    float *scale;                 /* [C] */
    float *since, *until;         /* [C]: exp(c_i) and exp(c_n - c_j) */
    float *between;               /* [C, C]: exp(c_i - c_j) */
    float across = 1;             /* exp(c_n) */
    float *high, *low;            /* [C]: c_i as the sum of two floats */
    bool masked[C];
    bool weighs;                  /* whether scores are other than q . k */
    int faded = 0;                /* tokens that a constant rate was last spread over */

    Chunk(const Sizes &sizes, Memory &m) : s(sizes) {
        q = m.take(C * s.fp), k = m.take(C * s.fp), v = m.take(C * s.ep);
        kt = m.take(C * s.fp);
        x = m.take(C * s.r), y = m.take(C * s.r);
        weighs = s.r > 0 || s.fades;
        wq = weighs ? m.take(C * s.parts) : nullptr;
        wk = weighs ? m.take(C * s.parts) : nullptr;
        scale = m.take(C), since = m.take(C), until = m.take(C);
        high = m.take(C), low = m.take(C);
        between = m.take(s.fades ? C * C : 0);
    }

    /* Read tokens t.. of a head, as queries and as keys. */
    void read(const Attention &a, int64_t b, int64_t h, int64_t t) {
        read_keys(a, b, h, t);
        read_queries(a, b, h, t);
        transpose(C, s.fp, k, s.fp, kt, C);
    }

    void read_keys(const Attention &a, int64_t b, int64_t h, int64_t t) {
        begin(a.sources - t);
        if (s.fades) fade(a, b, h, t);
        const uint8_t *mask = (const uint8_t *)a.mask.data;
        if (mask) mask += b * a.mask.stride[0] + t * a.mask.stride[2];
        for (int i = 0; i < C; i++) masked[i] = i >= n || (mask && !mask[i * a.mask.stride[2]]);
        read_rows<NO_MAP>(a, a.v, b, h, t, masked, v, s.e, s.ep);
        read_features(a, a.k, a.map_k, b, h, t, masked, k);
        read_hands(a.y, b, h, t, masked, y, until, wk);
    }

    void read_queries(const Attention &a, int64_t b, int64_t h, int64_t t) {
        begin(a.tokens - t);
        bool none[C];
        for (int i = 0; i < C; i++) none[i] = i >= n;
        read_features(a, a.q, a.map_q, b, h, t, none, q);
        read_hands(a.x, b, h, t, none, x, since, wq);
        for (int i = 0; i < C; i++) scale[i] = bring_near_one(q + i * s.fp);
    }

    /* to[m, j] = from[j] w_m[j]: rows of `width`, weighed for each part; `from` itself without weights. */
    const float *weighed(const float *from, const float *w, int width, float *to) const {
        if (!w) return from;
        for (int m = 0; m < s.parts; m++)
            for (int j = 0; j < rows; j++) {
                vf by = all(w[m * C + j]);
                for (int c = 0; c < width; c += W)
                    store(to + (m * C + j) * width + c, load(from + j * width + c) * by);
            }
        return to;
    }

    /* sums[m] = kept sums[m] + sum_j w_m[j] from[j], of rows as wide as features. */
    void add_rows(const float *from, const float *w, float kept, float *sums) const {
        for (int m = 0; m < s.parts; m++)
            for (int f = 0; f < s.fp; f += W) {
                vf total[4] = {}; /* In four chains: one would wait for itself. */
                for (int j = 0; j < rows; j += 4)
#pragma GCC unroll 4
                    for (int l = 0; l < 4; l++) {
                        vf x = load(from + (j + l) * s.fp + f);
                        total[l] += w ? all(w[m * C + j + l]) * x : x;
                    }
                float *to = sums + m * s.fp + f;
                store(to, load(to) * kept + ((total[0] + total[1]) + (total[2] + total[3])));
            }
    }

    /* A vector whose sum is what query i has of sums of keys, sum_m wq_im q_i . k_sum_m. */
    ALWAYS_MEMBER vf asked(int i, const float *k_sum) const {
        vf total = {};
        for (int m = 0; m < s.parts; m++) {
            vf part = {};
            for (int f = 0; f < s.fp; f += W) part += load(q + i * s.fp + f) * load(k_sum + m * s.fp + f);
            total += wq ? all(wq[m * C + i]) * part : part;
        }
        return total;
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
    ALWAYS_MEMBER void unmap(float *g, const float *feature, float unit, int64_t map, const Attention &a) const {
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
    void begin(int64_t left) {
        n = (int)(left < C ? left : C);
        rows = (n + 7) / 8 * 8;
    }

    void fade(const Attention &a, int64_t b, int64_t h, int64_t t) {
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

    /* Numbers of the re-weighting, 0 where there is no token, and the weights made of them. */
    void read_hands(const View &from, int64_t b, int64_t h, int64_t t, const bool *none, float *to, const float *left, float *w) {
        if (s.r) {
            const float *p = (const float *)from.data + b * from.stride[0] + h * from.stride[1] + t * from.stride[2];
            for (int i = 0; i < C; i++, p += from.stride[2])
                for (int m = 0; m < s.r; m++) to[m * C + i] = none[i] ? 0 : p[m];
        }
        for (int m = 0; m < (w ? s.parts : 0); m++)
            for (int i = 0; i < C; i += W) {
                vf x = s.r ? load(to + m * C + i) : all(1);
                store(w + m * C + i, s.fades ? x * load(left + i) : x);
            }
    }

    void read_features(const Attention &a, const View &x, int64_t map, int64_t b, int64_t h, int64_t t, const bool *none, float *to) {
        switch (map) {
        case NO_MAP: return read_rows<NO_MAP>(a, x, b, h, t, none, to, s.f, s.fp);
        case RELU: return read_rows<RELU>(a, x, b, h, t, none, to, s.f, s.fp);
        case ELU_PLUS_ONE: return read_rows<ELU_PLUS_ONE>(a, x, b, h, t, none, to, s.f, s.fp);
        case EXP: return read_rows<EXP>(a, x, b, h, t, none, to, s.f, s.fp);
        default: return read_rows<EXP_OF_QUERY>(a, x, b, h, t, none, to, s.f, s.fp);
        }
    }

    /* Rows of numbers, mapped; 0 where there is no token, and beyond their width. */
    template <int MAP>
    void read_rows(const Attention &a, const View &x, int64_t b, int64_t h, int64_t t, const bool *none, float *to, int width, int padded) {
        vf factor = all((float)a.map_scale), limit = all((float)a.map_limit);
        for (int i = 0; i < C; i++, to += padded) {
            if (none[i]) {
                clear(to, padded);
                continue;
            }
            const float *from = (const float *)at(x, b, h, t + i);
            if (x.type != FLOAT32 || width != padded) {
                read_row(to, from, x.type, width);
                from = to;
            }
            vf top = {};
            if (MAP == EXP_OF_QUERY) {
                float most = from[0];
                for (int c = 1; c < width; c++) most = from[c] > most ? from[c] : most;
                top = all(most);
            }
            for (int c = 0; c < padded; c += W) {
                vf y = load(from + c);
                if (MAP == RELU) y = larger(y, all(0));
                if (MAP == ELU_PLUS_ONE) y = larger(y, all(0)) + exponential(smaller(y, all(0)));
                if (MAP == EXP || MAP == EXP_OF_QUERY) y = exponential(smaller(factor * (y - top), limit));
                store(to + c, y);
            }
            for (int c = width; c < padded; c++) to[c] = 0;
        }
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
};

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
