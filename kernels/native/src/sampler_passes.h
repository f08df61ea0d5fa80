// The passes over a whole row that sampling is made of, one table of them for each instruction set.
#pragma once

#include <cstdint>

namespace kvr::sampling {

constexpr int64_t kMaxGroup = 128;   // scores whose largest is kept
constexpr int64_t kSumGroup = 1024;  // scores whose weights' sum is kept
constexpr int64_t kSpill = 16;       // entries that `collect` and `weights` may write behind their last

/// How a weight comes from a score: exp((score - best) * inv_temperature) in steps of 2^-40, rounded down.
struct Scale {
    float best, inv_temperature;
};

struct Passes {
    /// The largest of each group of `kMaxGroup` scores; false if one is NaN.
    bool (*group_maxima)(const float* scores, int64_t n, float* maxima);
    /// Weights, those below `least` counted as 0, summed over each group of `kSumGroup`.
    void (*group_sums)(const float* scores, int64_t n, Scale scale, uint64_t least, uint64_t* sums);
    void (*weights)(const float* scores, int64_t n, Scale scale, uint64_t* weights);
    /// Ids ascending whose score is at least `cut`, and these scores; returns how many.
    int64_t (*collect)(const float* scores, int64_t n, float cut, uint32_t* ids, float* kept);
};

extern const Passes portable_passes;
#if defined(__x86_64__)
extern const Passes avx2_passes, avx512_passes;
#endif

}  // namespace kvr::sampling
