/* The entry to the library: which instruction set, and which thread takes which rows.

Rows of a call, batch x heads, are independent. Each thread takes the next row when it is done with
one, the caller's thread among them: where other programs keep the cores busy the caller does most
of the work, and waits for no more than the row that another thread has in hand. */

#include <atomic>
#include <cstring>
#include <system_error>
#include <thread>
#include <vector>

#include "kernels.h"

#if defined(__x86_64__) || defined(_M_X64)
extern const Kernels kernels_avx512, kernels_avx2;
#define HAS_AVX512 (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw"))
#define HAS_AVX2 (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
#else
extern const Kernels kernels_plain;
#endif

namespace {

struct Set {
    const char *name;
    const Kernels *kernels;
    bool is_here;
};

std::vector<Set> sets() {
#if defined(__x86_64__) || defined(_M_X64)
    return {{"AVX-512", &kernels_avx512, HAS_AVX512 != 0}, {"AVX2", &kernels_avx2, HAS_AVX2 != 0}};
#elif defined(__aarch64__)
    return {{"NEON", &kernels_plain, true}};
#else
    return {};
#endif
}

Set best() {
    for (const Set &set : sets())
        if (set.is_here) return set;
    return {nullptr, nullptr, false};
}

Set &in_use() {
    static Set set = best();
    return set;
}

struct Queue {
    std::atomic<int64_t> next{0};
    int64_t n;
};

int64_t take(void *from) {
    Queue &queue = *(Queue *)from;
    int64_t row = queue.next.fetch_add(1, std::memory_order_relaxed);
    return row < queue.n ? row : -1;
}

void share_out(Share share, const void *call, int64_t n_rows, float *scratch, int64_t each, int threads) {
    Queue queue;
    queue.n = n_rows;
    std::vector<std::thread> others;
    try {
        for (int i = 1; i < threads && i < n_rows; i++)
            others.emplace_back(share, call, scratch + i * each, take, &queue);
    } catch (const std::system_error &) {
        /* The system has no thread to spare: those there are do all. */
    }
    share(call, scratch, take, &queue);
    for (std::thread &other : others) other.join();
}

} // namespace

extern "C" {

const int64_t leap_interface[8] = {LEAP_INTERFACE, sizeof(Attention), sizeof(Step),   sizeof(Additive),
                                   sizeof(Block),  sizeof(Past),      sizeof(Linear), sizeof(Convolution)};

const char *leap_instructions(void) { return in_use().name; }

int leap_use_instructions(const char *name) {
    for (const Set &set : sets())
        if (set.is_here && !strcmp(set.name, name)) return in_use() = set, 1;
    return 0;
}

int64_t leap_causal_scratch(const Attention *call, int backward) {
    return in_use().kernels->causal_scratch(call, backward);
}

void leap_causal(const Attention *call, float *scratch, int threads) {
    share_out(in_use().kernels->causal, call, call->batch * call->heads, scratch, leap_causal_scratch(call, 0), threads);
}

void leap_causal_backward(const Attention *call, float *scratch, int threads) {
    share_out(in_use().kernels->causal_backward, call, call->batch * call->heads, scratch, leap_causal_scratch(call, 1), threads);
}

int64_t leap_whole_scratch(const Attention *call, int backward) {
    return in_use().kernels->whole_scratch(call, backward);
}

void leap_whole(const Attention *call, float *scratch, int threads) {
    share_out(in_use().kernels->whole, call, call->batch * call->heads, scratch, leap_whole_scratch(call, 0), threads);
}

void leap_whole_backward(const Attention *call, float *scratch, int threads) {
    share_out(in_use().kernels->whole_backward, call, call->batch * call->heads, scratch, leap_whole_scratch(call, 1), threads);
}

void leap_step(const Step *call, int threads) {
    share_out(in_use().kernels->step, call, call->batch * call->heads, nullptr, 0, threads);
}

int64_t leap_convolution_scratch(const Convolution *call) { return in_use().kernels->convolution_scratch(call); }

void leap_convolution(const Convolution *call, float *scratch, int threads) {
    share_out(in_use().kernels->convolution, call, call->batch, scratch, leap_convolution_scratch(call), threads);
}

void leap_convolution_backward(const Convolution *call, float *scratch, int threads) {
    share_out(in_use().kernels->convolution_backward, call, call->batch, scratch, leap_convolution_scratch(call), threads);
}

int64_t leap_blocks_scratch(const Block *blocks, int64_t n, int64_t batch) {
    return in_use().kernels->blocks_scratch(blocks, n, batch);
}

void leap_blocks(const Block *blocks, const Past *past, int64_t n, int64_t batch, float *x, float *scratch) {
    in_use().kernels->blocks(blocks, past, n, batch, x, scratch);
}

int64_t leap_linear_scratch(const Linear *layer, int64_t rows) { return in_use().kernels->linear_scratch(layer, rows); }

void leap_linear(const Linear *layer, int64_t rows, const float *x, float *y, float *scratch) {
    in_use().kernels->linear(layer, rows, x, y, scratch);
}

int64_t leap_additive_scratch(const Additive *call) { return in_use().kernels->additive_scratch(call); }

void leap_additive(const Additive *call, float *scratch, int threads) {
    share_out(in_use().kernels->additive, call, call->batch * call->heads, scratch, leap_additive_scratch(call), threads);
}

void leap_additive_backward(const Additive *call, float *scratch, int threads) {
    share_out(in_use().kernels->additive_backward, call, call->batch * call->heads, scratch, leap_additive_scratch(call), threads);
}
}
