/* One token of each row through a block of a transformer around causal linear attention: decoding,
where a layer is some twenty small steps, and calling them one by one is most of the work.

    n = norm(x)
    q, k, v = SiLU(convolution(W_q n)), ...                  the convolution is left out without taps
    l = logsigmoid(W_g n) + rate                             the log of the gate, of each head
    d = softplus(W_s n)                                      TRAVELLED: angle = angle + omega d
    hands = [1, cos, sin, ...] / sqrt(2)                     LEARNED: [sin, cos](pi/2 p), p a net of q, and of k
    kv = e^l kv + (hands fk) v^T,  o = (hands fq) kv / den   as in step.h, with features fq = phi(q), fk = phi(k)
    x = x + W_o (o sigmoid(W_z n))
    x = x + W_2 gelu(W_1 norm(x))

Each formula is that of the layers in src/leap/layers, where the meaning is. Weights are read where
torch keeps them. Sums over the past, angles and logs are of double precision. */

#pragma once
#include <math.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "linear.h"

namespace {

constexpr int MOST_HANDS = 65; /* Numbers of a re-weighting: 32 clocks. */
constexpr double LOWEST = -100, TURN_ = 6.283185307179586;
constexpr float QUARTER_TURN = 1.5707962512969971f; /* The largest float below pi/2. */

ALWAYS vf sigmoid(vf x) { return all(1) / (all(1) + exponential(-x)); }

/* x Phi(x). erfc(z) = t e^(-z^2 + p(t)) with t = 1 / (1 + z / 2), to within 1.2e-7 of itself (Chebyshev). */
ALWAYS vf gelu(vf x) {
    vf z = magnitude(x) * 0.70710678118654752f, t = all(1) / (all(1) + z * 0.5f);
    vf p = t * 0.17087277f - 0.82215223f;
    p = p * t + 1.48851587f;
    p = p * t - 1.13520398f;
    p = p * t + 0.27886807f;
    p = p * t - 0.18628806f;
    p = p * t + 0.09678418f;
    p = p * t + 0.37409196f;
    p = p * t + 1.00002368f;
    p = p * t - 1.26551223f;
    vf tail = all(0.5f) * t * exponential(p - z * z);
    return x * choose(x < all(0), tail, all(1) - tail);
}

/* y = f(x), element by element. */
template <class Function> ALWAYS void map(int64_t n, float *x, Function f) {
    int64_t i = 0;
    for (; i + W <= n; i += W) store(x + i, f(load(x + i)));
    if (i == n) return;
    float rest[W] = {};
    memcpy(rest, x + i, (n - i) * sizeof(float));
    store(rest, f(load(rest)));
    memcpy(x + i, rest, (n - i) * sizeof(float));
}

ALWAYS void add_to(int64_t n, float *x, const float *y) {
    int64_t i = 0;
    for (; i + W <= n; i += W) store(x + i, load(x + i) + load(y + i));
    for (; i < n; i++) x[i] += y[i];
}

void layer_norm(const Norm &norm, int n, const float *x, float *y) {
    float total = 0, square = 0;
    vf sums = {};
    int even = n / W * W;
    for (int i = 0; i < even; i += W) sums += load(x + i);
    for (int i = even; i < n; i++) total += x[i];
    float mean = (total + sum(sums)) / n;
    sums = (vf){};
    for (int i = 0; i < even; i += W) sums += (load(x + i) - mean) * (load(x + i) - mean);
    for (int i = even; i < n; i++) square += (x[i] - mean) * (x[i] - mean);
    float by = (float)(1 / sqrt((square + sum(sums)) / n + norm.eps));
    for (int i = 0; i < n; i++)
        y[i] = (x[i] - mean) * by * norm.weight[i] + (norm.bias ? norm.bias[i] : 0);
}

typedef double vd __attribute__((vector_size(W * 4), aligned(8), may_alias));
constexpr int D = W / 2; /* Doubles in a vector. */
constexpr int64_t LARGE = 1 << 19; /* Doubles of a state from which on several blocks' fit no cache. */

/* Past the caches, where what is written is more than they hold and would push out what is read. */
ALWAYS void stream(double *to, vd x) {
#if defined(__AVX512F__)
    _mm512_stream_pd(to, (__m512d)x);
#elif defined(__AVX2__)
    _mm256_stream_pd(to, (__m256d)x);
#else
    *(vd *)to = x;
#endif
}

/* Move N vectors of each row of the state on, and read them out. */
template <int N, bool PAST_CACHES = false> ALWAYS void move_on(int rows, int64_t ld, const double *from, double *to, double kept, const double *fk, const double *fq, const double *v, double *sums) {
    vd value[N], total[N];
    for (int n = 0; n < N; n++) value[n] = *(const vd *)(v + n * D), total[n] = (vd){};
    for (int i = 0; i < rows; i++, from += ld, to += ld)
#pragma GCC unroll 4
        for (int n = 0; n < N; n++) {
            vd next = *(const vd *)(from + n * D) * kept + fk[i] * value[n];
            if (PAST_CACHES) stream(to + n * D, next);
            else *(vd *)(to + n * D) = next;
            total[n] += fq[i] * next;
        }
    for (int n = 0; n < N; n++) *(vd *)(sums + n * D) = total[n];
}

struct OneToken {
    const Block &a;
    const int rows, d, h, f, e, channels, rank, parts;
    float *normed, *tokens, *gates, *opened, *steps, *units, *attended, *hidden, *out, *turned, *taps;
    float *fq, *fk;
    double *wide_q, *wide_k, *value, *sums;

    OneToken(const Block &block, int batch, Memory &m)
        : a(block), rows(batch), d((int)a.width), h((int)a.heads), f((int)a.features), e((int)a.values),
          channels(h * (2 * f + e)), rank(a.places == TRAVELLED ? 1 + 2 * (int)a.clocks : a.places == LEARNED ? 2 : 0),
          parts(rank ? rank : 1) {
        int64_t b = rows;
        normed = m.take(b * d), tokens = m.take(b * channels);
        gates = m.take(b * h), opened = m.take(b * h * e), steps = m.take(b * h);
        units = m.take((b > h ? b : h) * most_units());
        attended = m.take(b * h * e), hidden = m.take(b * a.up.n_out), out = m.take(b * d);
        turned = m.take(most_scratch());
        taps = m.take(a.taps * channels);
        fq = m.take(padded(f)), fk = m.take(padded(f));
        wide_q = (double *)m.take(2 * parts * f), wide_k = (double *)m.take(2 * parts * f);
        value = (double *)m.take(2 * (e + 4 * D)), sums = (double *)m.take(2 * (e + 4 * D));
    }

    void run(const Past &past, float *x) {
        for (int b = 0; b < rows; b++) layer_norm(a.attention_norm, d, x + b * d, normed + b * d);
        apply(a.q, normed, d, tokens, channels);
        apply(a.k, normed, d, tokens + h * f, channels);
        apply(a.v, normed, d, tokens + 2 * h * f, channels);
        if (a.gate.weight) apply(a.gate, normed, d, gates, h);
        if (a.places == TRAVELLED) step_lengths();
        if (a.taps) convolve(past);
        for (int b = 0; b < rows; b++)
            for (int head = 0; head < h; head++) attend(past, b, head);
        if (a.output_gate.weight) {
            apply(a.output_gate, normed, d, opened, h * e);
            int64_t n = (int64_t)rows * h * e;
            map(n, opened, [](vf z) { return sigmoid(z); });
            for (int64_t i = 0; i < n; i++) attended[i] *= opened[i];
        }
        apply(a.o, attended, h * e, out, d);
        add_to((int64_t)rows * d, x, out);
        for (int b = 0; b < rows; b++) layer_norm(a.feed_forward_norm, d, x + b * d, normed + b * d);
        apply(a.up, normed, d, hidden, a.up.n_out);
        map(rows * a.up.n_out, hidden, [](vf z) { return gelu(z); });
        apply(a.down, hidden, a.up.n_out, out, d);
        add_to((int64_t)rows * d, x, out);
    }

private:
    int64_t most_units() const {
        int64_t most = a.steps[0].n_out;
        most = a.q_place[0].n_out > most ? a.q_place[0].n_out : most;
        return a.k_place[0].n_out > most ? a.k_place[0].n_out : most;
    }
    int64_t most_scratch() const {
        int64_t most = a.up.n_out > d ? a.up.n_out : d;
        most = h * e > most ? h * e : most;
        most = most_units() > most ? most_units() : most;
        return linear_scratch(rows > h ? rows : h, most > f ? most : f);
    }
    void apply(const Linear &l, const float *x, int64_t ld_x, float *y, int64_t ld_y) {
        linear(l, rows, x, ld_x, y, ld_y, turned);
    }

    /* A net of one or two layers, with relu between them. */
    void net(const Linear *l, int n, const float *x, int64_t ld_x, float *y, int64_t ld_y) {
        if (!l[0].weight) return linear(l[1], n, x, ld_x, y, ld_y, turned);
        linear(l[0], n, x, ld_x, units, l[0].n_out, turned);
        map(n * l[0].n_out, units, [](vf z) { return larger(z, all(0)); });
        linear(l[1], n, units, l[0].n_out, y, ld_y, turned);
    }

    /* How far each head goes on. */
    void step_lengths() {
        if (!a.steps[1].weight) {
            for (int i = 0; i < rows * h; i++) steps[i] = 1;
            return;
        }
        net(a.steps, rows, normed, d, steps, h);
        int own = (int)a.steps[1].n_out;
        for (int b = 0; b < rows; b++)
            for (int i = h - 1; i >= 0; i--) { /* One that all share comes first, and is read last. */
                double z = steps[b * h + (own == 1 ? 0 : i)];
                steps[b * h + i] = (float)(z > 20 ? z : log1p(exp(z)));
            }
    }

    /* Each channel with the tokens before it, which move up by one; and SiLU. */
    void convolve(const Past &past) {
        int n = (int)a.taps;
        for (int c = 0; c < channels; c++)
            for (int j = 0; j < n; j++) taps[j * channels + c] = a.convolution[c * n + j];
        for (int b = 0; b < rows; b++) {
            float *now = tokens + (int64_t)b * channels;
            const float *before = past.tokens + (int64_t)b * (n - 1) * channels;
            float *after = past.tokens_after + (int64_t)b * (n - 1) * channels;
            memcpy(after, before + channels, (int64_t)(n - 2) * channels * sizeof(float));
            memcpy(after + (int64_t)(n - 2) * channels, now, channels * sizeof(float));
            const float *own = taps + (n - 1) * channels;
            for (int c = 0; c < channels; c++) now[c] *= own[c];
            for (int j = 0; j < n - 1; j++)
                for (int c = 0; c < channels; c++) now[c] += taps[j * channels + c] * before[j * channels + c];
            map(channels, now, [](vf z) { return z * sigmoid(z); });
        }
    }

    void features(int64_t how, const float *from, float *to) const {
        float most = 0;
        if (how == EXP_OF_QUERY) {
            most = from[0];
            for (int i = 1; i < f; i++) most = from[i] > most ? from[i] : most;
        }
        memcpy(to, from, f * sizeof(float));
        vf top = all(most), factor = all((float)a.map_scale), limit = all((float)a.map_limit);
        if (how == RELU) map(f, to, [](vf y) { return larger(y, all(0)); });
        else if (how == ELU_PLUS_ONE) map(f, to, [](vf y) { return larger(y, all(0)) + exponential(smaller(y, all(0))); });
        else if (how != NO_MAP) map(f, to, [=](vf y) { return exponential(smaller(factor * (y - top), limit)); });
    }

    /* [sin, cos](pi/2 p), of the proportion that a net gives a query or key. */
    void place(const Linear *l, const float *from, float *hands) {
        float z;
        net(l, 1, from, f, &z, 1);
        float p = (float)(1 / (1 + exp(-(double)z))), most = 1 - 1.1920929e-7f;
        double angle = (p < most ? p : most) * QUARTER_TURN;
        hands[0] = (float)sin(angle), hands[1] = (float)cos(angle);
    }

    void attend(const Past &past, int b, int head) {
        int64_t row = (int64_t)b * h + head, width = (int64_t)parts * f;
        float *q = tokens + (int64_t)b * channels + head * f, *k = q + h * f;
        const float *v = tokens + (int64_t)b * channels + 2 * h * f + head * e;
        if (a.query_divisor != 1)
            for (int i = 0; i < f; i++) q[i] /= (float)a.query_divisor;
        features(a.map_q, q, fq), features(a.map_k, k, fk);

        double kept = 1;
        if (a.gate.weight || a.rate) {
            float log_gate = a.rate ? (float)a.rate[head] : 0;
            if (a.gate.weight) {
                double z = gates[row];
                log_gate += (float)((z < 0 ? z : 0) - log1p(exp(-fabs(z))));
            }
            if (log_gate < (float)LOWEST) log_gate = (float)LOWEST;
            kept = exp((double)log_gate);
            past.log_decay_after[row] = past.log_decay[row] + log_gate;
        }

        float xs[MOST_HANDS], ys[MOST_HANDS];
        const float *hands_y = xs;
        if (a.places == TRAVELLED) {
            float centre = (float)(sqrt(1 + 8 * 1.1920928955078125e-07) / sqrt(2.0));
            double length = sqrt((double)a.clocks);
            xs[0] = centre;
            for (int m = 0; m < a.clocks; m++) {
                float turn = steps[row] * (float)exp((double)a.log_frequency[head * a.clocks + m]);
                double angle = past.angle[row * a.clocks + m] + turn;
                xs[1 + 2 * m] = (float)(cos(angle) / length / sqrt(2.0));
                xs[2 + 2 * m] = (float)(sin(angle) / length / sqrt(2.0));
                past.angle_after[row * a.clocks + m] = fmod(angle, TURN_);
            }
        } else if (a.places == LEARNED) {
            place(a.q_place, a.from_features ? fq : q, xs);
            place(a.k_place, a.from_features ? fk : k, ys);
            hands_y = ys;
        }
        if (!a.normalise) { /* By the power of two that brings the largest near 1: three large factors overflow. */
            float most = 0;
            for (int i = 0; i < f; i++) most = fabsf(fq[i]) > most ? fabsf(fq[i]) : most;
            int exponent = 0;
            if (most > 0) frexpf(most, &exponent);
            exponent = exponent > 120 ? 120 : exponent < -120 ? -120 : exponent;
            for (int i = 0; i < f; i++) fq[i] = ldexpf(fq[i], -exponent);
        }

        double den = 0;
        const double *k_sum = past.k_sum + row * width;
        double *k_sum_after = past.k_sum_after + row * width;
        for (int m = 0; m < parts; m++)
            for (int i = 0; i < f; i++) {
                int at = m * f + i;
                wide_q[at] = rank ? fq[i] * xs[m] : fq[i];
                wide_k[at] = rank ? fk[i] * hands_y[m] : fk[i];
                k_sum_after[at] = k_sum[at] * kept + wide_k[at];
                den += wide_q[at] * k_sum_after[at];
            }
        for (int i = 0; i < e; i++) value[i] = v[i];
        const double *from = past.kv + row * width * e;
        double *to = past.kv_after + row * width * e;
        int i = 0;
        bool is_large = (int64_t)rows * h * width * e >= LARGE && e % D == 0 && (intptr_t)to % sizeof(vd) == 0;
        for (; is_large && i + 4 * D <= e; i += 4 * D)
            move_on<4, true>((int)width, e, from + i, to + i, kept, wide_k, wide_q, value + i, sums + i);
        for (; i + 4 * D <= e; i += 4 * D)
            move_on<4>((int)width, e, from + i, to + i, kept, wide_k, wide_q, value + i, sums + i);
        for (; i + D <= e; i += D)
            move_on<1>((int)width, e, from + i, to + i, kept, wide_k, wide_q, value + i, sums + i);
        for (; i < e; i++) {
            sums[i] = 0;
            for (int at = 0; at < width; at++) {
                to[at * e + i] = from[at * e + i] * kept + wide_k[at] * value[i];
                sums[i] += wide_q[at] * to[at * e + i];
            }
        }
        double by = !a.normalise ? 1 : den == 0 ? 0 : 1 / (den < a.eps ? a.eps : den);
        float *o = attended + row * e;
        for (int c = 0; c < e; c++) o[c] = (float)(sums[c] * by);
        if (!a.head_norm.weight) return;
        double square = 0;
        for (int c = 0; c < e; c++) square += (double)o[c] * o[c];
        float scale = (float)(1 / sqrt(square / e + a.head_norm.eps));
        for (int c = 0; c < e; c++) o[c] = o[c] * scale * a.head_norm.weight[c];
    }
};

} // namespace
