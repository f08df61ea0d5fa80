// Draws one token from a row of logits.
#pragma once

#include <stdint.h>

#include "api.h"

namespace kvr {

int64_t sample_scratch_bytes(int64_t vocab);
/// 0, or 1 when the row has no largest number.
int sample(const float* logits, int64_t vocab, const kvr_sampling& params, uint32_t* id, void* scratch);

}  // namespace kvr
