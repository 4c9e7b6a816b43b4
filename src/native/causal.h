/* Causal linear attention in O(t), a chunk at a time, and its gradients.

    num_i = sum_j a_ij v_j + fq_i kv                   o_i = num_i / max(den_i, eps)
    den_i = sum_j a_ij     + fq_i . k_sum              0 where den_i is
    kv    = exp(c_n) kv + sum_j fk_j v_j^T             k_sum = exp(c_n) k_sum + sum_j fk_j

with a, fq, fk and c as in chunk.h. Backward, with g = do / den and h = -(do . o) / den (0 where the
floor eps holds):

    da_ij = g_i . v_j + h_i                            j <= i
    dv_j  = sum_i a_ij g_i + fk_j dkv                  dkv and dk_sum gather from later chunks:
    dfq_i = kv g_i + k_sum h_i                         dkv    = exp(c_n) dkv    + fq^T g
    dfk_j = dkv v_j + dk_sum                           dk_sum = exp(c_n) dk_sum + fq^T h

and the product rule on a, fq and fk. A gate fades all that lies before it for all that comes after:

    dl_i = sum_{m >= i} (q_m . dq_m - k_m . dk_m) + kv . dkv + k_sum . dk_sum       after the chunk

The state is kept at every 16th chunk; the backward computes those between again, transposed, as
products along e need it. What lies far back is of double precision and added to only now and then:
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
    float left = 1; /* of the far past, since it was last added to */
    bool is_empty;

    Sums(const Sizes &sizes, Memory &m) : s(sizes) {
        near = m.take(s.state()), rounded = m.take(s.state()), both = m.take(s.state());
    }

    void begin(const Causal &a, int64_t row) {
        int64_t width = (int64_t)s.parts * s.f;
        far_kv = a.kv_after + row * width * s.e, far_k = a.k_sum_after + row * width;
        is_empty = !a.kv;
        left = 1;
        clear(near, s.state());
        clear(rounded, s.state());
        if (is_empty) {
            memset(far_kv, 0, width * s.e * sizeof(double));
            memset(far_k, 0, width * sizeof(double));
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

    void read(const Chunk &c) {
        add_product(s.F, s.ep, c.rows, {c.fk, 1, s.F, c.v, s.ep}, near, s.ep, c.across);
        float *k_sum = near + (int64_t)s.F * s.ep;
        for (int f = 0; f < s.F; f += W) {
            vf total = {};
            for (int j = 0; j < c.rows; j++) total += load(c.fk + j * s.F + f);
            store(k_sum + f, load(k_sum + f) * c.across + total);
        }
        left *= c.across;
    }

    /* Add what was read since to the far past. */
    void settle() {
        for (int m = 0; m < s.parts; m++)
            for (int f = 0; f < s.f; f++) {
                const float *from = near + (int64_t)(m * s.fp + f) * s.ep;
                double *to = far_kv + (int64_t)(m * s.f + f) * s.e;
                for (int e = 0; e < s.e; e++) to[e] = to[e] * left + from[e];
                double &k = far_k[m * s.f + f];
                k = k * left + near[(int64_t)s.F * s.ep + m * s.fp + f];
            }
        left = 1, is_empty = false;
    }

    void round() {
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

/* 1 / max(den, floor), and 0 where den is: a query that matches no key has no gradient either. */
ALWAYS float inverse(float den, float floor) { return den == 0 ? 0 : 1 / (den < floor ? floor : den); }

struct Forward {
    const Sizes s;
    Chunk c;
    Sums sums;
    float *scores, *out; /* [C, C] and [C, ep] */

    Forward(const Causal &a, Memory &m) : s(a), c(s, m), sums(s, m) {
        scores = m.take(C * C), out = m.take(C * s.ep);
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
            ask_for(a.q, a, b, h, t + C, s.f);
            ask_for(a.k, a, b, h, t + C, s.f);
            ask_for(a.v, a, b, h, t + C, s.e);
            attend(a, state, row, b, h, t);
            sums.read(c);
        }
        sums.settle();
    }

    void attend(const Causal &a, const float *state, int64_t row, int64_t b, int64_t h, int64_t t) {
        const float *kv = state, *k_sum = state + (int64_t)s.F * s.ep;
        float den[C];
        for (int i = 0; i < c.rows; i++) den[i] = dot(c.fq + i * s.F, k_sum, s.F);
        bool weighs = c.widens;
        each_score(c.rows, [&](auto nv, int i0, int j0) {
            Tile<nv.value> tile;
            tile.clear();
            tile.add({c.q, s.fp, 1, c.kt, C}, i0, j0, 0, s.fp);
            bool whole = j0 + nv.value * W - 1 <= i0;
#pragma GCC unroll 8
            for (int r = 0; r < MR; r++) {
                vf total = {};
#pragma GCC unroll 4
                for (int n = 0; n < nv.value; n++) {
                    int i = i0 + r, j = j0 + n * W;
                    vf y = tile.sum[r][n];
                    if (weighs) y *= c.weights(i, j);
                    if (!whole) y = keep(y, up_to(i, j));
                    store(scores + i * C + j, y);
                    total += y;
                }
                den[i0 + r] += sum(total);
            }
        });
        float by[C];
        for (int i = 0; i < c.rows; i++)
            by[i] = a.normalise ? inverse(den[i], (float)a.eps * c.scale[i]) : 1 / c.scale[i];
        memcpy(a.den + row * a.tokens + t, den, c.n * sizeof(float));
        /* Where a row of the output is as long as one of the tiles, they are written there. */
        bool fits = a.o.type == FLOAT32 && s.e == s.ep && c.n == C;
        float *to = fits ? (float *)at(a.o, b, h, t) : out;
        int ld = fits ? (int)a.o.stride[2] : s.ep;
        each_tile(c.rows, s.ep, [&](auto nv, int i, int n) {
            Tile<nv.value> tile;
            tile.clear();
            tile.add({scores, C, 1, c.v, s.ep}, i, n, 0, i + MR);
            tile.add({c.fq, s.F, 1, kv, s.ep}, i, n, 0, s.F);
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
    float *states;              /* [STRETCH + 1, ep F + F]: kv transposed, and k_sum */
    float *dkv, *dkvt, *dk_sum; /* [F, ep], [ep, F] and [F] */
    float *scores, *dscores;    /* [C, C] */
    float *vt, *g, *wide;       /* [ep, C], [C, ep], [C, F] */
    float *dq, *dk, *dv;        /* [C, fp], [C, fp], [C, ep] */
    float *changes;             /* [C, C]: gradients of the weights x_i . y_j */
    float *dx, *dy;             /* [C, hands]: as many as vectors hold, of which r are used */
    float *x, *y;               /* the same for x and y */
    float h[C];

    Backward(const Causal &a, Memory &m) : s(a), c(s, m) {
        states = m.take((STRETCH + 1) * s.state());
        dkv = m.take(s.F * s.ep), dkvt = m.take(s.F * s.ep), dk_sum = m.take(s.F);
        scores = m.take(C * C), dscores = m.take(C * C);
        vt = m.take(C * s.ep), g = m.take(C * s.ep), wide = m.take(C * s.F);
        dq = m.take(C * s.fp), dk = m.take(C * s.fp), dv = m.take(C * s.ep);
        if (!s.r) return;
        changes = m.take(C * C);
        dx = m.take(C * hands()), dy = m.take(C * hands());
        x = m.take(C * hands()), y = m.take(C * hands());
    }

    int hands() const { return padded(s.r); }
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
                ask_for(a.k, a, b, head, (first + i + 1) * C, s.f);
                ask_for(a.v, a, b, head, (first + i + 1) * C, s.e);
                advance(state(i), state(i + 1));
            }
            for (int64_t i = last - 1; i >= first; i--) {
                c.read(a, b, head, i * C, true);
                through_the_division(a, row, b, head, i * C);
                ask_for(a.q, a, b, head, (i - 1) * C, s.f);
                ask_for(a.k, a, b, head, (i - 1) * C, s.f);
                ask_for(a.v, a, b, head, (i - 1) * C, s.e);
                ask_for(a.d_o, a, b, head, (i - 1) * C, s.e);
                ask_for(a.o, a, b, head, (i - 1) * C, s.e);
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
        each_tile(s.ep, s.F, [&](auto nv, int e, int f) {
            Tile<nv.value> tile;
            tile.clear();
            tile.add({c.v, 1, s.ep, c.fk, s.F}, e, f, 0, c.rows);
#pragma GCC unroll 8
            for (int r = 0; r < MR; r++)
#pragma GCC unroll 4
                for (int n = 0; n < nv.value; n++) {
                    int place = (e + r) * s.F + f + n * W;
                    store(after + place, load(before + place) * c.across + tile.sum[r][n]);
                }
        });
        before += s.F * s.ep, after += s.F * s.ep;
        for (int f = 0; f < s.F; f += W) {
            vf total = {};
            for (int j = 0; j < c.rows; j++) total += load(c.fk + j * s.F + f);
            store(after + f, load(before + f) * c.across + total);
        }
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
        if (s.r) differentiate_weights();
        product(c.rows, s.F, s.ep, {g, s.ep, 1, kvt, s.F}, wide, s.F);
        narrow(c.q, c.x, s.fades ? c.since : nullptr, k_sum, h, dq, dx);
        product(c.rows, s.F, s.ep, {c.v, s.ep, 1, dkvt, s.F}, wide, s.F);
        narrow(c.k, c.y, s.fades ? c.until : nullptr, dk_sum, nullptr, dk, dy);
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
            tile.add({c.fk, s.F, 1, dkv, s.ep}, j, n, 0, s.F);
            tile.store_to(dv + j * s.ep + n, s.ep);
        });
        add_product(s.F, s.ep, c.rows, {c.fq, 1, s.F, g, s.ep}, dkv, s.ep, c.across);
        for (int f = 0; f < s.F; f += W) {
            vf total = {};
            for (int i = 0; i < c.rows; i++) total += load(c.fq + i * s.F + f) * all(h[i]);
            store(dk_sum + f, load(dk_sum + f) * c.across + total);
        }
        write(a, later, b, head, t);
    }

    /* scores = a, dscores = da times its weights, and changes = those of the weights x_i . y_j. */
    void differentiate_scores() {
        bool weighs = c.widens;
        each_score(c.rows, [&](auto nv, int i0, int j0) {
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
                        if (s.fades) change *= load(c.between + i * C + j);
                        store(changes + i * C + j, change);
                    }
                    if (weighs) {
                        vf w = c.weights(i, j);
                        dots *= w, da *= w;
                    }
                    store(scores + i * C + j, dots);
                    store(dscores + i * C + j, da);
                }
            }
        });
    }

    /* dx = changes y and dy = changes^T x, what they have of the chunk itself. */
    void differentiate_weights() {
        int n = hands();
        clear(x, C * n);
        clear(y, C * n);
        for (int i = 0; i < c.rows; i++)
            for (int m = 0; m < s.r; m++) x[i * n + m] = c.x[m * C + i], y[i * n + m] = c.y[m * C + i];
        each_tile(c.rows, n, [&](auto nv, int i, int m) {
            Tile<nv.value> tile;
            tile.clear();
            tile.add({changes, C, 1, y, n}, i, m, 0, i + MR);
            tile.store_to(dx + i * n + m, n);
            tile.clear();
            tile.add({changes, 1, C, x, n}, i, m, i, c.rows);
            tile.store_to(dy + i * n + m, n);
        });
    }

    /* From the gradient of fq (or fk), `wide` + by_i sums, to those of its factors q and x. */
    void narrow(const float *q, const float *x, const float *left, const float *sums, const float *by, float *dq, float *dx) {
        for (int i = 0; i < c.rows; i++) {
            vf times = all(by ? by[i] : 1.0f);
            float kept = left ? left[i] : 1.0f;
            for (int m = 0; m < s.parts; m++) {
                vf w = all((s.r ? x[m * C + i] : 1.0f) * kept), total = {};
                const float *d = wide + i * s.F + m * s.fp, *more = sums + m * s.fp;
                for (int f = 0; f < s.fp; f += W) {
                    vf y = load(d + f) + times * load(more + f);
                    total += y * load(q + i * s.fp + f);
                    float *to = dq + i * s.fp + f;
                    store(to, m ? load(to) + w * y : w * y);
                }
                if (s.r) dx[i * hands() + m] += kept * sum(total);
            }
        }
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
                ((float *)at(a.dx, b, head, t + i))[m] = dx[i * hands() + m];
                ((float *)at(a.dy, b, head, t + i))[m] = c.masked[i] ? 0 : dy[i * hands() + m];
            }
        }
    }
};

} // namespace
