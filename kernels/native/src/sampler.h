// Chooses one id from a row of scores. Defined by kernels/reference/sampling.py, and equal to it bit for bit.
#pragma once

#include <cstdint>

#include "api.h"

namespace kvr {

int64_t sample_scratch_bytes(int64_t vocab);

/// `logits: [vocab]`, 0 < vocab < 2^23; `scratch` of `sample_scratch_bytes(vocab)`, its content does not matter.
/// 0: `*id` is chosen. 1: an allowed logit is NaN or the largest is infinite. Never allocates.
int sample(const float* logits, int64_t vocab, const kvr_sampling& params, uint32_t* id, void* scratch);

}  // namespace kvr
