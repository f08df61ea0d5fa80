// Compiled once for each instruction set, with its flags. Defines KVR_PASSES. Vectors are GCC's and Clang's own, of the
// widest registers that there are.
#include <cmath>
#include <cstring>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "sampler_passes.h"

namespace kvr::sampling {
namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
typedef float F __attribute__((vector_size(4 * kLanes)));
typedef int32_t I __attribute__((vector_size(4 * kLanes)));

inline F set1(float x) { return F{} + x; }

/// Calls `visit(vector, where)` for scores [start, end), with -inf behind the last: nothing is heavier or larger.
template <typename Visit>
inline void each(const float* scores, int64_t start, int64_t end, Visit visit) {
    F x;
    int64_t i = start;
    for (; i + kLanes <= end; i += kLanes) {
        std::memcpy(&x, scores + i, sizeof x);
        visit(x, i);
    }
    if (i < end) {
        x = set1(-__builtin_inff());
        std::memcpy(&x, scores + i, static_cast<size_t>(end - i) * sizeof(float));
        visit(x, i);
    }
}

inline F multiply_add(F a, F b, F c) {
#if defined(__AVX512F__)
    return _mm512_fmadd_ps(a, b, c);
#elif defined(__AVX2__)
    return _mm256_fmadd_ps(a, b, c);
#else
    F r;
    for (int lane = 0; lane < kLanes; ++lane) r[lane] = std::fmaf(a[lane], b[lane], c[lane]);
    return r;
#endif
}

/// `kernels.reference.exponential.exp` for x <= 0.
inline F exp(F x) {
    const I inside = x >= -86.0f;
    x = inside ? x : F{};
    constexpr float kToInteger = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number, half to even
    const F n = (x * 1.44269504f + kToInteger) - kToInteger;
    F r = multiply_add(n, set1(-0.693359375f), x);
    r = multiply_add(n, set1(2.12194440e-4f), r);
    F p = set1(1.9875691500e-4f);
    p = multiply_add(p, r, set1(1.3981999507e-3f));
    p = multiply_add(p, r, set1(8.3334519073e-3f));
    p = multiply_add(p, r, set1(4.1665795894e-2f));
    p = multiply_add(p, r, set1(1.6666665459e-1f));
    p = multiply_add(p, r, set1(5.0000001201e-1f));
    const F y = multiply_add(p, r * r, r) + 1.0f;
    return (F)(((I)y + (__builtin_convertvector(n, I) << 23)) & inside);
}

/// A weight is high * 2^20 + low: both fit into float's bits, so the way there is exact.
struct Weight {
    I high, low;
};

inline Weight weight_of(F scores, Scale scale) {
    const F steps = exp((scores - scale.best) * scale.inv_temperature) * 1048576.0f;
    const I high = __builtin_convertvector(steps, I);
    const F rest = (steps - __builtin_convertvector(high, F)) * 1048576.0f;
    return {high, __builtin_convertvector(rest, I)};
}

inline bool any(I mask) {
#if defined(__AVX512F__)
    return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
#elif defined(__AVX2__)
    return !_mm256_testz_si256((__m256i)mask, (__m256i)mask);
#else
    return (mask[0] | mask[1] | mask[2] | mask[3]) != 0;
#endif
}

inline uint64_t sum_lanes(I v) {
    uint64_t sum = 0;
    for (int lane = 0; lane < kLanes; ++lane) sum += static_cast<uint32_t>(v[lane]);
    return sum;
}

bool group_maxima(const float* scores, int64_t n, float* maxima) {
    I unordered{};
    for (int64_t start = 0; start < n; start += kMaxGroup) {
        const int64_t end = n - start < kMaxGroup ? n : start + kMaxGroup;
        F highest = set1(-__builtin_inff());
        each(scores, start, end, [&](F x, int64_t) {
            highest = x > highest ? x : highest;
            unordered |= x != x;
        });
        float largest = highest[0];
        for (int lane = 1; lane < kLanes; ++lane) largest = highest[lane] > largest ? highest[lane] : largest;
        maxima[start / kMaxGroup] = largest;
    }
    return !any(unordered);
}

template <bool Filter>
void sum_groups(const float* scores, int64_t n, Scale scale, uint64_t least, float cut, uint64_t* sums) {
    const auto least_high = static_cast<int32_t>(least >> 20), least_low = static_cast<int32_t>(least & 0xfffff);
    for (int64_t start = 0; start < n; start += kSumGroup) {
        const int64_t end = n - start < kSumGroup ? n : start + kSumGroup;
        Weight sum{};  // of at most 1,024: no part overflows
        each(scores, start, end, [&](F x, int64_t) {
            Weight weight = weight_of(x, scale);
            if (Filter) {
                const I enough = (weight.high > least_high) | ((weight.high == least_high) & (weight.low >= least_low));
                const I both = enough & (x >= cut);
                weight.high &= both;
                weight.low &= both;
            }
            sum.high += weight.high;
            sum.low += weight.low;
        });
        sums[start / kSumGroup] = (sum_lanes(sum.high) << 20) + sum_lanes(sum.low);
    }
}

void group_sums(const float* scores, int64_t n, Scale scale, uint64_t least, float cut, uint64_t* sums) {
    const bool filters = least > 0 || cut > -__builtin_inff();
    (filters ? sum_groups<true> : sum_groups<false>)(scores, n, scale, least, cut, sums);
}

/// The worse the score, the higher: each step on the way is monotone.
inline I bucket_of(F scores, Scale scale) {
    const F last = set1(kBuckets - 1);
    const F at = (scores - scale.best) * scale.inv_temperature * (-kBuckets / kBucketsWide);
    return __builtin_convertvector(at < last ? at : last, I);
}

void bucket_sums(const float* scores, int64_t n, Scale scale, uint64_t* sums) {
    std::memset(sums, 0, 2 * kBuckets * sizeof *sums);
    each(scores, 0, n, [&](F x, int64_t) {
        const Weight weight = weight_of(x, scale);
        const I at = bucket_of(x, scale);
        int32_t high[kLanes], low[kLanes], bucket[kLanes];
        std::memcpy(high, &weight.high, sizeof high);
        std::memcpy(low, &weight.low, sizeof low);
        std::memcpy(bucket, &at, sizeof bucket);
        for (int lane = 0; lane < kLanes; ++lane) {
            // Neighbours often fall into one bucket: in two tables one need not wait for the other.
            sums[(lane & 1) * kBuckets + bucket[lane]] +=
                (static_cast<uint64_t>(high[lane]) << 20) + static_cast<uint64_t>(low[lane]);
        }
    });
}

int64_t collect_bucket(const float* scores, int64_t n, Scale scale, int32_t bucket, uint32_t* ids, float* kept) {
    int64_t found = 0;
    each(scores, 0, n, [&](F x, int64_t i) {
        const I inside = bucket_of(x, scale) == bucket;
        if (!any(inside)) return;
        for (int lane = 0; lane < kLanes && i + lane < n; ++lane) {
            ids[found] = static_cast<uint32_t>(i + lane);
            kept[found] = x[lane];
            found -= inside[lane];
        }
    });
    return found;
}

void weights(const float* scores, int64_t n, Scale scale, uint64_t* out) {
    each(scores, 0, n, [&](F x, int64_t i) {
        const Weight weight = weight_of(x, scale);
        for (int lane = 0; lane < kLanes; ++lane) {
            out[i + lane] = (static_cast<uint64_t>(weight.high[lane]) << 20) + static_cast<uint64_t>(weight.low[lane]);
        }
    });
}

int64_t collect(const float* scores, int64_t n, float cut, uint32_t* ids, float* kept) {
    int64_t found = 0, i = 0;
#if defined(__AVX512F__)
    const __m512 limit = _mm512_set1_ps(cut);
    __m512i id = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    for (; i + 16 <= n; i += 16, id = _mm512_add_epi32(id, _mm512_set1_epi32(16))) {
        const __m512 score = _mm512_loadu_ps(scores + i);
        const __mmask16 mask = _mm512_cmp_ps_mask(score, limit, _CMP_GE_OQ);
        if (mask) {
            _mm512_storeu_si512(ids + found, _mm512_maskz_compress_epi32(mask, id));
            _mm512_storeu_ps(kept + found, _mm512_maskz_compress_ps(mask, score));
            found += __builtin_popcount(mask);
        }
    }
#elif defined(__AVX2__)
    const __m256 limit = _mm256_set1_ps(cut);
    for (; i + 8 <= n; i += 8) {
        const __m256 enough = _mm256_cmp_ps(_mm256_loadu_ps(scores + i), limit, _CMP_GE_OQ);
        for (auto mask = static_cast<unsigned>(_mm256_movemask_ps(enough)); mask; mask &= mask - 1) {
            const int64_t at = i + __builtin_ctz(mask);
            ids[found] = static_cast<uint32_t>(at);
            kept[found++] = scores[at];
        }
    }
#endif
    for (; i < n; ++i) {
        ids[found] = static_cast<uint32_t>(i);
        kept[found] = scores[i];
        found += scores[i] >= cut;
    }
    return found;
}

void mask(const float* scores, int64_t n, const uint32_t* allowed, float* out) {
    const float none = -__builtin_inff();
    int64_t i = 0;
#if defined(__AVX512F__)
    for (; i + 16 <= n; i += 16) {
        const auto bits = static_cast<__mmask16>(allowed[i / 32] >> (i % 32));
        _mm512_storeu_ps(out + i, _mm512_mask_loadu_ps(_mm512_set1_ps(none), bits, scores + i));
    }
#elif defined(__AVX2__)
    const __m256i lanes = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    for (; i + 8 <= n; i += 8) {
        const __m256i bits = _mm256_and_si256(_mm256_set1_epi32(static_cast<int>(allowed[i / 32] >> (i % 32))), lanes);
        const __m256 is_set = _mm256_castsi256_ps(_mm256_cmpeq_epi32(bits, lanes));
        _mm256_storeu_ps(out + i, _mm256_blendv_ps(_mm256_set1_ps(none), _mm256_loadu_ps(scores + i), is_set));
    }
#endif
    for (; i < n; ++i) out[i] = allowed[i / 32] >> (i % 32) & 1 ? scores[i] : none;
}

}  // namespace

const Passes KVR_PASSES{group_maxima, group_sums, weights, collect, bucket_sums, collect_bucket, mask};

}  // namespace kvr::sampling
