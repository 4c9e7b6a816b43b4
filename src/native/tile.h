/* The tile product, of which all else is made.

    out[i, n] += sum_k a[i, k] b[k, n]        MR rows i, NV vectors of columns n

The tile stays in registers: for each k, NV vectors of b are loaded and MR numbers of a are
multiplied with all of them. Nothing is packed: matrices of a chunk are small, row after row, and
lie in the cache. `a` is read by any strides, so that it may stand transposed; `b` runs along n. */

#pragma once
#include "vector.h"

namespace {

struct Factors {
    const float *a;
    int along_i, along_k; /* strides of a */
    const float *b;
    int ld; /* stride of b along k */
};

template <int NV> struct Tile {
    vf sum[MR][NV];

    ALWAYS_MEMBER void clear() {
#pragma GCC unroll 8
        for (int r = 0; r < MR; r++)
#pragma GCC unroll 4
            for (int n = 0; n < NV; n++) sum[r][n] = (vf){};
    }
    /* Add the product of rows i.. and columns n.., over k from `first` to `last`. Vectors of columns
    are `gap` apart: side by side, or in one matrix after the other. */
    ALWAYS_MEMBER void add(const Factors &f, int i, int n0, int first, int last, int gap = W) {
        const float *a = f.a + (int64_t)i * f.along_i + (int64_t)first * f.along_k;
        const float *b = f.b + (int64_t)first * f.ld + n0;
        for (int k = first; k < last; k++, a += f.along_k, b += f.ld) {
            vf row[NV];
#pragma GCC unroll 4
            for (int n = 0; n < NV; n++) row[n] = load(b + n * gap);
#pragma GCC unroll 8
            for (int r = 0; r < MR; r++) {
                vf x = all(a[r * f.along_i]);
#pragma GCC unroll 4
                for (int n = 0; n < NV; n++) sum[r][n] += x * row[n];
            }
        }
    }
    /* Multiply each row by a number. */
    ALWAYS_MEMBER void scale(const float *by) {
#pragma GCC unroll 8
        for (int r = 0; r < MR; r++)
#pragma GCC unroll 4
            for (int n = 0; n < NV; n++) sum[r][n] *= all(by[r]);
    }
    ALWAYS_MEMBER void load_from(const float *from, int ld) {
#pragma GCC unroll 8
        for (int r = 0; r < MR; r++)
#pragma GCC unroll 4
            for (int n = 0; n < NV; n++) sum[r][n] = load(from + r * ld + n * W);
    }
    ALWAYS_MEMBER void store_to(float *out, int ld) {
#pragma GCC unroll 8
        for (int r = 0; r < MR; r++)
#pragma GCC unroll 4
            for (int n = 0; n < NV; n++) store(out + r * ld + n * W, sum[r][n]);
    }
    /* out = kept out + tile: the sum of a long past is rounded once, not at every k. */
    ALWAYS_MEMBER void add_to(float *out, int ld, float kept) {
#pragma GCC unroll 8
        for (int r = 0; r < MR; r++)
#pragma GCC unroll 4
            for (int n = 0; n < NV; n++) {
                float *p = out + r * ld + n * W;
                store(p, load(p) * kept + sum[r][n]);
            }
    }
};

template <int N> struct Number {
    static constexpr int value = N;
};

/* Call body(Number<NV>, row, column) for every tile of a matrix, its rows a multiple of MR, its columns of W. */
template <class Body> ALWAYS void each_tile(int rows, int columns, Body body) {
    int n = 0;
    for (; n + 2 * W <= columns; n += 2 * W)
        for (int i = 0; i < rows; i += MR) body(Number<2>(), i, n);
    for (; n < columns; n += W)
        for (int i = 0; i < rows; i += MR) body(Number<1>(), i, n);
}

/* Parts: the same rows times each of some matrices. A tile holds the same columns of two or three of
them, so that what becomes of their sum is decided in registers, or, of a single one, more columns.
Call body(Number<NV>, Number<several>, i, n, m) for every tile, with parts m.. of it. */
template <class Body> ALWAYS void each_part(int rows, int columns, int parts, Body body) {
    if (parts == 1) return each_tile(rows, columns, [&](auto nv, int i, int n) { body(nv, Number<0>(), i, n, 0); });
    for (int n = 0; n < columns; n += W)
        for (int m = 0; m < parts;) {
            int left = parts - m;
            for (int i = 0; i < rows; i += MR) {
                if (left == 3) body(Number<3>(), Number<1>(), i, n, m);
                else if (left == 1) body(Number<1>(), Number<1>(), i, n, m);
                else body(Number<2>(), Number<1>(), i, n, m);
            }
            m += left == 3 ? 3 : left == 1 ? 1 : 2;
        }
}

/* out = kept out + a b. */
void add_product(int rows, int columns, int n_k, Factors f, float *out, int ld, float kept) {
    each_tile(rows, columns, [&](auto nv, int i, int n) {
        Tile<nv.value> tile;
        tile.clear();
        tile.add(f, i, n, 0, n_k);
        tile.add_to(out + i * ld + n, ld, kept);
    });
}

} // namespace
