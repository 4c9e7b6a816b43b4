/* Causal linear attention of one more token: decoding, where the state is most of the work.

    kv = g kv + fk v^T        k_sum = g k_sum + fk        o = fq kv / max(fq . k_sum, eps)

fq = [q x_1, ... q x_r] and fk = [k y_1, ... k y_r]. The state is of double precision, in which no
product of three floats overflows; it is read once and written once. */

#pragma once
#include <math.h>

#include "vector.h"

namespace {

ALWAYS float number_at(const View &x, int64_t b, int64_t h) { return *(const float *)at(x, b, h, 0); }

constexpr int WIDEST = 1024; /* Values that are summed at once. */

struct OneStep {
    explicit OneStep(const Step &) {}

    void run(const Step &a, int64_t row) {
        int64_t b = row / a.heads, h = row % a.heads;
        int f = (int)a.features, e = (int)a.values, r = (int)a.rank, parts = r ? r : 1;
        bool real = !a.mask.data || ((const uint8_t *)a.mask.data)[b * a.mask.stride[0]];
        double kept = a.gate.data ? exp((double)number_at(a.gate, b, h)) : 1.0;
        const float *x = r ? (const float *)at(a.x, b, h, 0) : nullptr;
        const float *y = r ? (const float *)at(a.y, b, h, 0) : nullptr;
        int64_t place = row * parts * f;
        for (int e0 = 0; e0 < e; e0 += WIDEST) {
            int n = e - e0 < WIDEST ? e - e0 : WIDEST;
            float v[WIDEST] = {}, out[WIDEST];
            double sums[WIDEST] = {}, den = 0;
            if (real) read_row(v, (char *)at(a.v, b, h, 0) + e0 * (a.v.type == FLOAT32 ? 4 : 2), a.v.type, n);
            for (int m = 0; m < parts; m++)
                for (int i = 0; i < f; i++) {
                    float q, k = 0;
                    read_row(&q, (char *)at(a.q, b, h, 0) + i * (a.q.type == FLOAT32 ? 4 : 2), a.q.type, 1);
                    if (real) read_row(&k, (char *)at(a.k, b, h, 0) + i * (a.k.type == FLOAT32 ? 4 : 2), a.k.type, 1);
                    double fq = r ? q * x[m] : q, fk = !real ? 0 : r ? k * y[m] : k;
                    int64_t at_f = place + m * f + i;
                    double k_sum = a.k_sum[at_f] * kept + fk;
                    a.k_sum_after[at_f] = k_sum;
                    den += fq * k_sum;
                    const double *from = a.kv + at_f * e + e0;
                    double *to = a.kv_after + at_f * e + e0;
                    for (int c = 0; c < n; c++) {
                        double next = from[c] * kept + fk * v[c];
                        to[c] = next;
                        sums[c] += fq * next;
                    }
                }
            double by = !a.normalise ? 1 : den == 0 ? 0 : 1 / (den < a.eps ? a.eps : den);
            for (int c = 0; c < n; c++) out[c] = (float)(sums[c] * by);
            write_row((char *)at(a.o, b, h, 0) + e0 * (a.o.type == FLOAT32 ? 4 : 2), out, a.o.type, n);
        }
    }
};

} // namespace
