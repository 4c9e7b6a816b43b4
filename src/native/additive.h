/* Additive attention, a mean by focus over a causal window, in O(t) whatever the window.

Both passes are one sum. Row i has a ceiling, element j a logit, values and a mass:

    S_i = sum_{j seen by i} exp(logit_j - ceiling_i) [values_j, mass_j]

    forward     ceiling_i = M_i, the highest focus seen     logit_j = focus_j, values v_j, mass 1
                [N_i, Z_i] = S_i                            o_i = N_i / Z_i
    backward    ceiling_j = -focus_j, time runs backwards   logit_i = -M_i
                [dv_j, e_j] = S_j                           values do_i / Z_i, mass do_i . o_i / Z_i
                                                            dfocus_j = v_j . dv_j - e_j

Nothing is ever subtracted from a sum. Elements are cut into blocks as long as the window, so that a
row sees the end of one block and the beginning of the next:

    [ ... | . . . x x x | x x x i . . | ... ]

Beginnings are a running sum. Ends are one in the other direction, made once for each block and kept.
A running sum is relative to the highest logit so far and brought down when that rises; it is of
double precision, as a long one would be too coarse in float32. Pads are left out of the sequence. */

#pragma once
#include <math.h>

#include "chunk.h"

namespace {

struct Additives {
    const Additive &a;
    int p, pp;                       /* values, and the same padded */
    int64_t longest, block;          /* elements of a row, and of a block */
    float *logit, *ceiling;          /* [longest] */
    double *mass;                    /* [longest]: dfocus is a difference of two like numbers */
    float *peak, *decay, *weight;    /* [longest]: of running sums */
    float *ends, *ends_peak;         /* [block, pp] and [block]: from an element to its block's end */
    double *ends_mass;               /* [block] */
    float *values, *other;           /* [pp]: rows at hand */
    int32_t *place;                  /* [tokens]: of real tokens */
    double *sums;                    /* [pp] */
    int64_t n = 0, n_real = 0;

    Additives(const Additive &call, Memory &m) : a(call), p((int)a.values), pp(padded(a.values)) {
        longest = a.past + a.tokens;
        block = a.window && a.window < longest ? a.window : longest;
        logit = m.take(longest), ceiling = m.take(longest);
        mass = (double *)m.take(2 * longest);
        peak = m.take(longest + 16), decay = m.take(longest + 16), weight = m.take(longest + 16);
        int64_t kept = block < longest ? block : 0;
        ends = m.take(kept * pp), ends_peak = m.take(kept);
        ends_mass = (double *)m.take(2 * kept);
        values = m.take(pp), other = m.take(pp);
        place = (int32_t *)m.take(a.tokens);
        sums = (double *)m.take(2 * pp);
    }

    /* The real tokens of a row, in order. */
    void gather_places(int64_t b) {
        n_real = 0;
        const uint8_t *real = (const uint8_t *)a.mask.data;
        for (int64_t t = 0; t < a.tokens; t++)
            if (!real || real[b * a.mask.stride[0] + t * a.mask.stride[2]]) place[n_real++] = (int32_t)t;
        n = a.past + n_real;
    }

    ALWAYS_MEMBER float focus_of(int64_t b, int64_t h, int64_t j) {
        return *(const float *)(j < a.past ? at(a.past_focus, b, h, j) : at(a.focus, b, h, place[j - a.past]));
    }
    ALWAYS_MEMBER float mass_of(int64_t b, int64_t h, int64_t j) {
        return j < a.past ? *(const float *)at(a.past_mass, b, h, j) : 1.0f;
    }
    ALWAYS_MEMBER void read_values(int64_t b, int64_t h, int64_t j, float *to) {
        if (j < a.past) read_row(to, at(a.past_v, b, h, j), FLOAT32, p);
        else read_row(to, at(a.v, b, h, place[j - a.past]), a.v.type, p);
        for (int c = p; c < pp; c++) to[c] = 0;
        /* What is not finite becomes NaN, and leaves all else as it is. */
        for (int c = 0; c < pp; c += W) store(to + c, load(to + c) + load(to + c) * all(0));
    }

    /* Peaks of running sums from element `first` to `last`, in either direction; and what each step
       leaves of the sum before (decay), and adds (weight). */
    void run_along(int64_t first, int64_t n_steps, int64_t step) {
        float top = -INFINITY;
        for (int64_t i = 0; i < n_steps; i++) {
            float x = logit[first + i * step], before = top;
            top = x > top ? x : top;
            peak[i] = top;
            decay[i] = before == top ? 0 : before - top;
            weight[i] = x - (top == -INFINITY ? 0 : top);
        }
        for (int64_t i = 0; i < n_steps; i += W) {
            store(decay + i, exponential(load(decay + i)));
            store(weight + i, exponential(load(weight + i)));
        }
    }

    ALWAYS_MEMBER void add(const float *from, float by, float left) {
        for (int c = 0; c < pp; c++) sums[c] = sums[c] * left + (double)from[c] * by;
    }

    /* Call read(j, row) for the values of an element, and emit(i, row, mass) with the sum of row i.
       Where ceilings are not given, they are the highest logits seen, and are written. */
    template <bool GIVEN, class Read, class Emit> void sum_up(int64_t first_row, Read read, Emit emit) {
        for (int64_t begin = 0; begin < n; begin += block) {
            int64_t end = begin + block < n ? begin + block : n;
            double total = 0;
            memset(sums, 0, pp * sizeof(double));
            run_along(begin, end - begin, 1);
            for (int64_t i = begin; i < end; i++) {
                int64_t k = i - begin, old = i - block + 1; /* old: the first that row i sees */
                read(i, values);
                add(values, weight[k], decay[k]);
                total = total * decay[k] + mass[i] * weight[k];
                if (i < first_row) continue;
                bool sees_ends = begin && old < begin;
                float top = peak[k], before = sees_ends ? ends_peak[old - begin + block] : -INFINITY;
                if (!GIVEN) {
                    ceiling[i] = top > before ? top : before;
                    if (!(top == top)) ceiling[i] = top;
                }
                float over = ceiling[i] == -INFINITY ? INFINITY : ceiling[i];
                double mine = expf(top - over), theirs = sees_ends ? expf(before - over) : 0;
                if (!sees_ends) {
                    for (int c = 0; c < pp; c++) other[c] = (float)(sums[c] * mine);
                    emit(i, other, total * mine);
                } else {
                    const float *kept = ends + (old - begin + block) * pp;
                    for (int c = 0; c < pp; c++) other[c] = (float)(sums[c] * mine + kept[c] * theirs);
                    emit(i, other, total * mine + ends_mass[old - begin + block] * theirs);
                }
            }
            if (end == n) return;
            /* The ends of this block, for the rows of the next. */
            run_along(end - 1, end - begin, -1);
            memset(sums, 0, pp * sizeof(double));
            total = 0;
            for (int64_t i = end - 1; i > begin; i--) {
                int64_t k = end - 1 - i;
                read(i, values);
                add(values, weight[k], decay[k]);
                total = total * decay[k] + mass[i] * weight[k];
                float *to = ends + (i - begin) * pp;
                for (int c = 0; c < pp; c++) to[c] = (float)sums[c];
                ends_peak[i - begin] = peak[k], ends_mass[i - begin] = total;
            }
        }
    }

    void forward(int64_t row) {
        int64_t b = row / a.heads, h = row % a.heads;
        gather_places(b);
        for (int64_t j = 0; j < n; j++) logit[j] = focus_of(b, h, j), mass[j] = mass_of(b, h, j);
        float *peaks = a.peaks + row * a.tokens, *inverses = a.inverses + row * a.tokens;
        float *n_last = a.n_last + row * p, last = -INFINITY;
        memset(n_last, 0, p * sizeof(float));
        a.z_last[row] = 0;
        int64_t next = 0; /* The first token that nothing was written of yet. */
        auto blank = [&](int64_t until) {
            clear(values, pp);
            for (; next < until; next++) {
                peaks[next] = last, inverses[next] = 0;
                write_row(at(a.o, b, h, next), values, a.o.type, p);
                if (a.unrounded) clear(a.unrounded + (row * a.tokens + next) * p, p);
            }
        };
        /* With no token of its own, a row ends with what the past is. */
        sum_up<false>(
            n_real ? a.past : 0, [&](int64_t j, float *to) { read_values(b, h, j, to); },
            [&](int64_t i, float *sum, double mass_seen) {
                float z = (float)mass_seen;
                last = ceiling[i];
                if (i == n - 1) {
                    memcpy(n_last, sum, p * sizeof(float));
                    a.z_last[row] = z;
                }
                if (i < a.past) return;
                int64_t t = place[i - a.past];
                float before = last;
                last = i > a.past ? ceiling[i - 1] : -INFINITY;
                blank(t);
                last = before;
                float inverse = 1 / (z < 1 ? 1 : z);
                for (int c = 0; c < pp; c += W) store(sum + c, load(sum + c) * all(inverse));
                peaks[t] = last, inverses[t] = inverse;
                write_row(at(a.o, b, h, t), sum, a.o.type, p);
                if (a.unrounded) memcpy(a.unrounded + (row * a.tokens + t) * p, sum, p * sizeof(float));
                next = t + 1;
            });
        blank(a.tokens);
    }

    void backward(int64_t row) {
        int64_t b = row / a.heads, h = row % a.heads;
        gather_places(b);
        const float *peaks = a.peaks + row * a.tokens, *inverses = a.inverses + row * a.tokens;
        const float *dn_last = a.dn_last ? a.dn_last + row * p : nullptr;
        auto upstream = [&](int64_t i, float *to) {
            if (i < a.past) return clear(to, pp); /* The past is looked at, but does not look. */
            int64_t t = place[i - a.past];
            read_row(to, at(a.d_o, b, h, t), a.d_o.type, p);
            for (int c = p; c < pp; c++) to[c] = 0;
            for (int c = 0; c < pp; c += W) store(to + c, load(to + c) * all(inverses[t]));
            if (i == n - 1 && dn_last)
                for (int c = 0; c < p; c++) to[c] += dn_last[c];
        };
        for (int64_t j = 0; j < n; j++) { /* Element j in time, n - 1 - j backwards. */
            int64_t back = n - 1 - j, t = j < a.past ? 0 : place[j - a.past];
            ceiling[back] = -focus_of(b, h, j);
            float top = j < a.past ? -INFINITY : peaks[t];
            logit[back] = top == -INFINITY ? -INFINITY : -top;
            mass[back] = 0;
            if (j < a.past) continue;
            read_row(values, at(a.d_o, b, h, t), a.d_o.type, p);
            read_row(other, at(a.o, b, h, t), a.o.type, p);
            double e = 0;
            for (int c = 0; c < p; c++) e += (double)values[c] * other[c];
            mass[back] = e * inverses[t];
            if (j == n - 1 && a.dz_last) mass[back] -= a.dz_last[row];
        }
        int64_t next = a.tokens;
        auto blank = [&](int64_t after) {
            clear(values, pp);
            while (next > after) {
                next--;
                *(float *)at(a.dfocus, b, h, next) = 0;
                write_row(at(a.dv, b, h, next), values, a.dv.type, p);
            }
        };
        sum_up<true>(
            0, [&](int64_t i, float *to) { upstream(n - 1 - i, to); },
            [&](int64_t back, float *sum, double e) {
                int64_t j = n - 1 - back;
                read_values(b, h, j, values);
                double slope = 0;
                for (int c = 0; c < p; c++) slope += (double)values[c] * sum[c];
                slope -= mass_of(b, h, j) * e;
                if (j < a.past) {
                    int64_t to = row * a.past + j;
                    a.dpast_focus[to] = (float)slope, a.dpast_mass[to] = (float)-e;
                    memcpy(a.dpast_v + to * p, sum, p * sizeof(float));
                    return;
                }
                int64_t t = place[j - a.past];
                blank(t + 1);
                *(float *)at(a.dfocus, b, h, t) = (float)slope;
                write_row(at(a.dv, b, h, t), sum, a.dv.type, p);
                next = t;
            });
        blank(0);
    }
};

} // namespace
