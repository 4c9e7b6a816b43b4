/* Vectors of the instruction set that a file is compiled for: W lanes of float.

Compilers that know GCC's vector types turn the same code into AVX-512, AVX2 or NEON. Everything is
in a nameless namespace, so that what is compiled for one processor never ends up in the code for another. */

#pragma once
#include <stdint.h>
#include <string.h>

#include "leap.h"

namespace {

#if defined(__AVX512F__)
constexpr int W = 16, MR = 8;
#elif defined(__AVX2__)
constexpr int W = 8, MR = 4;
#else
constexpr int W = 4, MR = 8;
#endif

#define ALWAYS_MEMBER inline __attribute__((always_inline))
#define ALWAYS ALWAYS_MEMBER

typedef float vf __attribute__((vector_size(W * 4), aligned(4), may_alias));
typedef int32_t vi __attribute__((vector_size(W * 4), aligned(4), may_alias));

ALWAYS vf load(const float *p) { return *(const vf *)p; }
ALWAYS void store(float *p, vf x) { *(vf *)p = x; }
ALWAYS vf all(float x) { return x - (vf){}; }
ALWAYS vf keep(vf x, vi where) { return (vf)((vi)x & where); }
ALWAYS vf choose(vi where, vf a, vf b) { return (vf)(((vi)a & where) | ((vi)b & ~where)); }
ALWAYS vf larger(vf a, vf b) { return choose(a > b, a, b); }
ALWAYS vf smaller(vf a, vf b) { return choose(a < b, a, b); }
ALWAYS vf magnitude(vf x) { return (vf)((vi)x & 0x7fffffff); }

template <int... I> struct Indices {};
template <int N, int... I> struct Count : Count<N - 1, N - 1, I...> {};
template <int... I> struct Count<0, I...> { typedef Indices<I...> type; };

#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (vi){__VA_ARGS__})
#endif

/* The lanes of x, turned by N. */
template <int N, int... I> ALWAYS vf turned(vf x, Indices<I...>) {
    return (vf)SHUFFLE(x, x, ((I + N) % W)...);
}

/* Halves are added to each other, so that the order of a sum does not depend on the compiler. */
ALWAYS float sum(vf x) {
    typename Count<W>::type lanes;
    if (W > 8) x += turned<W / 2>(x, lanes);
    if (W > 4) x += turned<4>(x, lanes);
    x += turned<2>(x, lanes);
    x += turned<1>(x, lanes);
    return x[0];
}

ALWAYS float largest(vf x) {
    typename Count<W>::type lanes;
    if (W > 8) x = larger(x, turned<W / 2>(x, lanes));
    if (W > 4) x = larger(x, turned<4>(x, lanes));
    x = larger(x, turned<2>(x, lanes));
    x = larger(x, turned<1>(x, lanes));
    return x[0];
}

/* e^x to within 2 units in the last place; 0 below -87, where torch has subnormal numbers. */
ALWAYS vf exponential(vf x) {
    vi tiny = x < all(-87.0f);
    vf bounded = smaller(larger(x, all(-87.0f)), all(88.7f));
    bounded = choose(x == x, bounded, x);
    vf shifted = bounded * 1.44269504088896341f + 12582912.0f; /* 1.5 2^23: rounds to an integer */
    vf n = shifted - 12582912.0f;
    vf r = bounded - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    vf p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    vi power = ((vi)shifted - 0x4b400000 + 127) << 23;
    return keep(p * (vf)power, ~tiny);
}

/* A row of numbers of any type, as floats. */
ALWAYS void read_row(float *to, const void *from, int64_t type, int n) {
    int i = 0;
    if (type == FLOAT32) {
        const float *p = (const float *)from;
        for (; i + W <= n; i += W) store(to + i, load(p + i));
        for (; i < n; i++) to[i] = p[i];
    } else {
        const uint16_t *p = (const uint16_t *)from;
        for (; i < n; i++) {
            uint32_t bits = (uint32_t)p[i] << 16;
            memcpy(to + i, &bits, 4);
        }
    }
}

/* The same the other way, bfloat16 rounded to the nearest even number. */
ALWAYS void write_row(void *to, const float *from, int64_t type, int n) {
    int i = 0;
    if (type == FLOAT32) {
        float *p = (float *)to;
        for (; i + W <= n; i += W) store(p + i, load(from + i));
        for (; i < n; i++) p[i] = from[i];
    } else {
        uint16_t *p = (uint16_t *)to;
        for (; i < n; i++) {
            uint32_t bits;
            memcpy(&bits, from + i, 4);
            uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
            p[i] = (bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : (uint16_t)rounded;
        }
    }
}

ALWAYS void *at(const View &x, int64_t b, int64_t h, int64_t t) {
    int64_t place = b * x.stride[0] + h * x.stride[1] + t * x.stride[2];
    return (char *)x.data + place * (x.type == FLOAT32 ? 4 : 2);
}

ALWAYS void clear(float *x, int64_t n) { memset(x, 0, n * sizeof(float)); }

/* The lanes of a and b by turns: their first halves, and their second. */
template <int... I> ALWAYS vf zip_first(vf a, vf b, Indices<I...>) {
    return (vf)SHUFFLE(a, b, (I / 2 + I % 2 * W)...);
}
template <int... I> ALWAYS vf zip_second(vf a, vf b, Indices<I...>) {
    return (vf)SHUFFLE(a, b, (W / 2 + I / 2 + I % 2 * W)...);
}

/* to[c][r] = from[r][c], both counts multiples of W. */
void transpose(int rows, int columns, const float *from, int ld, float *to, int ld_to) {
    typename Count<W>::type lanes;
    for (int r = 0; r < rows; r += W)
        for (int c = 0; c < columns; c += W) {
            vf x[W], y[W];
#pragma GCC unroll 16
            for (int i = 0; i < W; i++) x[i] = load(from + (r + i) * ld + c);
#pragma GCC unroll 4
            for (int n = 1; n < W; n *= 2) {
#pragma GCC unroll 8
                for (int i = 0; i < W / 2; i++) {
                    y[2 * i] = zip_first(x[i], x[i + W / 2], lanes);
                    y[2 * i + 1] = zip_second(x[i], x[i + W / 2], lanes);
                }
#pragma GCC unroll 16
                for (int i = 0; i < W; i++) x[i] = y[i];
            }
#pragma GCC unroll 16
            for (int i = 0; i < W; i++) store(to + (c + i) * ld_to + r, x[i]);
        }
}

} // namespace
