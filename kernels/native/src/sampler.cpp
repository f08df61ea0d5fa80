#include "sampler.h"

#include <cmath>

namespace kvr {

int64_t sample_scratch_bytes(int64_t) { return 64; }

int sample(const float* logits, int64_t vocab, const kvr_sampling&, uint32_t* id, void*) {
    int64_t best = 0;
    bool nan = false;
    for (int64_t i = 0; i < vocab; ++i) {
        nan |= logits[i] != logits[i];
        if (logits[i] > logits[best]) best = i;
    }
    *id = static_cast<uint32_t>(best);
    return nan || !std::isfinite(logits[best]);
}

}  // namespace kvr
