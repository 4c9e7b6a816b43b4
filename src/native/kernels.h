/* What one instruction set has to offer. */

#pragma once
#include "leap.h"

/* The next row (batch x head) to work on, or -1 when there is none. */
typedef int64_t (*Rows)(void *from);
/* One thread's share of a call: rows until there is none left. */
typedef void (*Share)(const void *call, float *scratch, Rows next, void *from);

struct Kernels {
    int64_t (*causal_scratch)(const Attention *call, int backward);
    Share causal, causal_backward, step;
    int64_t (*whole_scratch)(const Attention *call, int backward);
    Share whole, whole_backward;
    int64_t (*additive_scratch)(const Additive *call);
    Share additive, additive_backward;
    int64_t (*convolution_scratch)(const Convolution *call);
    Share convolution, convolution_backward;
    int64_t (*blocks_scratch)(const Block *blocks, int64_t n, int64_t batch);
    void (*blocks)(const Block *blocks, const Past *past, int64_t n, int64_t batch, float *x, float *scratch);
    int64_t (*linear_scratch)(const Linear *layer, int64_t rows);
    void (*linear)(const Linear *layer, int64_t rows, const float *x, float *y, float *scratch);
};
