// Weights of one product, laid out for the kernels: tiles of 16 outputs, groups of 32 inputs.
#pragma once

#include <cstdint>
#include <cstring>

#include "inline.h"
#include "memory.h"

namespace kvr {

enum Format : int32_t { Q4_0 = 0, Q4_1 = 1, Q8_0 = 2 };

constexpr int kGroup = 32;  // inputs that share a scale
constexpr int kTile = 16;   // outputs that are computed together

KVR_INLINE int64_t quants_bytes(Format f) { return f == Q8_0 ? kTile * kGroup : kTile * kGroup / 2; }
KVR_INLINE int64_t scales_each(Format f) { return f == Q4_1 ? 2 * kTile : kTile; }
KVR_INLINE int64_t source_bytes(Format f) { return f == Q8_0 ? 34 : f == Q4_1 ? 20 : 18; }

/// Consecutive tiles of one format. A group of a tile takes `quants_bytes`: eight times (once for 8 bits, twice in 4)
/// sixteen columns of four weights; 4-bit bytes hold inputs k in the low and k + 16 in the high half. Weights of 8
/// bits are kept plus 128, for the dot product wants one unsigned side. Then, apart, float16 scales of the 16
/// columns, and for Q4_1 their minima.
struct Part {
    Format format;
    int32_t first_tile, num_tiles;
    Block<uint8_t> quants;
    Block<uint16_t> scales;
};

/// `outputs` may end inside a tile: the columns behind are zeros.
struct Linear {
    int32_t outputs, inputs, num_parts = 0;
    Part parts[4];
    Block<float> bias;  // [num_tiles * 16], or none

    Linear(int32_t outputs, int32_t inputs) : outputs(outputs), inputs(inputs) {}
    KVR_INLINE int32_t groups() const { return inputs / kGroup; }
    KVR_INLINE int32_t num_tiles() const {
        return num_parts ? parts[num_parts - 1].first_tile + parts[num_parts - 1].num_tiles : 0;
    }
    /// The part that holds `tile`.
    KVR_INLINE const Part& part_of(int32_t tile) const {
        int i = 0;
        while (i + 1 < num_parts && parts[i + 1].first_tile <= tile) ++i;
        return parts[i];
    }
    /// Appends `rows` rows of GGUF blocks; row i is the source's row `order[i]`. False if out of memory or too many.
    bool append(Format format, const uint8_t* blocks, const int64_t* order, int32_t rows);
    /// Row `n`, dequantised: [inputs].
    void row(int32_t n, float* out) const;
};

}  // namespace kvr
