// Chooses one id from a row of scores. Defined by kernels/reference/sampling.py, and equal to it bit for bit.
#pragma once

#include <cstddef>
#include <cstdint>

extern "C" {

/// `kernels.reference.sampling.Draw`, field by field.
typedef struct kvr_sampling {
    float inv_temperature;
    int32_t top_k;
    double top_p;
    double min_p;
    uint64_t hash;
    int32_t greedy;
} kvr_sampling;

size_t kvr_sample_scratch_bytes(int64_t vocab);

/// `logits: [vocab]`, 0 < vocab < 2^23; `scratch` of `kvr_sample_scratch_bytes(vocab)`, its content does not matter.
/// 0: `*id` is chosen. 1: a logit is NaN or the largest is infinite. Never allocates; threads need a scratch each.
int kvr_sample(const float* logits, int64_t vocab, const kvr_sampling* params, uint32_t* id, void* scratch);

/// The same on an instruction set that is named: 0 portable, 1 AVX2, 2 AVX-512. -1: this machine has it not.
int kvr_sample_on(int isa, const float* logits, int64_t vocab, const kvr_sampling* params, uint32_t* id, void* scratch);
}
