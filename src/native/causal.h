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
the products need it. */

#pragma once
#include "state.h"

namespace {

constexpr int STRETCH = 16; /* Chunks from one kept state to the next. */

struct Forward {
    const Sizes s;
    Chunk c;
    Sums sums;
    Ahead ahead;
    float *scores, *out, *totals; /* [C, C], [C, ep] and [C, W] */

    Forward(const Attention &a, Memory &m) : s(a), c(s, m), sums(s, m) {
        scores = m.take(C * C), out = m.take(C * s.ep), totals = m.take(C * W);
        ahead.add(a.q, s.f), ahead.add(a.k, s.f), ahead.add(a.v, s.e), ahead.add(a.o, s.e);
    }

    void run(const Attention &a, int64_t row) {
        int64_t b = row / a.heads, h = row % a.heads;
        sums.begin(a, row);
        c.faded = 0;
        for (int64_t t = 0, i = 0; t < a.tokens; t += C, i++) {
            if (i && i % FAR == 0) sums.settle(), sums.round();
            const float *state = sums.now();
            if (i % STRETCH == 0) {
                float *mark = a.marks + (i / STRETCH * a.batch * a.heads + row) * s.state();
                memcpy(mark, state, s.state() * sizeof(float));
            }
            c.read(a, b, h, t);
            ahead.begin(a.tokens, b, h, t + C);
            attend(a, state, row, b, h, t);
            sums.read(c, ahead);
        }
        sums.settle();
    }

    void attend(const Attention &a, const float *state, int64_t row, int64_t b, int64_t h, int64_t t) {
        const float *kv = state, *k_sum = state + (int64_t)s.F * s.ep;
        for (int i = 0; i < c.rows; i++) store(totals + i * W, c.asked(i, k_sum));
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

struct Backward : Gradients {
    Ahead to_read, to_advance;
    float *states;           /* [STRETCH + 1, ep F + F]: kv transposed, and k_sum */
    float *scores, *dscores; /* [C, C] */
    float *vt;               /* [ep, C] */

    Backward(const Attention &a, Memory &m) : Gradients(a, m) {
        states = m.take((STRETCH + 1) * s.state());
        scores = m.take(C * C), dscores = m.take(C * C), vt = m.take(C * s.ep);
        to_advance.add(a.k, s.f), to_advance.add(a.v, s.e);
        to_read.add(a.q, s.f), to_read.add(a.k, s.f), to_read.add(a.v, s.e);
        to_read.add(a.d_o, s.e), to_read.add(a.o, s.e);
        to_read.add(a.dq, s.f), to_read.add(a.dk, s.f), to_read.add(a.dv, s.e);
    }

    float *state(int i) { return states + i * s.state(); }

    void run(const Attention &a, int64_t row) {
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
                c.read_keys(a, b, head, (first + i) * C);
                to_advance.begin(a.tokens, b, head, (first + i + 1) * C);
                advance(state(i), state(i + 1));
            }
            for (int64_t i = last - 1; i >= first; i--) {
                c.read(a, b, head, i * C);
                through_the_division(a, row, b, head, i * C);
                to_read.begin(a.tokens, b, head, (i - 1) * C);
                take_back(a, state((int)(i - first)), b, head, i * C);
            }
        }
        end(a, row);
    }

    void end(const Attention &a, int64_t row) {
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

    void take_back(const Attention &a, float *state, int64_t b, int64_t head, int64_t t) {
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
        differentiate_queries(kvt, k_sum, to_read);
        differentiate_keys(to_read);
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
        differentiate_state();
        if (a.dgate.data) write_gates(a, later, b, head, t);
        write_queries(a, b, head, t);
        write_keys(a, b, head, t);
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

    void write_gates(const Attention &a, double later, int64_t b, int64_t head, int64_t t) {
        for (int i = c.n - 1; i >= 0; i--) {
            later += (double)dot(c.q + i * s.fp, dq + i * s.fp, s.fp) - dot(c.k + i * s.fp, dk + i * s.fp, s.fp);
            *(float *)at(a.dgate, b, head, t + i) = (float)later;
        }
    }
};

} // namespace
