/* Causal linear attention in O(t), a chunk at a time, and its gradients.

    num_i = sum_j a_ij v_j + sum_m wq_im q_i kv_m           o_i = num_i / max(den_i, eps)
    den_i = sum_j a_ij     + sum_m wq_im q_i . k_sum_m      0 where den_i is
    kv_m  = exp(c_n) kv_m + sum_j k_j (wk_jm v_j)^T         k_sum_m = exp(c_n) k_sum_m + sum_j wk_jm k_j

with a, wq, wk and c as in chunk.h; the state has parts kv_m and k_sum_m. Backward, with g = do / den
and h = -(do . o) / den (0 where the floor eps holds):

    da_ij = g_i . v_j + h_i                                 j <= i
    dv_j  = sum_i a_ij g_i + sum_m wk_jm k_j dkv_m          dkv and dk_sum gather from later chunks:
    uq_im = kv_m g_i + k_sum_m h_i                          dkv_m    = exp(c_n) dkv_m    + sum_i q_i (wq_im g_i)^T
    uk_jm = dkv_m v_j + dk_sum_m                            dk_sum_m = exp(c_n) dk_sum_m + sum_i wq_im h_i q_i
    dq_i  = sum_m wq_im uq_im, dwq_im = q_i . uq_im         and so for k; the rest is the product rule on a

A gate fades all that lies before it for all that comes after:

    dl_i = sum_{m >= i} (q_m . dq_m - k_m . dk_m) + kv . dkv + k_sum . dk_sum       after the chunk

The state is kept at every 16th chunk; the backward computes those between again, transposed, as
the products need it. What lies far back is of double precision and added to only now and then:
to add each chunk to it would round the sum of the whole past each time. */

#pragma once
#include "chunk.h"

namespace {

constexpr int STRETCH = 16;  /* Chunks from one kept state to the next. */
constexpr int STRETCHES = 8; /* Stretches that are added up in single precision. */

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

    void begin(const Causal &a, int64_t row) {
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
                tile.add({c.kt, C, 1, values + m * C * s.ep, s.ep}, f, e, 0, c.rows);
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
        clear(rounded, s.state());
        for (int m = 0; m < s.parts; m++)
            for (int f = 0; f < s.f; f++) {
                float *to = rounded + (int64_t)(m * s.fp + f) * s.ep;
                const double *from = far_kv + (int64_t)(m * s.f + f) * s.e;
                for (int e = 0; e < s.e; e++) to[e] = (float)from[e];
                rounded[(int64_t)s.F * s.ep + m * s.fp + f] = (float)far_k[m * s.f + f];
            }
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

struct Forward {
    const Sizes s;
    Chunk c;
    Sums sums;
    Ahead ahead;
    float *scores, *out, *totals; /* [C, C], [C, ep] and [C, W] */

    Forward(const Causal &a, Memory &m) : s(a), c(s, m), sums(s, m) {
        scores = m.take(C * C), out = m.take(C * s.ep), totals = m.take(C * W);
        ahead.add(a.q, s.f), ahead.add(a.k, s.f), ahead.add(a.v, s.e), ahead.add(a.o, s.e);
    }

    void run(const Causal &a, int64_t row) {
        int64_t b = row / a.heads, h = row % a.heads;
        sums.begin(a, row);
        c.faded = 0;
        for (int64_t t = 0, i = 0; t < a.tokens; t += C, i++) {
            if (i && i % (STRETCH * STRETCHES) == 0) sums.settle(), sums.round();
            const float *state = sums.now();
            if (i % STRETCH == 0) {
                float *mark = a.marks + (i / STRETCH * a.batch * a.heads + row) * s.state();
                memcpy(mark, state, s.state() * sizeof(float));
            }
            c.read(a, b, h, t, true);
            ahead.begin(a, b, h, t + C);
            attend(a, state, row, b, h, t);
            sums.read(c, ahead);
        }
        sums.settle();
    }

    void attend(const Causal &a, const float *state, int64_t row, int64_t b, int64_t h, int64_t t) {
        const float *kv = state, *k_sum = state + (int64_t)s.F * s.ep;
        for (int i = 0; i < c.rows; i++) {
            vf total = {};
            for (int m = 0; m < s.parts; m++) {
                vf part = {};
                for (int f = 0; f < s.fp; f += W) part += load(c.q + i * s.fp + f) * load(k_sum + m * s.fp + f);
                total += c.wq ? all(c.wq[m * C + i]) * part : part;
            }
            store(totals + i * W, total);
        }
        each_score(c.rows, [&](auto nv, int i0, int j0) {
            ahead.some();
            Tile<nv.value> tile;
            tile.clear();
            tile.add({c.q, s.fp, 1, c.kt, C}, i0, j0, 0, s.fp);
            bool whole = j0 + nv.value * W - 1 <= i0;
#pragma GCC unroll 8
            for (int r = 0; r < MR; r++) {
                vf total = load(totals + (i0 + r) * W);
#pragma GCC unroll 4
                for (int n = 0; n < nv.value; n++) {
                    int i = i0 + r, j = j0 + n * W;
                    vf y = tile.sum[r][n];
                    if (c.weighs) y *= c.weights(i, j);
                    if (!whole) y = keep(y, up_to(i, j));
                    store(scores + i * C + j, y);
                    total += y;
                }
                store(totals + (i0 + r) * W, total);
            }
        });
        float by[C], den[C];
        for (int i = 0; i < c.rows; i++) {
            den[i] = sum(load(totals + i * W));
            by[i] = a.normalise ? inverse(den[i], (float)a.eps * c.scale[i]) : 1 / c.scale[i];
        }
        memcpy(a.den + row * a.tokens + t, den, c.n * sizeof(float));
        weighed_product(c.rows, s.ep, s.fp, {c.q, s.fp, 1, kv, s.ep}, {s.parts, s.fp * s.ep, c.wq}, out, s.ep, ahead);
        /* Where a row of the output is as long as one of the tiles, they are written there. */
        bool fits = a.o.type == FLOAT32 && s.e == s.ep && c.n == C;
        float *to = fits ? (float *)at(a.o, b, h, t) : out;
        int ld = fits ? (int)a.o.stride[2] : s.ep;
        each_tile(c.rows, s.ep, [&](auto nv, int i, int n) {
            Tile<nv.value> tile;
            tile.load_from(out + i * s.ep + n, s.ep);
            tile.add({scores, C, 1, c.v, s.ep}, i, n, 0, i + MR);
            tile.scale(by + i);
            tile.store_to(to + (int64_t)i * ld + n, ld);
        });
        if (fits) return;
        for (int i = 0; i < c.n; i++) write_row(at(a.o, b, h, t + i), out + i * s.ep, a.o.type, s.e);
    }
};

struct Backward {
    const Sizes s;
    Chunk c;
    Ahead to_read, to_advance;
    float *states;              /* [STRETCH + 1, ep F + F]: kv transposed, and k_sum */
    float *dkv, *dkvt, *dk_sum; /* [F, ep], [ep, F] and [F] */
    float *scores, *dscores;    /* [C, C] */
    float *vt, *g, *wide;       /* [ep, C], [C, ep], [parts, C, fp or ep] */
    float *dq, *dk, *dv;        /* [C, fp], [C, fp], [C, ep] */
    float *dwq, *dwk;           /* [parts, C, W]: vectors whose sums are the gradients of wq and wk */
    float *dx, *dy;             /* [parts, C]: and of x and y */
    float h[C];

    Backward(const Causal &a, Memory &m) : s(a), c(s, m) {
        states = m.take((STRETCH + 1) * s.state());
        dkv = m.take(s.F * s.ep), dkvt = m.take(s.F * s.ep), dk_sum = m.take(s.F);
        scores = m.take(C * C), dscores = m.take(C * C);
        vt = m.take(C * s.ep), g = m.take(C * s.ep), wide = m.take(s.parts * C * (s.fp > s.ep ? s.fp : s.ep));
        dq = m.take(C * s.fp), dk = m.take(C * s.fp), dv = m.take(C * s.ep);
        dwq = m.take(s.r * C * W), dwk = m.take(s.r * C * W);
        dx = m.take(s.parts * C), dy = m.take(s.r * C);
        to_advance.add(a.k, s.f), to_advance.add(a.v, s.e);
        to_read.add(a.q, s.f), to_read.add(a.k, s.f), to_read.add(a.v, s.e);
        to_read.add(a.d_o, s.e), to_read.add(a.o, s.e);
        to_read.add(a.dq, s.f), to_read.add(a.dk, s.f), to_read.add(a.dv, s.e);
    }

    float *state(int i) { return states + i * s.state(); }

    void run(const Causal &a, int64_t row) {
        int64_t b = row / a.heads, head = row % a.heads;
        begin(a, row);
        c.faded = 0;
        int64_t n_chunks = (a.tokens + C - 1) / C;
        for (int64_t first = (n_chunks - 1) / STRETCH * STRETCH; first >= 0; first -= STRETCH) {
            int64_t last = first + STRETCH < n_chunks ? first + STRETCH : n_chunks;
            const float *mark = a.marks + (first / STRETCH * a.batch * a.heads + row) * s.state();
            transpose(s.F, s.ep, mark, s.ep, state(0), s.F);
            memcpy(state(0) + s.F * s.ep, mark + s.F * s.ep, s.F * sizeof(float));
            /* The state after the last chunk is what a gate's gradient asks for. */
            int64_t n_more = last - first - (a.dgate.data ? 0 : 1);
            for (int i = 0; i < n_more; i++) {
                c.read(a, b, head, (first + i) * C, false);
                to_advance.begin(a, b, head, (first + i + 1) * C);
                advance(state(i), state(i + 1));
            }
            for (int64_t i = last - 1; i >= first; i--) {
                c.read(a, b, head, i * C, true);
                through_the_division(a, row, b, head, i * C);
                to_read.begin(a, b, head, (i - 1) * C);
                take_back(a, state((int)(i - first)), b, head, i * C);
            }
        }
        end(a, row);
    }

    void begin(const Causal &a, int64_t row) {
        clear(dkv, s.F * s.ep);
        clear(dk_sum, s.F);
        int64_t width = (int64_t)s.parts * s.f;
        for (int m = 0; m < s.parts; m++)
            for (int f = 0; f < s.f; f++) {
                int64_t place = row * width + m * s.f + f;
                if (a.dkv_after)
                    for (int e = 0; e < s.e; e++) dkv[(m * s.fp + f) * s.ep + e] = (float)a.dkv_after[place * s.e + e];
                if (a.dk_sum_after) dk_sum[m * s.fp + f] = (float)a.dk_sum_after[place];
            }
    }

    void end(const Causal &a, int64_t row) {
        if (!a.dkv) return;
        int64_t width = (int64_t)s.parts * s.f;
        for (int m = 0; m < s.parts; m++)
            for (int f = 0; f < s.f; f++) {
                int64_t place = row * width + m * s.f + f;
                for (int e = 0; e < s.e; e++) a.dkv[place * s.e + e] = dkv[(m * s.fp + f) * s.ep + e];
                a.dk_sum[place] = dk_sum[m * s.fp + f];
            }
    }

    /* The transposed state after a chunk from the one before. */
    void advance(const float *before, float *after) {
        const float *keys = c.weighed(c.k, c.wk, s.fp, wide);
        for (int m = 0; m < s.parts; m++)
            each_tile(s.ep, s.fp, [&](auto nv, int e, int f) {
                to_advance.some();
                to_advance.some();
                Tile<nv.value> tile;
                tile.clear();
                tile.add({c.v, 1, s.ep, keys + m * C * s.fp, s.fp}, e, f, 0, c.rows);
#pragma GCC unroll 8
                for (int r = 0; r < MR; r++)
#pragma GCC unroll 4
                    for (int n = 0; n < nv.value; n++) {
                        int place = (e + r) * s.F + m * s.fp + f + n * W;
                        store(after + place, load(before + place) * c.across + tile.sum[r][n]);
                    }
            });
        memcpy(after + s.F * s.ep, before + s.F * s.ep, s.F * sizeof(float));
        c.add_rows(c.k, c.wk, c.across, after + s.F * s.ep);
    }

    /* Gradients of the numerators, g, and of the denominators, h. */
    void through_the_division(const Causal &a, int64_t row, int64_t b, int64_t head, int64_t t) {
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

    void take_back(const Causal &a, float *state, int64_t b, int64_t head, int64_t t) {
        const float *kvt = state, *k_sum = state + s.F * s.ep;
        transpose(C, s.ep, c.v, s.ep, vt, C);
        transpose(s.F, s.ep, dkv, s.ep, dkvt, s.F);
        double later = 0;
        if (a.dgate.data) {
            const float *after = state + s.state();
            for (int e = 0; e < s.ep; e++) later += dot(after + e * s.F, dkvt + e * s.F, s.F);
            later += dot(after + s.F * s.ep, dk_sum, s.F);
        }
        differentiate_scores();
        differentiate_features({g, s.ep, 1, kvt, s.F}, k_sum, h, {c.q, c.wq, c.since, dq, dwq});
        clear(dwk, s.r * C * W);
        differentiate_features({c.v, s.ep, 1, dkvt, s.F}, dk_sum, nullptr, {c.k, c.wk, c.until, dk, dwk});
        weighed_product(c.rows, s.ep, s.fp, {c.k, s.fp, 1, dkv, s.ep}, {s.parts, s.fp * s.ep, c.wk}, dv, s.ep, to_read);
        each_tile(c.rows, s.fp, [&](auto nv, int i, int n) {
            Tile<nv.value> tile;
            tile.clear();
            tile.add({dscores, C, 1, c.k, s.fp}, i, n, 0, i + MR);
            tile.add_to(dq + i * s.fp + n, s.fp, 1);
            tile.clear();
            tile.add({dscores, 1, C, c.q, s.fp}, i, n, i, c.rows);
            tile.add_to(dk + i * s.fp + n, s.fp, 1);
        });
        each_tile(c.rows, s.ep, [&](auto nv, int j, int n) {
            Tile<nv.value> tile;
            tile.clear();
            tile.add({scores, 1, C, g, s.ep}, j, n, j, c.rows);
            tile.add_to(dv + j * s.ep + n, s.ep, 1);
        });
        const float *upstream = c.weighed(g, c.wq, s.ep, wide);
        for (int m = 0; m < s.parts; m++)
            add_product(s.fp, s.ep, c.rows, {c.q, 1, s.fp, upstream + m * C * s.ep, s.ep}, dkv + m * s.fp * s.ep, s.ep, c.across);
        for (int m = 0; m < s.parts; m++)
            for (int i = 0; i < C; i += W)
                store(dx + m * C + i, c.wq ? load(c.wq + m * C + i) * load(h + i) : load(h + i));
        c.add_rows(c.q, dx, c.across, dk_sum);
        write(a, later, b, head, t);
    }

    /* scores = a, dscores = da times its weights, and what the weights x_i . y_j of a chunk's own scores
    have of the gradients of x, as vectors to be summed, and of y. */
    void differentiate_scores() {
        clear(dwq, s.r * C * W);
        clear(dy, s.r * C);
        each_score(c.rows, [&](auto nv, int i0, int j0) {
            to_read.some();
            Tile<nv.value> tile;
            tile.clear();
            tile.add({c.q, s.fp, 1, c.kt, C}, i0, j0, 0, s.fp);
            tile.store_to(scores + i0 * C + j0, C);
            tile.clear();
            tile.add({g, s.ep, 1, vt, C}, i0, j0, 0, s.ep);
            bool whole = j0 + nv.value * W - 1 <= i0;
#pragma GCC unroll 8
            for (int r = 0; r < MR; r++) {
                int i = i0 + r;
#pragma GCC unroll 4
                for (int n = 0; n < nv.value; n++) {
                    int j = j0 + n * W;
                    vf dots = load(scores + i * C + j), da = tile.sum[r][n] + all(h[i]);
                    if (!whole) {
                        vi seen = up_to(i, j);
                        dots = keep(dots, seen), da = keep(da, seen);
                    }
                    if (s.r) {
                        vf change = dots * da;
                        tile.sum[r][n] = s.fades ? change * load(c.between + i * C + j) : change;
                    }
                    if (c.weighs) {
                        vf w = c.weights(i, j);
                        dots *= w, da *= w;
                    }
                    store(scores + i * C + j, dots);
                    store(dscores + i * C + j, da);
                }
            }
            for (int m = 0; m < s.r; m++) {
                const float *x = c.x + m * C + i0, *y = c.y + m * C + j0;
                vf change_of_y[nv.value] = {};
#pragma GCC unroll 8
                for (int r = 0; r < MR; r++) {
                    float *to = dwq + (m * C + i0 + r) * W;
                    vf change_of_x = load(to);
#pragma GCC unroll 4
                    for (int n = 0; n < nv.value; n++) {
                        change_of_x += tile.sum[r][n] * load(y + n * W);
                        change_of_y[n] += tile.sum[r][n] * all(x[r]);
                    }
                    store(to, change_of_x);
                }
                for (int n = 0; n < nv.value; n++) {
                    float *to = dy + m * C + j0 + n * W;
                    store(to, load(to) + change_of_y[n]);
                }
            }
        });
    }

    /* Features of queries or keys, how parts of the state weigh them, what is left of that, and gradients. */
    struct Features {
        const float *q, *w, *left;
        float *dq, *dw;
    };

    /* u_m = a b_m + by_i sums_m, dq = sum_m w_m u_m, and what dw_m = q . u_m adds to the gradients of x. */
    void differentiate_features(Factors f, const float *sums, const float *by, Features x) {
        each_part(c.rows, s.fp, s.parts, [&](auto nv, auto several, int i0, int n, int m) {
            to_read.some();
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

    void write(const Causal &a, double later, int64_t b, int64_t head, int64_t t) {
        for (int i = c.n - 1; i >= 0; i--) {
            float *dqi = dq + i * s.fp, *dki = dk + i * s.fp;
            const float *qi = c.q + i * s.fp, *ki = c.k + i * s.fp;
            if (a.dgate.data) {
                later += (double)dot(qi, dqi, s.fp) - dot(ki, dki, s.fp);
                *(float *)at(a.dgate, b, head, t + i) = (float)later;
            }
            for (int f = 0; f < s.fp; f += W) store(dqi + f, load(dqi + f) * all(c.scale[i]));
            c.unmap(dqi, qi, c.scale[i], a.map_q, a);
            write_row(at(a.dq, b, head, t + i), dqi, a.dq.type, s.f);
            if (c.masked[i]) {
                clear(dki, s.fp);
                clear(dv + i * s.ep, s.ep);
            }
            c.unmap(dki, ki, 1, a.map_k, a);
            write_row(at(a.dk, b, head, t + i), dki, a.dk.type, s.f);
            write_row(at(a.dv, b, head, t + i), dv + i * s.ep, a.dv.type, s.e);
            for (int m = 0; m < s.r; m++) {
                ((float *)at(a.dx, b, head, t + i))[m] = sum(load(dwq + (m * C + i) * W));
                ((float *)at(a.dy, b, head, t + i))[m] = c.masked[i] ? 0 : dy[m * C + i] + sum(load(dwk + (m * C + i) * W));
            }
        }
    }
};

} // namespace
