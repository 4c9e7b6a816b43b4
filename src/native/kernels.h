/* What one instruction set has to offer. */

#pragma once
#include "leap.h"

/* The next row (batch x head) to work on, or -1 when there is none. */
typedef int64_t (*Rows)(void *from);
/* One thread's share of a call: rows until there is none left. */
typedef void (*Share)(const void *call, float *scratch, Rows next, void *from);

struct Kernels {
    int64_t (*causal_scratch)(const Causal *call, int backward);
    Share causal, causal_backward, step;
    int64_t (*additive_scratch)(const Additive *call);
    Share additive, additive_backward;
};
