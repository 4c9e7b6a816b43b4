/* The library against its formulas in double precision, without Python: for processors that are only
emulated here. Gradients are compared by how much the formula changes along a random direction.

Prints a line for each comparison and returns how many failed. */

#include <cmath>
#include <cstdio>
#include <functional>
#include <vector>

#include "../../src/native/leap.h"

namespace {

typedef std::vector<float> Numbers;
typedef std::vector<double> Exact;

int failures = 0;
uint64_t seed = 1;

double random_number() { /* From 0 to 1. */
    seed = seed * 6364136223846793005ULL + 1442695040888963407ULL;
    return (double)(seed >> 40) / (1 << 24);
}

Numbers numbers(int64_t n, double low, double high) {
    Numbers made(n);
    for (float &x : made) x = (float)(low + (high - low) * random_number());
    return made;
}

Exact exact(const Numbers &x) { return Exact(x.begin(), x.end()); }

void compare(const char *what, const char *name, const Exact &found, const Exact &truth) {
    double error = 0, largest = 0;
    for (size_t i = 0; i < truth.size(); i++) {
        error = std::fmax(error, std::isfinite(found[i]) ? std::fabs(found[i] - truth[i]) : INFINITY);
        largest = std::fmax(largest, std::fabs(truth[i]));
    }
    bool fine = error <= 2e-5 * largest;
    failures += !fine;
    printf("%s %s: off by %.1e of its largest number%s\n", what, name, error / largest, fine ? "" : ": FAILED");
}

/* A gradient against the change of `loss` along a random direction. */
void compare_gradient(const char *what, const char *name, const Numbers &gradient, Exact &input, const std::function<double()> &loss) {
    Exact before = input, direction(input.size());
    for (double &x : direction) x = 2 * random_number() - 1;
    double step = 1e-5, found = 0, size = 0, change = 0;
    for (int sign = -1; sign <= 1; sign += 2) {
        for (size_t i = 0; i < input.size(); i++) input[i] = before[i] + sign * step * direction[i];
        change += sign * loss() / (2 * step);
    }
    input = before;
    for (size_t i = 0; i < input.size(); i++) {
        found += gradient[i] * direction[i];
        size += (double)gradient[i] * gradient[i];
    }
    /* Relative to the gradient's length: along a direction it may be about 0. */
    bool fine = std::fabs(found - change) <= 1e-4 * std::sqrt(size);
    failures += !fine;
    printf("%s d%s: %.6g along a direction, expected %.6g%s\n", what, name, found, change, fine ? "" : ": FAILED");
}

View view(Numbers &x, int64_t heads, int64_t tokens, int64_t width) {
    View made = {};
    if (x.empty()) return made;
    made.data = x.data();
    made.stride[0] = heads * tokens * width, made.stride[1] = tokens * width, made.stride[2] = width;
    return made;
}

double phi(double x, int64_t map) { return map == ELU_PLUS_ONE ? (x > 0 ? x + 1 : std::exp(x)) : x; }

struct Case {
    const char *name;
    bool causal;
    int64_t t, n, f, e, r, map;
    bool gated, masked;
};

void check_linear_attention(const Case &c) {
    const int64_t b = 2, h = 2, rows = b * h;
    const double low = c.map ? -1 : 0.1;
    Numbers q = numbers(rows * c.t * c.f, low, 1), k = numbers(rows * c.n * c.f, low, 1), v = numbers(rows * c.n * c.e, -1, 1);
    Numbers x = numbers(rows * c.t * c.r, 0.1, 1), y = numbers(rows * c.n * c.r, 0.1, 1), gate = numbers(c.gated ? rows * c.t : 0, -0.3, 0);
    Numbers upstream = numbers(rows * c.t * c.e, -1, 1);
    std::vector<uint8_t> mask(c.masked ? b * c.n : 0);
    for (uint8_t &real : mask) real = random_number() < 0.7;
    for (int64_t i = 0; i < b && c.masked; i++) mask[i * c.n] = 1;

    Exact eq = exact(q), ek = exact(k), ev = exact(v), ex = exact(x), ey = exact(y), egate = exact(gate), truth(rows * c.t * c.e);
    auto formula = [&]() {
        double loss = 0;
        for (int64_t row = 0; row < rows; row++)
            for (int64_t i = 0; i < c.t; i++) {
                Exact num(c.e);
                double den = 0, faded = 0;
                for (int64_t j = c.causal ? i : c.n - 1; j >= 0; j--) {
                    double dots = 0, weight = c.r ? 0 : 1;
                    for (int64_t f = 0; f < c.f; f++)
                        dots += phi(eq[(row * c.t + i) * c.f + f], c.map) * phi(ek[(row * c.n + j) * c.f + f], c.map);
                    for (int64_t m = 0; m < c.r; m++) weight += ex[(row * c.t + i) * c.r + m] * ey[(row * c.n + j) * c.r + m];
                    double a = dots * weight * std::exp(faded);
                    if (c.gated) faded += egate[row * c.t + j];
                    if (c.masked && !mask[row / h * c.n + j]) continue;
                    den += a;
                    for (int64_t e = 0; e < c.e; e++) num[e] += a * ev[(row * c.n + j) * c.e + e];
                }
                for (int64_t e = 0; e < c.e; e++) {
                    double o = num[e] / den;
                    truth[(row * c.t + i) * c.e + e] = o;
                    loss += o * upstream[(row * c.t + i) * c.e + e];
                }
            }
        return loss;
    };
    formula();

    int64_t parts = c.r ? c.r : 1, fp = (c.f + 15) / 16 * 16, ep = (c.e + 15) / 16 * 16;
    Numbers o(rows * c.t * c.e), den(rows * c.t), marks((c.t / 1024 + 1) * rows * parts * fp * (ep + 1));
    std::vector<double> kv(rows * parts * c.f * c.e), k_sum(rows * parts * c.f);
    Attention call = {};
    call.batch = b, call.heads = h, call.tokens = c.t, call.features = c.f, call.values = c.e, call.rank = c.r, call.sources = c.n;
    call.map_q = call.map_k = c.map, call.map_scale = 1, call.map_limit = 30, call.eps = 1e-6, call.normalise = 1;
    call.q = view(q, h, c.t, c.f), call.k = view(k, h, c.n, c.f), call.v = view(v, h, c.n, c.e);
    call.x = view(x, h, c.t, c.r), call.y = view(y, h, c.n, c.r), call.gate = view(gate, h, c.t, 1);
    if (c.masked) call.mask.data = mask.data(), call.mask.stride[0] = c.n, call.mask.stride[2] = 1;
    call.kv_after = kv.data(), call.k_sum_after = k_sum.data();
    call.den = den.data(), call.marks = marks.data(), call.o = view(o, h, c.t, c.e);
    auto scratch = c.causal ? leap_causal_scratch : leap_whole_scratch;
    Numbers memory(2 * scratch(&call, 0));
    (c.causal ? leap_causal : leap_whole)(&call, memory.data(), 2);
    compare(c.name, "o", exact(o), truth);

    Numbers dq(q.size()), dk(k.size()), dv(v.size()), dx(x.size()), dy(y.size()), dgate(gate.size());
    call.d_o = view(upstream, h, c.t, c.e);
    call.dq = view(dq, h, c.t, c.f), call.dk = view(dk, h, c.n, c.f), call.dv = view(dv, h, c.n, c.e);
    call.dx = view(dx, h, c.t, c.r), call.dy = view(dy, h, c.n, c.r), call.dgate = view(dgate, h, c.t, 1);
    if (!c.causal) call.kv = kv.data(), call.k_sum = k_sum.data();
    memory.resize(2 * scratch(&call, 1));
    (c.causal ? leap_causal_backward : leap_whole_backward)(&call, memory.data(), 2);
    compare_gradient(c.name, "q", dq, eq, formula);
    compare_gradient(c.name, "k", dk, ek, formula);
    compare_gradient(c.name, "v", dv, ev, formula);
    if (c.r) compare_gradient(c.name, "x", dx, ex, formula), compare_gradient(c.name, "y", dy, ey, formula);
    if (c.gated) compare_gradient(c.name, "gate", dgate, egate, formula);
}

void check_additive_attention(const char *name, int64_t window) {
    const int64_t b = 1, h = 2, t = 90, p = 10, rows = b * h;
    Numbers focus = numbers(rows * t, -3, 3), v = numbers(rows * t * p, -1, 1), upstream = numbers(rows * t * p, -1, 1);
    Exact efocus = exact(focus), ev = exact(v), truth(rows * t * p);
    auto formula = [&]() {
        double loss = 0;
        for (int64_t row = 0; row < rows; row++)
            for (int64_t i = 0; i < t; i++) {
                Exact num(p);
                double den = 0;
                for (int64_t j = window && i >= window ? i - window + 1 : 0; j <= i; j++) {
                    double a = std::exp(efocus[row * t + j]);
                    den += a;
                    for (int64_t e = 0; e < p; e++) num[e] += a * ev[(row * t + j) * p + e];
                }
                for (int64_t e = 0; e < p; e++) {
                    truth[(row * t + i) * p + e] = num[e] / den;
                    loss += num[e] / den * upstream[(row * t + i) * p + e];
                }
            }
        return loss;
    };
    formula();
    Numbers o(v.size()), peaks(rows * t), inverses(rows * t), n_last(rows * p), z_last(rows), dfocus(focus.size()), dv(v.size());
    Additive call = {};
    call.batch = b, call.heads = h, call.tokens = t, call.values = p, call.window = window;
    call.focus = view(focus, h, t, 1), call.v = view(v, h, t, p), call.o = view(o, h, t, p);
    call.peaks = peaks.data(), call.inverses = inverses.data(), call.n_last = n_last.data(), call.z_last = z_last.data();
    Numbers memory(leap_additive_scratch(&call));
    leap_additive(&call, memory.data(), 1);
    compare(name, "o", exact(o), truth);
    call.d_o = view(upstream, h, t, p), call.dfocus = view(dfocus, h, t, 1), call.dv = view(dv, h, t, p);
    leap_additive_backward(&call, memory.data(), 1);
    compare_gradient(name, "focus", dfocus, efocus, formula);
    compare_gradient(name, "v", dv, ev, formula);
}

void check_convolution() {
    const int64_t b = 2, t = 40, d = 21, taps = 4;
    Numbers x = numbers(b * t * d, -1, 1), weight = numbers(d * taps, -1, 1), past = numbers(b * (taps - 1) * d, -1, 1);
    Numbers upstream = numbers(b * t * d, -1, 1);
    Exact ex = exact(x), eweight = exact(weight), epast = exact(past), truth(b * t * d);
    auto formula = [&]() {
        double loss = 0;
        for (int64_t i = 0; i < b; i++)
            for (int64_t s = 0; s < t; s++)
                for (int64_t c = 0; c < d; c++) {
                    double z = 0;
                    for (int64_t j = 0; j < taps; j++) {
                        int64_t at = s - taps + 1 + j;
                        z += eweight[c * taps + j] * (at < 0 ? epast[(i * (taps - 1) + at + taps - 1) * d + c] : ex[(i * t + at) * d + c]);
                    }
                    double out = z / (1 + std::exp(-z));
                    truth[(i * t + s) * d + c] = out;
                    loss += out * upstream[(i * t + s) * d + c];
                }
        return loss;
    };
    formula();
    Numbers out(x.size()), dx(x.size()), dpast(past.size()), dweight(weight.size());
    std::vector<double> each(b * taps * d);
    Convolution call = {};
    call.batch = b, call.tokens = t, call.channels = d, call.taps = taps, call.silu = 1;
    call.x = x.data(), call.x_stride[0] = t * d, call.x_stride[1] = d;
    call.weight = weight.data(), call.past = past.data(), call.y = out.data();
    Numbers memory(leap_convolution_scratch(&call));
    leap_convolution(&call, memory.data(), 1);
    compare("convolution", "y", exact(out), truth);
    call.dy = upstream.data(), call.dx = dx.data(), call.dpast = dpast.data(), call.dweight = each.data();
    leap_convolution_backward(&call, memory.data(), 1);
    for (int64_t i = 0; i < b; i++)
        for (int64_t j = 0; j < taps; j++)
            for (int64_t c = 0; c < d; c++) dweight[c * taps + j] += (float)each[(i * taps + j) * d + c];
    compare_gradient("convolution", "x", dx, ex, formula);
    compare_gradient("convolution", "past", dpast, epast, formula);
    compare_gradient("convolution", "weight", dweight, eweight, formula);
}

void check_linear_layer(int64_t rows) {
    const int64_t n_in = 53, n_out = 37;
    Numbers weight = numbers(n_out * n_in, -1, 1), bias = numbers(n_out, -1, 1), x = numbers(rows * n_in, -1, 1), y(rows * n_out);
    Exact truth(rows * n_out);
    for (int64_t i = 0; i < rows; i++)
        for (int64_t n = 0; n < n_out; n++) {
            double total = bias[n];
            for (int64_t k = 0; k < n_in; k++) total += (double)x[i * n_in + k] * weight[n * n_in + k];
            truth[i * n_out + n] = total;
        }
    Linear layer = {weight.data(), bias.data(), n_in, n_out};
    Numbers memory(leap_linear_scratch(&layer, rows));
    leap_linear(&layer, rows, x.data(), y.data(), memory.data());
    compare(rows == 1 ? "linear layer of a row" : "linear layer of rows", "y", exact(y), truth);
}

} // namespace

int main(int argc, char **argv) {
    if (!leap_instructions() || (argc > 1 && !leap_use_instructions(argv[1]))) return printf("no such instruction set here\n"), 1;
    printf("instructions: %s\n", leap_instructions());
    const Case cases[] = {
        {"causal", true, 70, 70, 16, 16, 0, NO_MAP, false, false},
        {"causal, rank 2", true, 133, 133, 24, 40, 2, ELU_PLUS_ONE, false, true},
        {"causal, gates and rank 3", true, 70, 70, 5, 3, 3, ELU_PLUS_ONE, true, false},
        {"whole", false, 9, 70, 16, 16, 0, NO_MAP, false, false},
        {"whole, rank 2", false, 133, 75, 24, 40, 2, ELU_PLUS_ONE, false, true},
    };
    for (const Case &each : cases) check_linear_attention(each);
    check_additive_attention("additive", 0);
    check_additive_attention("additive, window 7", 7);
    check_convolution();
    check_linear_layer(1);
    check_linear_layer(11);
    return failures;
}
