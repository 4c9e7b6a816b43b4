/* All ops, compiled once for each instruction set: `-DSET=avx2` names the one of this time. */

#include "additive.h"
#include "block.h"
#include "causal.h"
#include "convolution.h"
#include "kernels.h"
#include "step.h"
#include "whole.h"

namespace {

template <class Op> int64_t scratch_of(const Attention &call) {
    Memory m{nullptr};
    Op(call, m);
    return m.used;
}

int64_t causal_scratch(const Attention *call, int backward) {
    return backward ? scratch_of<Backward>(*call) : scratch_of<Forward>(*call);
}

int64_t whole_scratch(const Attention *call, int backward) {
    return backward ? scratch_of<WholeBackward>(*call) : scratch_of<WholeForward>(*call);
}

template <class Op> void rows(const void *call, float *scratch, Rows next, void *from) {
    const Attention &a = *(const Attention *)call;
    Memory m{scratch};
    Op op(a, m);
    for (int64_t row; (row = next(from)) >= 0;) op.run(a, row);
}

int64_t additive_scratch(const Additive *call) {
    Memory m{nullptr};
    Additives(*call, m);
    return m.used;
}

template <void (Additives::*run)(int64_t)> void additive_rows(const void *call, float *scratch, Rows next, void *from) {
    Memory m{scratch};
    Additives op(*(const Additive *)call, m);
    for (int64_t row; (row = next(from)) >= 0;) (op.*run)(row);
}

void step_rows(const void *call, float *, Rows next, void *from) {
    const Step &a = *(const Step *)call;
    OneStep op(a);
    for (int64_t row; (row = next(from)) >= 0;) op.run(a, row);
}

int64_t convolution_scratch(const Convolution *call) {
    Memory m{nullptr};
    Convolutions(*call, m);
    return m.used;
}

template <void (Convolutions::*run)(int64_t)> void convolution_rows(const void *call, float *scratch, Rows next, void *from) {
    Memory m{scratch};
    Convolutions op(*(const Convolution *)call, m);
    for (int64_t row; (row = next(from)) >= 0;) (op.*run)(row);
}

int64_t blocks_scratch(const Block *blocks, int64_t n, int64_t batch) {
    int64_t most = 0;
    for (int64_t i = 0; i < n; i++) {
        Memory m{nullptr};
        OneToken(blocks[i], (int)batch, m);
        most = m.used > most ? m.used : most;
    }
    return most;
}

void through_blocks(const Block *blocks, const Past *past, int64_t n, int64_t batch, float *x, float *scratch) {
    for (int64_t i = 0; i < n; i++) {
        Memory m{scratch};
        OneToken(blocks[i], (int)batch, m).run(past[i], x);
    }
}

int64_t one_linear_scratch(const Linear *layer, int64_t rows) { return linear_scratch(rows, layer->n_in); }

void one_linear(const Linear *layer, int64_t rows, const float *x, float *y, float *scratch) {
    linear(*layer, (int)rows, x, layer->n_in, y, layer->n_out, scratch);
}

} // namespace

#define NAMED(set) kernels_##set
#define OF(set) NAMED(set)
extern const Kernels OF(SET) = {causal_scratch, rows<Forward>, rows<Backward>, step_rows,
                                  whole_scratch, rows<WholeForward>, rows<WholeBackward>,
                                  additive_scratch, additive_rows<&Additives::forward>, additive_rows<&Additives::backward>,
                                  convolution_scratch, convolution_rows<&Convolutions::forward>, convolution_rows<&Convolutions::backward>,
                                  blocks_scratch, through_blocks, one_linear_scratch, one_linear};
