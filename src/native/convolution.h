/* A short causal convolution over tokens, each channel by itself, SiLU after it, and their gradients.

    z_t = sum_j w_j x_{t - n + 1 + j}        j = 0 ... n - 1; before the first token stands the past
    y_t = z_t sigmoid(z_t)                   or z_t itself

    dz_t = dy_t sigmoid(z_t) (1 + z_t (1 - sigmoid(z_t)))        z is computed again
    dw_j = sum_t dz_t x_{t - n + 1 + j}      in double precision from stretch to stretch
    dx_i = sum_j w_j dz_{i + n - 1 - j}      known as soon as dz is n - 1 tokens further

Tokens are read one after the other, and their channels by vectors. */

#pragma once
#include "block.h"

namespace {

constexpr int SUMMED = 512; /* Tokens whose part of dw is summed in single precision. */

struct Convolutions {
    const Convolution &a;
    const int n, d, wide; /* wide: d, rounded up to vectors */
    float *taps, *dz, *dw;

    Convolutions(const Convolution &call, Memory &m) : a(call), n((int)a.taps), d((int)a.channels), wide((d + W - 1) / W * W) {
        taps = m.take((int64_t)n * wide), dz = m.take((int64_t)n * wide), dw = m.take((int64_t)n * wide);
        if (!taps) return;
        clear(taps, (int64_t)n * wide);
        for (int c = 0; c < d; c++)
            for (int j = 0; j < n; j++) taps[j * wide + c] = a.weight[c * n + j];
    }

    void forward(int64_t b) {
        for (int64_t t = 0; t < a.tokens; t++) {
            float *y = a.y + (b * a.tokens + t) * d;
            each([&](int c, auto some) {
                vf z = met(b, t, c, some);
                put(y + c, a.silu ? z * sigmoid(z) : z, some);
            });
        }
    }

    void backward(int64_t b) {
        double *dweight = a.dweight + b * n * d; /* [n, d] */
        for (int64_t i = 0; i < (int64_t)n * d; i++) dweight[i] = 0;
        clear(dz, (int64_t)n * wide), clear(dw, (int64_t)n * wide);
        for (int64_t s = 0; s < a.tokens + n - 1; s++) {
            float *now = dz + s % n * wide;
            int64_t i = s - n + 1;
            float *dx = i < 0 ? a.dpast + (b * (n - 1) + n - 1 + i) * d : a.dx + (b * a.tokens + i) * d;
            each([&](int c, auto some) {
                vf g = {};
                if (s < a.tokens) {
                    g = get(a.dy + (b * a.tokens + s) * d + c, some);
                    if (a.silu) {
                        vf z = met(b, s, c, some), part = sigmoid(z);
                        g *= part * (all(1) + z * (all(1) - part));
                    }
                    for (int j = 0; j < n; j++)
                        store(dw + j * wide + c, load(dw + j * wide + c) + g * get(row(b, s - n + 1 + j) + c, some));
                }
                store(now + c, g);
                vf total = {};
                for (int m = 0; m < n; m++)
                    if (i + m >= 0) total += load(taps + (n - 1 - m) * wide + c) * load(dz + (i + m) % n * wide + c);
                put(dx + c, total, some);
            });
            if (s % SUMMED == SUMMED - 1 || s == a.tokens + n - 2) {
                for (int j = 0; j < n; j++)
                    for (int c = 0; c < d; c++) dweight[j * d + c] += dw[j * wide + c];
                clear(dw, (int64_t)n * wide);
            }
        }
    }

private:
    /* Call body(c, Number<1>) for whole vectors of channels and body(c, Number<0>) for those that are left. */
    template <class Body> ALWAYS_MEMBER void each(Body body) {
        int c = 0;
        for (; c + W <= d; c += W) body(c, Number<1>());
        if (c < d) body(c, Number<0>());
    }
    template <int N> ALWAYS_MEMBER vf get(const float *p, Number<N>) const {
        if (N) return load(p);
        float some[W] = {};
        memcpy(some, p, d % W * sizeof(float));
        return load(some);
    }
    template <int N> ALWAYS_MEMBER void put(float *p, vf x, Number<N>) const {
        if (N) return store(p, x);
        float some[W];
        store(some, x);
        memcpy(p, some, d % W * sizeof(float));
    }
    ALWAYS_MEMBER const float *row(int64_t b, int64_t t) const {
        return t < 0 ? a.past + (b * (n - 1) + n - 1 + t) * d : a.x + b * a.x_stride[0] + t * a.x_stride[1];
    }
    template <int N> ALWAYS_MEMBER vf met(int64_t b, int64_t t, int c, Number<N> some) const {
        vf z = {};
        for (int j = 0; j < n; j++) z += load(taps + j * wide + c) * get(row(b, t - n + 1 + j) + c, some);
        return z;
    }
};

} // namespace
