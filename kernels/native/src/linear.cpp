#include "linear.h"

#include "half.h"

namespace kvr {

namespace {

/// Weight k (0 to 31) of a GGUF block, as the unsigned byte that the kernels multiply.
uint8_t weight_of(Format format, const uint8_t* block, int k) {
    if (format == Q8_0) return block[2 + k] ^ 0x80;  // two's complement plus 128
    const uint8_t* nibbles = block + (format == Q4_1 ? 4 : 2);
    return k < 16 ? nibbles[k] & 15 : nibbles[k - 16] >> 4;
}

uint16_t half_at(const uint8_t* p) {
    uint16_t h;
    std::memcpy(&h, p, 2);
    return h;
}

/// Where weight `k` of `column` lies in the quants of a group, and how far it is shifted.
struct Place {
    int byte, shift;
};
Place place_of(Format format, int column, int k) {
    const bool high = format != Q8_0 && k >= 16;
    const int chunk = (high ? k - 16 : k) / 4;
    return {chunk * 64 + column * 4 + k % 4, high ? 4 : 0};
}

}  // namespace

bool Linear::append(Format format, const uint8_t* blocks, const int64_t* order, int32_t rows) {
    if (num_parts == 4) return false;
    Part& part = parts[num_parts];
    part.format = format;
    part.first_tile = num_tiles();
    part.num_tiles = (rows + kTile - 1) / kTile;
    const int64_t stride = source_bytes(format), num_groups = groups();
    if (!part.quants.reserve(part.num_tiles * num_groups * quants_bytes(format))) return false;
    if (!part.scales.reserve(part.num_tiles * num_groups * scales_each(format))) return false;
    for (int64_t n = 0; n < rows; ++n) {
        const uint8_t* source = blocks + (order ? order[n] : n) * num_groups * stride;
        const int column = static_cast<int>(n % kTile);
        for (int64_t g = 0; g < num_groups; ++g, source += stride) {
            const int64_t group = n / kTile * num_groups + g;
            uint8_t* quants = part.quants.get() + group * quants_bytes(format);
            for (int k = 0; k < kGroup; ++k) {
                const Place place = place_of(format, column, k);
                quants[place.byte] = static_cast<uint8_t>(quants[place.byte] | weight_of(format, source, k) << place.shift);
            }
            uint16_t* scales = part.scales.get() + group * scales_each(format);
            scales[column] = half_at(source);
            if (format == Q4_1) scales[kTile + column] = half_at(source + 2);
        }
    }
    ++num_parts;
    return true;
}

void Linear::row(int32_t n, float* out) const {
    const Part& part = part_of(n / kTile);
    const int64_t tile = n / kTile - part.first_tile;
    const int column = n % kTile;
    for (int64_t g = 0; g < groups(); ++g) {
        const int64_t group = tile * groups() + g;
        const uint8_t* quants = part.quants.get() + group * quants_bytes(part.format);
        const uint16_t* scales = part.scales.get() + group * scales_each(part.format);
        const float d = half_to_float(scales[column]), m = part.format == Q4_1 ? half_to_float(scales[kTile + column]) : 0;
        const int zero = part.format == Q8_0 ? 128 : part.format == Q4_0 ? 8 : 0;
        for (int k = 0; k < kGroup; ++k) {
            const Place place = place_of(part.format, column, k);
            const int q = (part.format == Q8_0 ? quants[place.byte] : quants[place.byte] >> place.shift & 15) - zero;
            const float scaled = static_cast<float>(q) * d;
            out[g * kGroup + k] = part.format == Q4_1 ? scaled + m : scaled;
        }
    }
}

}  // namespace kvr
