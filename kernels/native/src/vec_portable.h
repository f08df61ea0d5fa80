// Sixteen lanes in plain C++: the instruction set that every machine has, and what the others are compared with.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "half.h"

#define KVR_ISA portable
#define KVR_TILE_ROWS 4
#define KVR_ROLLED

namespace kvr::KVR_ISA {

struct F {
    float v[16];
};
struct I {
    int32_t v[16];
};
struct B {
    uint8_t v[64];
};

inline F zero() { return F{}; }
inline F set1(float x) {
    F r;
    for (float& y : r.v) y = x;
    return r;
}
inline F load(const float* p) {
    F r;
    std::memcpy(r.v, p, sizeof r.v);
    return r;
}
inline void store(float* p, F a) { std::memcpy(p, a.v, sizeof a.v); }

#define KVR_LANES(T, expression)                       \
    T r;                                               \
    for (int i = 0; i < 16; ++i) r.v[i] = expression;  \
    return r
inline F add(F a, F b) { KVR_LANES(F, a.v[i] + b.v[i]); }
inline F sub(F a, F b) { KVR_LANES(F, a.v[i] - b.v[i]); }
inline F mul(F a, F b) { KVR_LANES(F, a.v[i] * b.v[i]); }
inline F div(F a, F b) { KVR_LANES(F, a.v[i] / b.v[i]); }
inline F fma(F a, F b, F c) { KVR_LANES(F, std::fmaf(a.v[i], b.v[i], c.v[i])); }
/// The larger; where one is NaN, the second.
inline F max(F a, F b) { KVR_LANES(F, a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
inline F rint(F a) { KVR_LANES(F, std::nearbyintf(a.v[i])); }
inline F neg(F a) { KVR_LANES(F, -a.v[i]); }
/// Where `a` is below `limit` (false for NaN): `then`, else `otherwise`.
inline F if_below(F a, F limit, F then, F otherwise) { KVR_LANES(F, a.v[i] < limit.v[i] ? then.v[i] : otherwise.v[i]); }
inline F cvt(I a) { KVR_LANES(F, static_cast<float>(a.v[i])); }
/// Nearest whole number; of what does not fit, anything.
inline I to_int(F a) { KVR_LANES(I, a.v[i] > -2e9f && a.v[i] < 2e9f ? static_cast<int32_t>(std::nearbyintf(a.v[i])) : 0); }
/// `y` times 2 to the power of `n`, a whole number; neither y nor the result is denormal. NaN stays NaN.
inline F times_power(F y, F n) {
    const I power = to_int(n);
    F r;
    for (int i = 0; i < 16; ++i) {
        uint32_t bits;
        std::memcpy(&bits, &y.v[i], 4);
        bits += static_cast<uint32_t>(power.v[i]) << 23;
        std::memcpy(&r.v[i], &bits, 4);
    }
    return r;
}
inline I set1(int32_t x) { KVR_LANES(I, x); }
inline I add(I a, I b) { KVR_LANES(I, static_cast<int32_t>(static_cast<uint32_t>(a.v[i]) + static_cast<uint32_t>(b.v[i]))); }
inline I max(I a, I b) { KVR_LANES(I, a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
inline I magnitude_bits(F a) {
    I r;
    std::memcpy(&r, &a, sizeof r);
    for (int32_t& x : r.v) x &= 0x7fffffff;
    return r;
}

inline void prefetch(const void* p) { __builtin_prefetch(p); }

inline float tree16(F a) {
    float t[8];
    for (int i = 0; i < 8; ++i) t[i] = a.v[i] + a.v[i + 8];
    for (int i = 0; i < 4; ++i) t[i] = t[i] + t[i + 4];
    return (t[0] + t[2]) + (t[1] + t[3]);
}
/// Lane k of the result is `tree16(rows[k])`.
inline F tree16_each(const F* rows) {
    F r;
    for (int k = 0; k < 16; ++k) r.v[k] = tree16(rows[k]);
    return r;
}
inline float max_lane(F a) {
    float m = a.v[0];
    for (float x : a.v) m = x > m ? x : m;
    return m;
}
inline int32_t max_lane(I a) {
    int32_t m = a.v[0];
    for (int32_t x : a.v) m = x > m ? x : m;
    return m;
}
inline int32_t sum_lanes(I a) {
    int32_t s = 0;
    for (int32_t x : a.v) s += x;
    return s;
}

inline F load_half(const uint16_t* p) {
    F r;
    for (int i = 0; i < 16; ++i) r.v[i] = half_to_float(p[i]);
    return r;
}
inline F load_bf16(const uint16_t* p) {
    F r;
    for (int i = 0; i < 16; ++i) {
        const uint32_t wide = static_cast<uint32_t>(p[i]) << 16;
        std::memcpy(&r.v[i], &wide, 4);
    }
    return r;
}
inline F load_int8(const int8_t* p) {
    F r;
    for (int i = 0; i < 16; ++i) r.v[i] = p[i];
    return r;
}
/// Lane 2i from the low half of byte i, lane 2i + 1 from its high half, both signed.
inline F load_int4(const uint8_t* p) {
    F r;
    for (int i = 0; i < 8; ++i) {
        r.v[2 * i] = static_cast<float>(static_cast<int8_t>(p[i] << 4) >> 4);
        r.v[2 * i + 1] = static_cast<float>(static_cast<int8_t>(p[i]) >> 4);
    }
    return r;
}
inline void store_bf16(uint16_t* p, F a) {
    for (int i = 0; i < 16; ++i) p[i] = float_to_bf16(a.v[i]);
}
inline void store_int8(int8_t* p, I a) {
    for (int i = 0; i < 16; ++i) p[i] = static_cast<int8_t>(a.v[i]);
}

/// `to[d * to_stride + t] = from[t * from_stride + d]` for sixteen t and d.
inline void transpose16(const float* from, int64_t from_stride, float* to, int64_t to_stride) {
    for (int t = 0; t < 16; ++t)
        for (int d = 0; d < 16; ++d) to[d * to_stride + t] = from[t * from_stride + d];
}

inline B load_bytes(const uint8_t* p) {
    B r;
    std::memcpy(r.v, p, 64);
    return r;
}
inline B low_halves(B a) {
    for (uint8_t& x : a.v) x &= 15;
    return a;
}
inline B high_halves(B a) {
    for (uint8_t& x : a.v) x >>= 4;
    return a;
}
/// Adds to lane c the product of the unsigned bytes 4c..4c+3 of `w` with the four signed bytes at `x`. `Wide`: bytes of
/// `w` may be above 127.
template <bool Wide>
inline I dot4(I sum, B w, const int8_t* x) {
    for (int c = 0; c < 16; ++c)
        for (int j = 0; j < 4; ++j) sum.v[c] += static_cast<int32_t>(w.v[4 * c + j]) * x[j];
    return sum;
}

}  // namespace kvr::KVR_ISA
