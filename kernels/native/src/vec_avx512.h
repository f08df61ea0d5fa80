// Sixteen lanes in one 512-bit register (AVX-512 F, BW, VL, DQ and VNNI).
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#define KVR_ISA avx512
#define KVR_TILE_ROWS 8

namespace kvr::KVR_ISA {

struct F {
    __m512 v;
};
struct I {
    __m512i v;
};
struct B {
    __m512i v;
};

inline F zero() { return {_mm512_setzero_ps()}; }
inline F set1(float x) { return {_mm512_set1_ps(x)}; }
inline F load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, F x) { _mm512_storeu_ps(p, x.v); }
inline F add(F x, F y) { return {_mm512_add_ps(x.v, y.v)}; }
inline F sub(F x, F y) { return {_mm512_sub_ps(x.v, y.v)}; }
inline F mul(F x, F y) { return {_mm512_mul_ps(x.v, y.v)}; }
inline F div(F x, F y) { return {_mm512_div_ps(x.v, y.v)}; }
inline F fma(F x, F y, F z) { return {_mm512_fmadd_ps(x.v, y.v, z.v)}; }
/// The larger; where one is NaN, the second.
inline F max(F x, F y) { return {_mm512_max_ps(x.v, y.v)}; }
inline F rint(F x) { return {_mm512_roundscale_ps(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
inline F neg(F x) { return {_mm512_xor_ps(x.v, _mm512_set1_ps(-0.0f))}; }
/// Where `x` is below `limit` (false for NaN): `then`, else `otherwise`.
inline F if_below(F x, F limit, F then, F otherwise) {
    return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(x.v, limit.v, _CMP_LT_OQ), otherwise.v, then.v)};
}
inline F cvt(I x) { return {_mm512_cvtepi32_ps(x.v)}; }
/// Nearest whole number; of what does not fit, anything.
inline I to_int(F x) { return {_mm512_cvtps_epi32(x.v)}; }
/// `y` times 2 to the power of `n`, a whole number; neither y nor the result is denormal. NaN stays NaN.
inline F times_power(F y, F n) { return {_mm512_scalef_ps(y.v, n.v)}; }
inline I set1(int32_t x) { return {_mm512_set1_epi32(x)}; }
inline I add(I x, I y) { return {_mm512_add_epi32(x.v, y.v)}; }
inline I max(I x, I y) { return {_mm512_max_epi32(x.v, y.v)}; }
inline I magnitude_bits(F x) { return {_mm512_and_si512(_mm512_castps_si512(x.v), _mm512_set1_epi32(0x7fffffff))}; }

inline void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }

inline float tree16(F x) {
    const __m256 t8 = _mm256_add_ps(_mm512_castps512_ps256(x.v), _mm512_extractf32x8_ps(x.v, 1));
    const __m128 t4 = _mm_add_ps(_mm256_castps256_ps128(t8), _mm256_extractf128_ps(t8, 1));
    const __m128 t2 = _mm_add_ps(t4, _mm_movehl_ps(t4, t4));
    return _mm_cvtss_f32(_mm_add_ss(t2, _mm_movehdup_ps(t2)));
}
/// Lane k of the result is `tree16(rows[k])`.
inline F tree16_each(const F* rows) {
    // Four rows k, k + 4, k + 8, k + 12 become their t4, one in each quarter.
    const auto t4 = [rows](int k) {
        const auto t8 = [rows](int p, int q) {
            const __m512 x = rows[p].v, y = rows[q].v;
            return _mm512_add_ps(_mm512_shuffle_f32x4(x, y, 0x44), _mm512_shuffle_f32x4(x, y, 0xEE));
        };
        const __m512 x = t8(k, k + 4), y = t8(k + 8, k + 12);
        return _mm512_add_ps(_mm512_shuffle_f32x4(x, y, 0x88), _mm512_shuffle_f32x4(x, y, 0xDD));
    };
    const __m512 p = t4(0), q = t4(1), r = t4(2), s = t4(3);
    const __m512 t2 = _mm512_add_ps(_mm512_shuffle_ps(p, q, 0x44), _mm512_shuffle_ps(p, q, 0xEE));
    const __m512 u2 = _mm512_add_ps(_mm512_shuffle_ps(r, s, 0x44), _mm512_shuffle_ps(r, s, 0xEE));
    return {_mm512_add_ps(_mm512_shuffle_ps(t2, u2, 0x88), _mm512_shuffle_ps(t2, u2, 0xDD))};
}
inline float max_lane(F x) { return _mm512_reduce_max_ps(x.v); }
inline int32_t max_lane(I x) { return _mm512_reduce_max_epi32(x.v); }
inline int32_t sum_lanes(I x) { return _mm512_reduce_add_epi32(x.v); }

inline __m128i load128(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
inline __m256i load256(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
inline F load_half(const uint16_t* p) { return {_mm512_cvtph_ps(load256(p))}; }
inline F load_bf16(const uint16_t* p) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load256(p)), 16))};
}
inline F load_int8(const int8_t* p) { return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load128(p)))}; }
/// Lane 2i from the low half of byte i, lane 2i + 1 from its high half, both signed.
inline F load_int4(const uint8_t* p) {
    const __m128i packed = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
    const __m128i halves = _mm_unpacklo_epi8(packed, _mm_srli_epi16(packed, 4));
    const __m512i lanes = _mm512_slli_epi32(_mm512_cvtepu8_epi32(halves), 28);
    return {_mm512_cvtepi32_ps(_mm512_srai_epi32(lanes, 28))};
}
inline void store_bf16(uint16_t* p, F x) {
    const __m512i wide = _mm512_castps_si512(x.v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(wide, 16), _mm512_set1_epi32(1));
    __m512i r = _mm512_srli_epi32(_mm512_add_epi32(wide, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
    r = _mm512_mask_mov_epi32(r, _mm512_cmp_ps_mask(x.v, x.v, _CMP_UNORD_Q), _mm512_set1_epi32(0x7fc0));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(r));
}
inline void store_int8(int8_t* p, I x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(x.v));
}

/// `to[d * to_stride + t] = from[t * from_stride + d]` for sixteen t and d.
inline void transpose16(const float* from, int64_t from_stride, float* to, int64_t to_stride) {
    __m512 a[16], b[16];
    for (int t = 0; t < 16; ++t) a[t] = _mm512_loadu_ps(from + t * from_stride);
    for (int t = 0; t < 16; t += 2) {
        b[t] = _mm512_unpacklo_ps(a[t], a[t + 1]);
        b[t + 1] = _mm512_unpackhi_ps(a[t], a[t + 1]);
    }
    for (int t = 0; t < 16; t += 4) {  // a[t + i]: column i of each quarter, of rows t to t + 3
        a[t] = _mm512_shuffle_ps(b[t], b[t + 2], 0x44);
        a[t + 1] = _mm512_shuffle_ps(b[t], b[t + 2], 0xEE);
        a[t + 2] = _mm512_shuffle_ps(b[t + 1], b[t + 3], 0x44);
        a[t + 3] = _mm512_shuffle_ps(b[t + 1], b[t + 3], 0xEE);
    }
    for (int i = 0; i < 4; ++i) {
        const __m512 low = _mm512_shuffle_f32x4(a[i], a[4 + i], 0x88), high = _mm512_shuffle_f32x4(a[8 + i], a[12 + i], 0x88);
        const __m512 odd_low = _mm512_shuffle_f32x4(a[i], a[4 + i], 0xDD);
        const __m512 odd_high = _mm512_shuffle_f32x4(a[8 + i], a[12 + i], 0xDD);
        _mm512_storeu_ps(to + i * to_stride, _mm512_shuffle_f32x4(low, high, 0x88));
        _mm512_storeu_ps(to + (8 + i) * to_stride, _mm512_shuffle_f32x4(low, high, 0xDD));
        _mm512_storeu_ps(to + (4 + i) * to_stride, _mm512_shuffle_f32x4(odd_low, odd_high, 0x88));
        _mm512_storeu_ps(to + (12 + i) * to_stride, _mm512_shuffle_f32x4(odd_low, odd_high, 0xDD));
    }
}

inline B load_bytes(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
inline B low_halves(B x) { return {_mm512_and_si512(x.v, _mm512_set1_epi8(15))}; }
inline B high_halves(B x) { return low_halves({_mm512_srli_epi16(x.v, 4)}); }
/// Adds to lane c the product of the unsigned bytes 4c..4c+3 of `w` with the four signed bytes at `x`. `Wide`: bytes of
/// `w` may be above 127, which costs nothing here.
template <bool Wide>
inline I dot4(I sum, B w, const int8_t* x) {
    int32_t four;
    std::memcpy(&four, x, 4);
    return {_mm512_dpbusd_epi32(sum.v, w.v, _mm512_set1_epi32(four))};
}

}  // namespace kvr::KVR_ISA
