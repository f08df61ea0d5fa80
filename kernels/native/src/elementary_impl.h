// What is done to one row by itself: exp, norms, rotation, the gate. See kernels_impl.h.
#pragma once

#include <cmath>

#include "kernels.h"

// Loops over what lies in registers: left rolled, a compiler keeps it in memory. Without vectors there are no registers
// to fill, and unrolled lanes would take minutes to compile.
#if defined(KVR_ROLLED)
#define KVR_UNROLL
#elif defined(__clang__)
#define KVR_UNROLL _Pragma("unroll")
#else
#define KVR_UNROLL _Pragma("GCC unroll 16")
#endif

namespace kvr::KVR_ISA {

namespace {

/// exp of what is at most 88. NaN stays: `max` and `if_below` let it through.
inline F exp_below(F x) {
    const F lowest = set1(-86.0f), clamped = max(lowest, x), n = rint(mul(clamped, set1(1.44269504f)));
    const F r = fma(n, set1(2.12194440e-4f), fma(n, set1(-0.693359375f), clamped));
    F p = set1(1.9875691500e-4f);
    p = fma(p, r, set1(1.3981999507e-3f));
    p = fma(p, r, set1(8.3334519073e-3f));
    p = fma(p, r, set1(4.1665795894e-2f));
    p = fma(p, r, set1(1.6666665459e-1f));
    p = fma(p, r, set1(5.0000001201e-1f));
    const F y = add(fma(p, mul(r, r), r), set1(1.0f));
    return if_below(x, lowest, zero(), times_power(y, n));
}

inline F exp16(F x) { return if_below(set1(88.0f), x, set1(INFINITY), exp_below(x)); }

void exp_all(const float* x, float* y, int64_t count) {
    for (int64_t i = 0; i < count; i += 16) store(y + i, exp16(load(x + i)));
}

void rms_norm(const float* x, const float* weight, float eps, int32_t inputs, float* y) {
    F squares = zero();
    for (int32_t i = 0; i < inputs; i += 16) {
        const F v = load(x + i);
        squares = fma(v, v, squares);
    }
    const float mean = tree16(squares) / static_cast<float>(inputs);
    const F scale = set1(1.0f / sqrtf(mean + eps));
    for (int32_t i = 0; i < inputs; i += 16) store(y + i, mul(mul(load(x + i), scale), load(weight + i)));
}

inline F gated(F gate, F up) { return mul(div(gate, add(set1(1.0f), exp16(neg(gate)))), up); }

void silu_gate(const float* gate, const float* up, int64_t count, float* y) {
    for (int64_t i = 0; i < count; i += 16) store(y + i, gated(load(gate + i), load(up + i)));
}

void rotate(float* x, int32_t heads, int32_t dim, const float* cos, const float* sin) {
    const int32_t half = dim / 2;
    for (int32_t h = 0; h < heads; ++h, x += dim)
        for (int32_t i = 0; i < half; ++i) {  // no fma: -ffp-contract=off
            const float a = x[i], b = x[half + i];
            x[i] = a * cos[i] + b * sin[i];
            x[half + i] = b * cos[half + i] + a * sin[half + i];
        }
}

void scale(float* x, int64_t count, float by) {
    for (int64_t i = 0; i < count; i += 16) store(x + i, mul(load(x + i), set1(by)));
}

}  // namespace

}  // namespace kvr::KVR_ISA
