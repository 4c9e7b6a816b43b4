/* A linear layer over a few rows, as decoding has it.

    y_bn = bias_n + sum_k x_bk weight_nk

Weights lie as torch has them, a row for each output, and are read once, where they are. Few rows of
x meet them along k: sums stay in vectors, which are added up across at the end, W of them at a
time. Many rows are turned, so that the tile product runs along them. */

#pragma once
#include "chunk.h"

namespace {

constexpr int FEW = W / 2; /* Rows of x from which on they are turned. */

/* The sums of W vectors, as one. */
ALWAYS vf across(vf *x) {
    typename Count<W>::type lanes;
#pragma GCC unroll 4
    for (int n = W / 2; n; n /= 2)
#pragma GCC unroll 8
        for (int i = 0; i < n; i++) x[i] = zip_first(x[i], x[i + n], lanes) + zip_second(x[i], x[i + n], lanes);
    return x[0];
}

ALWAYS float dot_of(const float *a, const float *b, int n) {
    vf total = {};
    int i = 0;
    for (; i + W <= n; i += W) total += load(a + i) * load(b + i);
    float rest = sum(total);
    for (; i < n; i++) rest += a[i] * b[i];
    return rest;
}

/* to[c][r] = from[r][c], of any counts. */
void turn(int rows, int columns, const float *from, int64_t ld, float *to, int64_t ld_to) {
    int r = 0, even = columns / W * W;
    for (; r + W <= rows; r += W) {
        transpose(W, even, from + r * ld, (int)ld, to + r, (int)ld_to);
        for (int c = even; c < columns; c++)
            for (int i = r; i < r + W; i++) to[c * ld_to + i] = from[i * ld + c];
    }
    for (; r < rows; r++)
        for (int c = 0; c < columns; c++) to[c * ld_to + r] = from[r * ld + c];
}

/* Rows b.. of y from RX rows of x: W / RX rows of weights at a time. */
template <int RX> void few_rows(const Linear &l, const float *x, int64_t ld_x, float *y, int64_t ld_y) {
    constexpr int RW = W / RX;
    int k = (int)l.n_in, even = k / W * W;
    int64_t n = 0;
    for (; n + RW <= l.n_out; n += RW) {
        const float *w = l.weight + n * k;
        vf total[W] = {};
        if constexpr (RX == 1) {
#pragma GCC unroll 16
            for (int r = 0; r < RW; r++) { /* Row after row, as they lie in memory. */
                for (int c = 0; c < even; c += W) {
                    __builtin_prefetch(w + r * k + c + 1024, 0, 2);
                    total[r] += load(w + r * k + c) * load(x + c);
                }
            }
        } else {
            for (int c = 0; c < even; c += W) {
                vf row[RX];
#pragma GCC unroll 4
                for (int b = 0; b < RX; b++) row[b] = load(x + b * ld_x + c);
#pragma GCC unroll 16
                for (int r = 0; r < RW; r++) {
                    vf by = load(w + r * k + c);
#pragma GCC unroll 4
                    for (int b = 0; b < RX; b++) total[r * RX + b] += by * row[b];
                }
            }
        }
        float sums[W];
        store(sums, across(total));
        for (int r = 0; r < RW; r++)
            for (int b = 0; b < RX; b++) {
                float rest = l.bias ? l.bias[n + r] : 0;
                for (int c = even; c < k; c++) rest += w[r * k + c] * x[b * ld_x + c];
                y[b * ld_y + n + r] = sums[r * RX + b] + rest;
            }
    }
    for (; n < l.n_out; n++)
        for (int b = 0; b < RX; b++)
            y[b * ld_y + n] = dot_of(l.weight + n * k, x + b * ld_x, k) + (l.bias ? l.bias[n] : 0);
}

constexpr int BLOCK = 2 * W;  /* Rows of x that a tile holds; turned, they fit the first cache with their weights. */
constexpr int GROUP = 64;     /* Rows of weights that all blocks of x meet before the next. */

/* Rows of outputs, turned: a group of weights by all rows of x, a block of which stand side by side. */
void many_rows(const Linear &l, int rows, const float *x, int64_t ld_x, float *y, int64_t ld_y, float *scratch) {
    int k = (int)l.n_in, n_block = (rows + BLOCK - 1) / BLOCK;
    float *xt = scratch, *yt = xt + (int64_t)n_block * k * BLOCK;
    for (int b = 0; b < rows; b += W) /* What lies beyond the last row is computed, and not read. */
        turn(rows - b < W ? rows - b : W, k, x + b * ld_x, ld_x, xt + (int64_t)(b / BLOCK) * k * BLOCK + b % BLOCK, BLOCK);
    for (int64_t n = 0; n < l.n_out; n += GROUP) {
        int group = (int)(l.n_out - n < GROUP ? l.n_out - n : GROUP), even = group / MR * MR;
        for (int block = 0; block < n_block; block++) {
            const float *w = l.weight + n * k, *from = xt + (int64_t)block * k * BLOCK;
            int here = rows - block * BLOCK < BLOCK ? rows - block * BLOCK : BLOCK;
            auto tiles = [&](auto nv) {
                for (int i = 0; i < even; i += MR) {
                    Tile<nv.value> tile;
                    tile.clear();
                    if (!block) /* The same of the next group, a tile's share at a time. */
                        for (int c = 0; c < MR * k; c += 16) __builtin_prefetch(w + (GROUP + i) * k + c, 0, 2);
                    tile.add({w, k, 1, from, BLOCK}, i, 0, 0, k);
#pragma GCC unroll 8
                    for (int r = 0; r < MR; r++)
#pragma GCC unroll 4
                        for (int m = 0; m < nv.value; m++)
                            store(yt + (i + r) * BLOCK + m * W, tile.sum[r][m] + all(l.bias ? l.bias[n + i + r] : 0));
                }
            };
            if (here > W) tiles(Number<2>());
            else tiles(Number<1>());
            for (int b = 0; b < here; b += W)
                turn(even, here - b < W ? here - b : W, yt + b, BLOCK, y + (block * BLOCK + b) * ld_y + n, ld_y);
        }
        for (int64_t i = n + even; i < n + group; i++)
            for (int b = 0; b < rows; b++)
                y[b * ld_y + i] = dot_of(l.weight + i * k, x + b * ld_x, k) + (l.bias ? l.bias[i] : 0);
    }
}

/* Floats that `linear` needs to work in. */
ALWAYS int64_t linear_scratch(int64_t rows, int64_t n_in) {
    return rows < FEW ? 0 : ((rows + BLOCK - 1) / BLOCK * n_in + GROUP) * BLOCK;
}

void linear(const Linear &l, int rows, const float *x, int64_t ld_x, float *y, int64_t ld_y, float *scratch) {
    if (rows >= FEW) return many_rows(l, rows, x, ld_x, y, ld_y, scratch);
    for (; rows >= 4; rows -= 4, x += 4 * ld_x, y += 4 * ld_y) few_rows<4>(l, x, ld_x, y, ld_y);
    for (; rows >= 2; rows -= 2, x += 2 * ld_x, y += 2 * ld_y) few_rows<2>(l, x, ld_x, y, ld_y);
    if (rows) few_rows<1>(l, x, ld_x, y, ld_y);
}

} // namespace
