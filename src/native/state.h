/* The state of one head, kv and k_sum, as it moves on, and what is made of it: queries that read it, and
gradients. What lies far back is of double precision and added to only now and then: to add each
chunk to it would round the sum of the whole past each time. */

#pragma once
#include "chunk.h"

namespace {

constexpr int FAR = 128; /* Chunks that are added up in single precision. */

/* The state of a row as callers know it, [r f, e] and [r f], rounded and padded with zeros; 0 for null. */
void read_state(const Sizes &s, const double *kv, const double *k_sum, int64_t row, float *to_kv, float *to_k_sum) {
    clear(to_kv, s.F * s.ep);
    clear(to_k_sum, s.F);
    for (int m = 0; m < s.parts; m++)
        for (int f = 0; f < s.f; f++) {
            int64_t place = row * s.parts * s.f + m * s.f + f;
            float *to = to_kv + (int64_t)(m * s.fp + f) * s.ep;
            if (kv)
                for (int e = 0; e < s.e; e++) to[e] = (float)kv[place * s.e + e];
            if (k_sum) to_k_sum[m * s.fp + f] = (float)k_sum[place];
        }
}

/* The state of one head as it moves on: the far past, and what was added since. */
struct Sums {
    const Sizes s;
    double *far_kv, *far_k; /* [r f, e] and [r f], as callers know them */
    float *near, *rounded, *both;
    float *wide; /* [parts, C, ep]: values, weighed */
    float left = 1; /* of the far past, since it was last added to */
    bool is_empty;

    Sums(const Sizes &sizes, Memory &m) : s(sizes) {
        near = m.take(s.state()), rounded = m.take(s.state()), both = m.take(s.state());
        wide = m.take((int64_t)s.parts * C * s.ep);
    }

    void begin(const Attention &a, int64_t row) {
        int64_t width = (int64_t)s.parts * s.f;
        far_kv = a.kv_after + row * width * s.e, far_k = a.k_sum_after + row * width;
        is_empty = !a.kv;
        left = 1;
        if (is_empty) {
            clear(near, s.state());
        } else {
            memcpy(far_kv, a.kv + row * width * s.e, width * s.e * sizeof(double));
            memcpy(far_k, a.k_sum + row * width, width * sizeof(double));
            round();
        }
    }

    /* kv [F, ep], then k_sum [F]. */
    const float *now() {
        if (is_empty) return near;
        for (int64_t i = 0; i < s.state(); i += W)
            store(both + i, load(rounded + i) * left + load(near + i));
        return both;
    }

    void read(const Chunk &c, Ahead &ahead) {
        const float *values = c.weighed(c.v, c.wk, s.ep, wide);
        for (int m = 0; m < s.parts; m++) {
            float *kv = near + (int64_t)m * s.fp * s.ep;
            each_tile(s.fp, s.ep, [&](auto nv, int f, int e) {
                ahead.some();
                Tile<nv.value> tile;
                tile.clear();
                tile.add({c.k, 1, s.fp, values + m * C * s.ep, s.ep}, f, e, 0, c.rows);
                tile.add_to(kv + f * s.ep + e, s.ep, c.across);
            });
        }
        c.add_rows(c.k, c.wk, c.across, near + (int64_t)s.F * s.ep);
        left *= c.across;
    }

    /* Add what was read since to the far past. */
    void settle() {
        for (int m = 0; m < s.parts; m++)
            for (int f = 0; f < s.f; f++) {
                const float *from = near + (int64_t)(m * s.fp + f) * s.ep;
                double *to = far_kv + (int64_t)(m * s.f + f) * s.e;
                double &k = far_k[m * s.f + f], new_k = near[(int64_t)s.F * s.ep + m * s.fp + f];
                if (is_empty) { /* Nothing was written there yet. */
                    for (int e = 0; e < s.e; e++) to[e] = from[e];
                    k = new_k;
                } else {
                    for (int e = 0; e < s.e; e++) to[e] = to[e] * left + from[e];
                    k = k * left + new_k;
                }
            }
        left = 1, is_empty = false;
    }

    void round() {
        read_state(s, far_kv, far_k, 0, rounded, rounded + (int64_t)s.F * s.ep);
        clear(near, s.state());
    }
};

ALWAYS float dot(const float *a, const float *b, int n) {
    vf total = {};
    for (int i = 0; i < n; i += W) total += load(a + i) * load(b + i);
    return sum(total);
}

struct Parts {
    int n, gap;     /* from a matrix to the next */
    const float *w; /* [n, C]; null where all are 1 */
};

/* out[i, n] = sum_m w_mi sum_k a[i, k] b_m[k, n] */
void weighed_product(int rows, int columns, int n_k, Factors f, Parts p, float *out, int ld, Ahead &ahead) {
    each_part(rows, columns, p.n, [&](auto nv, auto several, int i, int n, int m) {
        ahead.some();
        Tile<nv.value> tile;
        tile.clear();
        if constexpr (several.value) {
            tile.add({f.a, f.along_i, f.along_k, f.b + m * p.gap, f.ld}, i, n, 0, n_k, p.gap);
#pragma GCC unroll 8
            for (int r = 0; r < MR; r++) {
                float *to = out + (i + r) * ld + n;
                vf total = m ? load(to) : (vf){};
#pragma GCC unroll 4
                for (int l = 0; l < nv.value; l++) total += all(p.w[(m + l) * C + i + r]) * tile.sum[r][l];
                store(to, total);
            }
        } else {
            tile.add(f, i, n, 0, n_k);
            if (p.w) tile.scale(p.w + i);
            tile.store_to(out + i * ld + n, ld);
        }
    });
}

/* 1 / max(den, floor), and 0 where den is: a query that matches no key has no gradient either. */
ALWAYS float inverse(float den, float floor) { return den == 0 ? 0 : 1 / (den < floor ? floor : den); }

/* Gradients of queries from a state, of keys and values from the gradients of one, and of the state itself:

    uq_im = kv_m g_i + k_sum_m h_i          dq_i = sum_m wq_im uq_im, dwq_im = q_i . uq_im
    uk_jm = dkv_m v_j + dk_sum_m            dk_j = sum_m wk_jm uk_jm, dwk_jm = k_j . uk_jm
    dv_j  = sum_m wk_jm k_j dkv_m
    dkv_m = sum_i q_i (wq_im g_i)^T         dk_sum_m = sum_i wq_im h_i q_i

with g = do / den and h = -(do . o) / den, 0 where the floor eps holds. */
struct Gradients {
    const Sizes s;
    Chunk c;
    float *dkv, *dkvt, *dk_sum; /* [F, ep], [ep, F] and [F] */
    float *g, *wide;            /* [C, ep], [parts, C, fp or ep] */
    float *dq, *dk, *dv;        /* [C, fp], [C, fp], [C, ep] */
    float *dwq, *dwk;           /* [parts, C, W]: vectors whose sums are the gradients of wq and wk */
    float *dx, *dy;             /* [parts, C]: and of x and y */
    float h[C];

    Gradients(const Attention &a, Memory &m) : s(a), c(s, m) {
        dkv = m.take(s.F * s.ep), dkvt = m.take(s.F * s.ep), dk_sum = m.take(s.F);
        g = m.take(C * s.ep), wide = m.take(s.parts * C * (s.fp > s.ep ? s.fp : s.ep));
        dq = m.take(C * s.fp), dk = m.take(C * s.fp), dv = m.take(C * s.ep);
        dwq = m.take(s.r * C * W), dwk = m.take(s.r * C * W);
        dx = m.take(s.parts * C), dy = m.take(s.r * C);
    }

    /* Take the gradients of the state after the last token, which may be null. */
    void begin(const Attention &a, int64_t row) { read_state(s, a.dkv_after, a.dk_sum_after, row, dkv, dk_sum); }

    /* Gradients of the numerators, g, and of the denominators, h. */
    void through_the_division(const Attention &a, int64_t row, int64_t b, int64_t head, int64_t t) {
        float *o = dv; /* A row of memory that is free here. */
        clear(o, s.ep);
        for (int i = 0; i < C; i++) {
            float *gi = g + i * s.ep;
            h[i] = 0;
            if (i >= c.n) {
                clear(gi, s.ep);
                continue;
            }
            read_row(gi, at(a.d_o, b, head, t + i), a.d_o.type, s.e);
            for (int e = s.e; e < s.ep; e++) gi[e] = 0;
            float den = a.den[row * a.tokens + t + i], floor = (float)a.eps * c.scale[i];
            vf by = all(a.normalise ? inverse(den, floor) : 1 / c.scale[i]);
            for (int e = 0; e < s.ep; e += W) store(gi + e, load(gi + e) * by);
            if (!a.normalise || den < floor) continue;
            read_row(o, at(a.o, b, head, t + i), a.o.type, s.e);
            h[i] = -dot(gi, o, s.ep);
        }
    }

    /* Features of queries or keys, how parts of the state weigh them, what is left of that, and gradients. */
    struct Features {
        const float *q, *w, *left;
        float *dq, *dw;
    };

    /* u_m = a b_m + by_i sums_m, dq = sum_m w_m u_m, and what dw_m = q . u_m adds to the gradients of x. */
    void differentiate_features(Factors f, const float *sums, const float *by, Features x, Ahead &ahead) {
        each_part(c.rows, s.fp, s.parts, [&](auto nv, auto several, int i0, int n, int m) {
            ahead.some();
            constexpr bool in_parts = several.value;
            Tile<nv.value> tile;
            tile.clear();
            tile.add({f.a, f.along_i, f.along_k, f.b + m * s.fp, f.ld}, i0, n, 0, s.ep, in_parts ? s.fp : W);
#pragma GCC unroll 8
            for (int r = 0; r < MR; r++) {
                int i = i0 + r;
                vf times = all(by ? by[i] : 1.0f), kept = all(s.fades ? x.left[i] : 1.0f);
                float *dq = x.dq + i * s.fp + n;
                vf total = in_parts && m ? load(dq) : (vf){};
#pragma GCC unroll 4
                for (int l = 0; l < nv.value; l++) {
                    int part = in_parts ? m + l : 0, column = in_parts ? 0 : l * W;
                    vf u = tile.sum[r][l] + times * load(sums + part * s.fp + n + column);
                    vf weighed = x.w ? all(x.w[part * C + i]) * u : u;
                    if (in_parts) total += weighed;
                    else store(dq + column, weighed);
                    if (!s.r) continue;
                    float *dw = x.dw + (part * C + i) * W;
                    store(dw, load(dw) + kept * u * load(x.q + i * s.fp + n + column));
                }
                if (in_parts) store(dq, total);
            }
        });
    }

    void differentiate_queries(const float *kvt, const float *k_sum, Ahead &ahead) {
        differentiate_features({g, s.ep, 1, kvt, s.F}, k_sum, h, {c.q, c.wq, c.since, dq, dwq}, ahead);
    }

    void differentiate_keys(Ahead &ahead) {
        clear(dwk, s.r * C * W);
        differentiate_features({c.v, s.ep, 1, dkvt, s.F}, dk_sum, nullptr, {c.k, c.wk, c.until, dk, dwk}, ahead);
        weighed_product(c.rows, s.ep, s.fp, {c.k, s.fp, 1, dkv, s.ep}, {s.parts, s.fp * s.ep, c.wk}, dv, s.ep, ahead);
    }

    void differentiate_state() {
        const float *upstream = c.weighed(g, c.wq, s.ep, wide);
        for (int m = 0; m < s.parts; m++)
            add_product(s.fp, s.ep, c.rows, {c.q, 1, s.fp, upstream + m * C * s.ep, s.ep}, dkv + m * s.fp * s.ep, s.ep, c.across);
        for (int m = 0; m < s.parts; m++)
            for (int i = 0; i < C; i += W)
                store(dx + m * C + i, c.wq ? load(c.wq + m * C + i) * load(h + i) : load(h + i));
        c.add_rows(c.q, dx, c.across, dk_sum);
    }

    void write_queries(const Attention &a, int64_t b, int64_t head, int64_t t) {
        for (int i = 0; i < c.n; i++) {
            float *dqi = dq + i * s.fp;
            for (int f = 0; f < s.fp; f += W) store(dqi + f, load(dqi + f) * all(c.scale[i]));
            c.unmap(dqi, c.q + i * s.fp, c.scale[i], a.map_q, a);
            write_row(at(a.dq, b, head, t + i), dqi, a.dq.type, s.f);
            for (int m = 0; m < s.r; m++) ((float *)at(a.dx, b, head, t + i))[m] = sum(load(dwq + (m * C + i) * W));
        }
    }

    /* What `dy` holds comes on top of what was found of y through the state. */
    void write_keys(const Attention &a, int64_t b, int64_t head, int64_t t) {
        for (int i = 0; i < c.n; i++) {
            float *dki = dk + i * s.fp;
            if (c.masked[i]) {
                clear(dki, s.fp);
                clear(dv + i * s.ep, s.ep);
            }
            c.unmap(dki, c.k + i * s.fp, 1, a.map_k, a);
            write_row(at(a.dk, b, head, t + i), dki, a.dk.type, s.f);
            write_row(at(a.dv, b, head, t + i), dv + i * s.ep, a.dv.type, s.e);
            for (int m = 0; m < s.r; m++)
                ((float *)at(a.dy, b, head, t + i))[m] = c.masked[i] ? 0 : dy[m * C + i] + sum(load(dwk + (m * C + i) * W));
        }
    }
};

} // namespace
