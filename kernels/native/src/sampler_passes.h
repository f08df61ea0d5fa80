// The passes over a whole row that sampling is made of, one table of them for each instruction set.
#pragma once

#include <cstdint>

namespace kvr::sampling {

constexpr int64_t kMaxGroup = 128;   // scores whose largest is kept
constexpr int64_t kSumGroup = 1024;  // scores whose weights' sum is kept
constexpr int64_t kSpill = 16;       // entries that `collect` and `weights` may write behind their last

constexpr int32_t kBuckets = 2048;
constexpr float kBucketsWide = 28.0f;  // temperatures below the best: what lies beyond weighs nothing, in steps of 2^-40

/// How a weight comes from a score: exp((score - best) * inv_temperature) in steps of 2^-40, rounded down.
struct Scale {
    float best, inv_temperature;
};

struct Passes {
    /// The largest of each group of `kMaxGroup` scores; false if one is NaN.
    bool (*group_maxima)(const float* scores, int64_t n, float* maxima);
    /// Weights, those below `least` or of scores below `cut` counted as 0, summed over each group of `kSumGroup`.
    void (*group_sums)(const float* scores, int64_t n, Scale scale, uint64_t least, float cut, uint64_t* sums);
    void (*weights)(const float* scores, int64_t n, Scale scale, uint64_t* weights);
    /// Ids ascending whose score is at least `cut`, and these scores; returns how many.
    int64_t (*collect)(const float* scores, int64_t n, float cut, uint32_t* ids, float* kept);
    /// Weights summed over each of `kBuckets` ranges of equal width, the best score's first. `sums`: two such tables,
    /// to be added up.
    void (*bucket_sums)(const float* scores, int64_t n, Scale scale, uint64_t* sums);
    /// `collect` of the scores in one bucket.
    int64_t (*collect_bucket)(const float* scores, int64_t n, Scale scale, int32_t bucket, uint32_t* ids, float* kept);
    /// The scores whose bit is set, 32 to a word, lowest first; -inf for the others.
    void (*mask)(const float* scores, int64_t n, const uint32_t* allowed, float* out);
};

extern const Passes portable_passes;
#if defined(__x86_64__)
extern const Passes avx2_passes, avx512_passes;
#endif

}  // namespace kvr::sampling
