// Sixteen lanes in two 256-bit registers (AVX2, FMA, F16C).
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#define KVR_ISA avx2
#define KVR_TILE_ROWS 4

namespace kvr::KVR_ISA {

struct F {
    __m256 a, b;
};
struct I {
    __m256i a, b;
};
struct B {
    __m256i a, b;
};

inline F zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline F set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline F load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, F x) {
    _mm256_storeu_ps(p, x.a);
    _mm256_storeu_ps(p + 8, x.b);
}
inline F add(F x, F y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline F sub(F x, F y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline F mul(F x, F y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline F div(F x, F y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline F fma(F x, F y, F z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
/// The larger; where one is NaN, the second.
inline F max(F x, F y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline F rint(F x) {
    constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return {_mm256_round_ps(x.a, mode), _mm256_round_ps(x.b, mode)};
}
inline F neg(F x) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return {_mm256_xor_ps(x.a, sign), _mm256_xor_ps(x.b, sign)};
}
/// Where `x` is below `limit` (false for NaN): `then`, else `otherwise`.
inline F if_below(F x, F limit, F then, F otherwise) {
    return {_mm256_blendv_ps(otherwise.a, then.a, _mm256_cmp_ps(x.a, limit.a, _CMP_LT_OQ)),
            _mm256_blendv_ps(otherwise.b, then.b, _mm256_cmp_ps(x.b, limit.b, _CMP_LT_OQ))};
}
inline F cvt(I x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
/// Nearest whole number; of what does not fit, anything.
inline I to_int(F x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
/// `y` times 2 to the power of `n`, a whole number; neither y nor the result is denormal. NaN stays NaN.
inline F times_power(F y, F n) {
    const I power = to_int(n);
    return {_mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(y.a), _mm256_slli_epi32(power.a, 23))),
            _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(y.b), _mm256_slli_epi32(power.b, 23)))};
}
inline I set1(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline I add(I x, I y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
inline I max(I x, I y) { return {_mm256_max_epi32(x.a, y.a), _mm256_max_epi32(x.b, y.b)}; }
inline I magnitude_bits(F x) {
    const __m256i mask = _mm256_set1_epi32(0x7fffffff);
    return {_mm256_and_si256(_mm256_castps_si256(x.a), mask), _mm256_and_si256(_mm256_castps_si256(x.b), mask)};
}

inline void prefetch(const void* p) { __builtin_prefetch(p); }

inline float tree16(F x) {
    const __m256 t8 = _mm256_add_ps(x.a, x.b);
    const __m128 t4 = _mm_add_ps(_mm256_castps256_ps128(t8), _mm256_extractf128_ps(t8, 1));
    const __m128 t2 = _mm_add_ps(t4, _mm_movehl_ps(t4, t4));
    return _mm_cvtss_f32(_mm_add_ss(t2, _mm_movehdup_ps(t2)));
}
/// Lane k of the result is `tree16(rows[k])`.
inline F tree16_each(const F* rows) {
    // t4 of two rows side by side, then the halves of four of those as in tree16.
    const auto t4 = [rows](int low, int high) {
        const __m256 p = _mm256_add_ps(rows[low].a, rows[low].b), q = _mm256_add_ps(rows[high].a, rows[high].b);
        return _mm256_add_ps(_mm256_permute2f128_ps(p, q, 0x20), _mm256_permute2f128_ps(p, q, 0x31));
    };
    const auto eight = [&t4](int k) {
        const __m256 p = t4(k, k + 4), q = t4(k + 1, k + 5), r = t4(k + 2, k + 6), s = t4(k + 3, k + 7);
        const __m256 t2 = _mm256_add_ps(_mm256_shuffle_ps(p, q, 0x44), _mm256_shuffle_ps(p, q, 0xEE));
        const __m256 u2 = _mm256_add_ps(_mm256_shuffle_ps(r, s, 0x44), _mm256_shuffle_ps(r, s, 0xEE));
        return _mm256_add_ps(_mm256_shuffle_ps(t2, u2, 0x88), _mm256_shuffle_ps(t2, u2, 0xDD));
    };
    return {eight(0), eight(8)};
}
inline float max_lane(F x) {
    const __m256 m8 = _mm256_max_ps(x.a, x.b);
    __m128 m = _mm_max_ps(_mm256_castps256_ps128(m8), _mm256_extractf128_ps(m8, 1));
    m = _mm_max_ps(m, _mm_movehl_ps(m, m));
    return _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)));
}
inline int32_t max_lane(I x) {
    const __m256i m8 = _mm256_max_epi32(x.a, x.b);
    __m128i m = _mm_max_epi32(_mm256_castsi256_si128(m8), _mm256_extracti128_si256(m8, 1));
    m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0x4E));
    return _mm_cvtsi128_si32(_mm_max_epi32(m, _mm_shuffle_epi32(m, 0xB1)));
}
inline int32_t sum_lanes(I x) {
    const __m256i s8 = _mm256_add_epi32(x.a, x.b);
    __m128i s = _mm_add_epi32(_mm256_castsi256_si128(s8), _mm256_extracti128_si256(s8, 1));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4E));
    return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 0xB1)));
}

inline __m128i load128(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
inline F load_half(const uint16_t* p) { return {_mm256_cvtph_ps(load128(p)), _mm256_cvtph_ps(load128(p + 8))}; }
inline F load_bf16(const uint16_t* p) {
    return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load128(p)), 16)),
            _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load128(p + 8)), 16))};
}
inline F widen_int8(__m128i x) {
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(x)), _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(x, 8)))};
}
inline F load_int8(const int8_t* p) { return widen_int8(load128(p)); }
/// Lane 2i from the low half of byte i, lane 2i + 1 from its high half, both signed.
inline F load_int4(const uint8_t* p) {
    const __m128i packed = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
    const __m128i halves = _mm_unpacklo_epi8(packed, _mm_srli_epi16(packed, 4));
    const __m128i eight = _mm_set1_epi8(8);
    return widen_int8(_mm_sub_epi8(_mm_xor_si128(_mm_and_si128(halves, _mm_set1_epi8(15)), eight), eight));
}
inline __m128i to_bf16(__m256 x) {
    const __m256i wide = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(wide, 16), _mm256_set1_epi32(1));
    __m256i r = _mm256_srli_epi32(_mm256_add_epi32(wide, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    r = _mm256_blendv_epi8(r, _mm256_set1_epi32(0x7fc0), nan);
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(r, r), 0x08);
    return _mm256_castsi256_si128(packed);
}
inline void store_bf16(uint16_t* p, F x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), to_bf16(x.a));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 8), to_bf16(x.b));
}
inline void store_int8(int8_t* p, I x) {
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.a, x.b), 0xD8);
    const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
}

/// `to[d * to_stride + t] = from[t * from_stride + d]` for sixteen t and d.
inline void transpose16(const float* from, int64_t from_stride, float* to, int64_t to_stride) {
    for (int t = 0; t < 16; ++t)
        for (int d = 0; d < 16; ++d) to[d * to_stride + t] = from[t * from_stride + d];
}

inline B load_bytes(const uint8_t* p) {
    return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
            _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32))};
}
inline B low_halves(B x) {
    const __m256i mask = _mm256_set1_epi8(15);
    return {_mm256_and_si256(x.a, mask), _mm256_and_si256(x.b, mask)};
}
inline B high_halves(B x) { return low_halves({_mm256_srli_epi16(x.a, 4), _mm256_srli_epi16(x.b, 4)}); }
/// Adds to lane c the product of the unsigned bytes 4c..4c+3 of `w` with the four signed bytes at `x`. `Wide`: bytes of
/// `w` may be above 127, and a pair of products beyond 16 bits: their top bits are multiplied on their own.
template <bool Wide>
inline I dot4(I sum, B w, const int8_t* x) {
    int32_t four;
    std::memcpy(&four, x, 4);
    const __m256i v = _mm256_set1_epi32(four), ones = _mm256_set1_epi16(1);
    const auto product = [v, ones](__m256i part) { return _mm256_madd_epi16(_mm256_maddubs_epi16(part, v), ones); };
    if (Wide) {
        const __m256i low = _mm256_set1_epi8(0x7f), top = _mm256_set1_epi8(static_cast<char>(0x80));
        sum = add(sum, {product(_mm256_and_si256(w.a, top)), product(_mm256_and_si256(w.b, top))});
        w = {_mm256_and_si256(w.a, low), _mm256_and_si256(w.b, low)};
    }
    return add(sum, {product(w.a), product(w.b)});
}

}  // namespace kvr::KVR_ISA
