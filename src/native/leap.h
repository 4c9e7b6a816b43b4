/* The plain C interface of the library: what its callers fill in, and what they call.

A call gets one struct by address. Nothing here knows of torch: tensors are addresses and strides,
counted in elements. Every function returns when the work is done, and keeps nothing. */

#pragma once
#include <stdint.h>

enum { FLOAT32 = 0, BFLOAT16 = 1 };
enum { NO_MAP = 0, RELU = 1, ELU_PLUS_ONE = 2, EXP = 3, EXP_OF_QUERY = 4 };

/* A tensor [b, h, t, width] whose numbers of a token lie side by side; null data where there is none. */
typedef struct {
    void *data;
    int64_t stride[3];
    int64_t type;
} View;

/* Linear attention and its gradients: causal, see causal.h, or to a whole sequence, see whole.h. */
typedef struct {
    int64_t batch, heads, tokens, features, values, rank; /* rank 0: no re-weighting */
    int64_t sources;                                      /* keys and values: in the causal form as many as tokens */
    int64_t map_q, map_k;                                 /* applied to q and k as they are read */
    double map_scale, map_limit;                          /* of EXP: e^min(scale x, limit) */
    double eps;
    int64_t normalise;
    View q, k, v, x, y, gate; /* gate: [b, h, t] */
    View mask;                /* bytes [b, 1, t], 0 at pads */
    const double *rate;       /* [h], in place of gates that are the same at every token */
    const double *kv, *k_sum; /* the state before, [b, h, r f, e] and [b, h, r f]; null for none. In the
                                 backward of the whole form, that of all keys */
    double *kv_after, *k_sum_after;
    float *den;   /* [b, h, t] */
    float *marks; /* [stretches, b, h, mark], what the causal backward begins its stretches from */
    View o;
    View d_o;                         /* from here on for the backward alone */
    const double *dkv_after, *dk_sum_after; /* null for 0 */
    double *dkv, *dk_sum;             /* null where nobody asks */
    View dq, dk, dv, dx, dy, dgate;
} Attention;

/* Causal linear attention of one more token for each row; see step.h. */
typedef struct {
    int64_t batch, heads, features, values, rank;
    double eps;
    int64_t normalise;
    View q, k, v, x, y;       /* [b, h, 1, ...] */
    View gate;                /* [b, h, 1] */
    View mask;                /* bytes [b, 1, 1], 0 at pads */
    const double *kv, *k_sum; /* the state before, [b, h, r f, e] and [b, h, r f] */
    double *kv_after, *k_sum_after;
    View o;
} Step;

/* y = x weight^T + bias, with weights [n_out, n_in]; null weights where there is no such layer. See linear.h. */
typedef struct {
    const float *weight, *bias; /* bias: or null */
    int64_t n_in, n_out;
} Linear;

typedef struct {
    const float *weight, *bias; /* bias: or null */
    double eps;
} Norm;

enum { NO_PLACES = 0, TRAVELLED = 1, LEARNED = 2 };

/* A block of a transformer around causal linear attention; see block.h. */
typedef struct {
    int64_t width, heads, features, values; /* features, values: of a head */
    int64_t map_q, map_k;
    double map_scale, map_limit, eps;
    double query_divisor;
    int64_t normalise;
    int64_t places, clocks;  /* how scores are re-weighted; clocks of a head, for TRAVELLED */
    int64_t from_features;   /* whether nets of LEARNED see features, or what they are made of */
    int64_t taps;            /* 2 or more; 0: no convolution */
    Norm attention_norm, feed_forward_norm;
    Norm head_norm;          /* in place of the denominator; null weights for none */
    Linear q, k, v, o, gate, output_gate;
    Linear steps[2];         /* the second alone for a single layer; neither for steps of 1 */
    Linear q_place[2], k_place[2];
    Linear up, down;
    const float *log_frequency; /* [h, m] */
    const float *convolution;   /* [2 h f + h e, taps] */
    const double *rate;         /* [h], by which logs of gates fall at each token; or null */
} Block;

/* What a block keeps of the past, before and after; null where it has no such thing. */
typedef struct {
    const double *kv, *k_sum;         /* [b, h, r f, e] and [b, h, r f] */
    const double *log_decay, *angle;  /* [b, h] and [b, h, m] */
    const float *tokens;              /* [b, taps - 1, 2 h f + h e] */
    double *kv_after, *k_sum_after, *log_decay_after, *angle_after;
    float *tokens_after;
} Past;

/* Additive attention and its gradients; see additive.h. */
typedef struct {
    int64_t batch, heads, tokens, past, values, window; /* window 0: all that came before */
    View focus, v;                      /* focus: float32 [b, h, t] */
    View mask;                          /* bytes [b, 1, t], 0 at pads */
    View past_focus, past_v, past_mass; /* float32 [b, h, k, ...] */
    View o;                             /* float32 in the backward */
    float *unrounded;                   /* o in float32 [b, h, t, p], where o is not; or null */
    float *peaks, *inverses;            /* [b, h, t] */
    float *n_last, *z_last;             /* [b, h, p] and [b, h] */
    View d_o;                           /* from here on for the backward alone */
    const float *dn_last, *dz_last;     /* or null */
    View dfocus, dv;
    float *dpast_focus, *dpast_v, *dpast_mass; /* [b, h, k, ...] */
} Additive;

/* A short causal convolution and its gradients; see convolution.h. All but x lies row after row. */
typedef struct {
    int64_t batch, tokens, channels, taps, silu;
    const float *x; /* [b, t, d], channels side by side */
    int64_t x_stride[2];
    const float *weight, *past; /* [d, taps] and [b, taps - 1, d] */
    float *y;                   /* [b, t, d] */
    const float *dy;            /* from here on for the backward alone */
    float *dx, *dpast;
    double *dweight;            /* [b, taps, d] */
} Convolution;

#define LEAP_INTERFACE 4 /* Another number whenever fields change their meaning. */

#ifdef __cplusplus
extern "C" {
#endif

/* What a caller must have been written for: LEAP_INTERFACE, and the sizes of Attention, Step, Additive,
Block, Past, Linear and Convolution. */
extern const int64_t leap_interface[8];

/* The name of the instruction set in use, or null where this processor has none that was compiled. */
const char *leap_instructions(void);
/* Take the instruction set of this name instead; 0 if it is not there. */
int leap_use_instructions(const char *name);

/* Floats of scratch memory that each thread needs. */
int64_t leap_causal_scratch(const Attention *call, int backward);
void leap_causal(const Attention *call, float *scratch, int threads);
void leap_causal_backward(const Attention *call, float *scratch, int threads);
int64_t leap_whole_scratch(const Attention *call, int backward);
void leap_whole(const Attention *call, float *scratch, int threads);
void leap_whole_backward(const Attention *call, float *scratch, int threads);
int64_t leap_additive_scratch(const Additive *call);
void leap_additive(const Additive *call, float *scratch, int threads);
void leap_additive_backward(const Additive *call, float *scratch, int threads);
void leap_step(const Step *call, int threads);
/* One token of each row through blocks, one after the other: x [b, width] is what goes in and comes out. */
int64_t leap_blocks_scratch(const Block *blocks, int64_t n, int64_t batch);
void leap_blocks(const Block *blocks, const Past *past, int64_t n, int64_t batch, float *x, float *scratch);
int64_t leap_convolution_scratch(const Convolution *call);
void leap_convolution(const Convolution *call, float *scratch, int threads);
void leap_convolution_backward(const Convolution *call, float *scratch, int threads);
/* Rows x [rows, n_in] through a linear layer. */
int64_t leap_linear_scratch(const Linear *layer, int64_t rows);
void leap_linear(const Linear *layer, int64_t rows, const float *x, float *y, float *scratch);

#ifdef __cplusplus
}
#endif
