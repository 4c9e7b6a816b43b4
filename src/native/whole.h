/* Linear attention of every query to every key, in O(t + n), and its gradients.

    kv_m  = sum_j k_j (y_jm v_j)^T          k_sum_m = sum_j y_jm k_j        over the real keys
    num_i = sum_m x_im q_i kv_m             o_i = num_i / max(den_i, eps)
    den_i = sum_m x_im q_i . k_sum_m        0 where den_i is

Keys are read a chunk at a time, then queries: all of a state before any of it is asked for. Backward it is
the queries first, which take the gradients of the state together, see state.h, and then the keys. */

#pragma once
#include "state.h"

namespace {

struct WholeForward {
    const Sizes s;
    Chunk c;
    Sums sums;
    Ahead keys, queries;
    float *out, *by; /* [C, ep], [parts, C] */

    WholeForward(const Attention &a, Memory &m) : s(a), c(s, m), sums(s, m) {
        out = m.take(C * s.ep), by = m.take(C * s.parts);
        keys.add(a.k, s.f), keys.add(a.v, s.e);
        queries.add(a.q, s.f), queries.add(a.o, s.e);
    }

    void run(const Attention &a, int64_t row) {
        int64_t b = row / a.heads, h = row % a.heads;
        sums.begin(a, row);
        for (int64_t t = 0, i = 0; t < a.sources; t += C, i++) {
            if (i && i % FAR == 0) sums.settle(), sums.round();
            c.read_keys(a, b, h, t);
            keys.begin(a.sources, b, h, t + C);
            sums.read(c, keys);
        }
        const float *state = sums.now();
        sums.settle();
        for (int64_t t = 0; t < a.tokens; t += C) {
            c.read_queries(a, b, h, t);
            queries.begin(a.tokens, b, h, t + C);
            attend(a, state, row, b, h, t);
        }
    }

    void attend(const Attention &a, const float *state, int64_t row, int64_t b, int64_t h, int64_t t) {
        const float *kv = state, *k_sum = state + (int64_t)s.F * s.ep;
        for (int i = 0; i < c.rows; i++) {
            float den = sum(c.asked(i, k_sum));
            float divided = a.normalise ? inverse(den, (float)a.eps * c.scale[i]) : 1 / c.scale[i];
            if (i < c.n) a.den[row * a.tokens + t + i] = den;
            for (int m = 0; m < s.parts; m++) by[m * C + i] = c.wq ? c.wq[m * C + i] * divided : divided;
        }
        /* Where a row of the output is as long as one of the tiles, they are written there. */
        bool fits = a.o.type == FLOAT32 && s.e == s.ep && c.n == c.rows;
        float *to = fits ? (float *)at(a.o, b, h, t) : out;
        int ld = fits ? (int)a.o.stride[2] : s.ep;
        weighed_product(c.rows, s.ep, s.fp, {c.q, s.fp, 1, kv, s.ep}, {s.parts, s.fp * s.ep, by}, to, ld, queries);
        if (fits) return;
        for (int i = 0; i < c.n; i++) write_row(at(a.o, b, h, t + i), out + i * s.ep, a.o.type, s.e);
    }
};

struct WholeBackward : Gradients {
    Ahead keys, queries;
    float *kv, *kvt, *k_sum; /* [F, ep], [ep, F] and [F] */

    WholeBackward(const Attention &a, Memory &m) : Gradients(a, m) {
        kv = m.take(s.F * s.ep), kvt = m.take(s.F * s.ep), k_sum = m.take(s.F);
        keys.add(a.k, s.f), keys.add(a.v, s.e), keys.add(a.dk, s.f), keys.add(a.dv, s.e);
        queries.add(a.q, s.f), queries.add(a.d_o, s.e), queries.add(a.o, s.e), queries.add(a.dq, s.f);
    }

    void run(const Attention &a, int64_t row) {
        int64_t b = row / a.heads, head = row % a.heads;
        read_state(s, a.kv, a.k_sum, row, kv, k_sum);
        transpose(s.F, s.ep, kv, s.ep, kvt, s.F);
        begin(a, row);
        for (int64_t t = 0; t < a.tokens; t += C) {
            c.read_queries(a, b, head, t);
            queries.begin(a.tokens, b, head, t + C);
            through_the_division(a, row, b, head, t);
            clear(dwq, s.r * C * W);
            differentiate_queries(kvt, k_sum, queries);
            differentiate_state();
            write_queries(a, b, head, t);
        }
        transpose(s.F, s.ep, dkv, s.ep, dkvt, s.F);
        clear(dy, s.r * C);
        for (int64_t t = 0; t < a.sources; t += C) {
            c.read_keys(a, b, head, t);
            keys.begin(a.sources, b, head, t + C);
            differentiate_keys(keys);
            write_keys(a, b, head, t);
        }
    }
};

} // namespace
