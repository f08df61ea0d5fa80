// float16 and bfloat16 by hand, for machines and compilers without them.
#pragma once

#include <cstdint>
#include <cstring>

#include "inline.h"

namespace kvr {

KVR_INLINE float half_to_float(uint16_t h) {
    const uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16;
    uint32_t exponent = (h >> 10) & 31, fraction = h & 0x3ff, wide;
    if (exponent == 31) {
        wide = sign | 0x7f800000 | (fraction << 13);
    } else if (exponent != 0) {
        wide = sign | ((exponent + 112) << 23) | (fraction << 13);
    } else {
        const float small = static_cast<float>(fraction) * 5.9604644775390625e-08f;  // 2^-24
        std::memcpy(&wide, &small, 4);
        wide |= sign;
    }
    float f;
    std::memcpy(&f, &wide, 4);
    return f;
}

/// Round to nearest, ties to even; every NaN becomes the same one, as in torch.
KVR_INLINE uint16_t float_to_bf16(float f) {
    uint32_t wide;
    std::memcpy(&wide, &f, 4);
    if ((wide & 0x7fffffff) > 0x7f800000) return 0x7fc0;
    return static_cast<uint16_t>((wide + 0x7fff + ((wide >> 16) & 1)) >> 16);
}

}  // namespace kvr
