// Rows of inputs made whole numbers, and their products with packed weights. See kernels_impl.h.
#pragma once

#include "elementary_impl.h"

namespace kvr::KVR_ISA {

namespace {

constexpr int kTileRows = KVR_TILE_ROWS;  // rows that share unpacked weights, as the registers allow: 8 or 4

/// One group of 32.
inline void quantise_group(F low, F high, int8_t* q, float* scale, float* scaled_sum, int32_t* sum) {
    constexpr float kSmallest = 7.888609052210118e-31f;  // 2^-100: 127 / amax must not overflow
    const int32_t top = max_lane(max(magnitude_bits(low), magnitude_bits(high)));
    float amax;
    std::memcpy(&amax, &top, 4);
    const bool finite = top < 0x7f800000;
    if (!finite || amax < kSmallest) {
        std::memset(q, 0, kGroup);
        *scale = finite ? 0.0f : NAN;
        *scaled_sum = *scale;
        *sum = 0;
        return;
    }
    const F inverse = set1(127.0f / amax);
    const I a = to_int(mul(low, inverse)), b = to_int(mul(high, inverse));
    store_int8(q, a);
    store_int8(q + 16, b);
    *scale = amax / 127.0f;
    *sum = sum_lanes(add(a, b));
    *scaled_sum = *scale * static_cast<float>(*sum);
}

inline void quantise_at(F low, F high, const Activations& to, int64_t row, int32_t group) {
    const int64_t at = to.at(row, group);
    quantise_group(low, high, to.q + at * kGroup, to.scale + at, to.scaled_sum + at, to.sum + at);
}

void quantise(const float* x, const Activations& to, int64_t row) {
    for (int32_t g = 0; g < to.groups(); ++g) quantise_at(load(x + g * kGroup), load(x + g * kGroup + 16), to, row, g);
}

/// `R` rows of one block from `row` on times one tile: out[r] are its 16 columns.
template <Format Fmt, int R>
inline void multiply(const uint8_t* quants, const uint16_t* scales, const Activations& x, int64_t row, F* out) {
    const int32_t groups = x.groups();
    const int64_t at = x.at(row, 0);
    const int8_t* values = x.q + at * kGroup;
    const float *scale = x.scale + at, *scaled_sum = x.scaled_sum + at;
    const int32_t* sum = x.sum + at;
    F acc[R];
    KVR_UNROLL
    for (int r = 0; r < R; ++r) acc[r] = zero();
    for (int32_t g = 0; g < groups; ++g) {
        // The rows' sums side by side: each waits five cycles for its last addition.
        I dot[R];
        KVR_UNROLL
        for (int r = 0; r < R; ++r)  // what the bytes are too large by: 128 or 8 each
            dot[r] = Fmt == Q4_1 ? set1(0) : set1(sum[r] * (Fmt == Q8_0 ? -128 : -8));
        KVR_UNROLL
        for (int v = 0; v < 4; ++v) {
            const B first = load_bytes(quants + 64 * v), low = Fmt == Q8_0 ? first : low_halves(first);
            const B high = Fmt == Q8_0 ? load_bytes(quants + 64 * (v + 4)) : high_halves(first);
            KVR_UNROLL
            for (int r = 0; r < R; ++r) dot[r] = dot4<Fmt == Q8_0>(dot[r], low, values + r * kGroup + 4 * v);
            KVR_UNROLL
            for (int r = 0; r < R; ++r) dot[r] = dot4<Fmt == Q8_0>(dot[r], high, values + r * kGroup + 4 * v + 16);
        }
        const F d = load_half(scales);
        const F m = Fmt == Q4_1 ? load_half(scales + kTile) : zero();
        KVR_UNROLL
        for (int r = 0; r < R; ++r) {
            acc[r] = fma(cvt(dot[r]), mul(set1(scale[r]), d), acc[r]);
            if (Fmt == Q4_1) acc[r] = fma(m, set1(scaled_sum[r]), acc[r]);
        }
        quants += quants_bytes(Fmt);
        scales += scales_each(Fmt);
        values += kRows * kGroup;
        scale += kRows;
        scaled_sum += kRows;
        sum += kRows;
    }
    KVR_UNROLL
    for (int r = 0; r < R; ++r) out[r] = acc[r];
}

template <int R>
inline void multiply_tile(const Linear& linear, int32_t tile, const Activations& x, int64_t row, F* acc) {
    const Part& part = linear.part_of(tile);
    const int64_t group = static_cast<int64_t>(tile - part.first_tile) * linear.groups();
    const uint8_t* quants = part.quants.get() + group * quants_bytes(part.format);
    const uint16_t* scales = part.scales.get() + group * scales_each(part.format);
    switch (part.format) {
        case Q4_0: multiply<Q4_0, R>(quants, scales, x, row, acc); break;
        case Q4_1: multiply<Q4_1, R>(quants, scales, x, row, acc); break;
        case Q8_0: multiply<Q8_0, R>(quants, scales, x, row, acc); break;
    }
    if (linear.bias) {
        const F bias = load(linear.bias.get() + tile * kTile);
        for (int r = 0; r < R; ++r) acc[r] = add(acc[r], bias);
    }
}

/// Calls `use(row, R)` for the rows of [begin, end), as many at a time as share weights.
template <typename Use>
inline void in_row_blocks(int64_t begin, int64_t end, Use use) {
    while (end - begin >= kTileRows) {
        use.template operator()<kTileRows>(begin);
        begin += kTileRows;
    }
    switch (end - begin) {
        case 1: use.template operator()<1>(begin); break;
        case 2: use.template operator()<2>(begin); break;
        case 3: use.template operator()<3>(begin); break;
#if KVR_TILE_ROWS > 4
        case 4: use.template operator()<4>(begin); break;
        case 5: use.template operator()<5>(begin); break;
        case 6: use.template operator()<6>(begin); break;
        case 7: use.template operator()<7>(begin); break;
#endif
        default: break;
    }
}

struct TileUse {
    const Linear& linear;
    int32_t tile;
    const Activations& x;
    float* out;
    int64_t stride;
    bool adds;

    template <int R>
    void operator()(int64_t row) const {
        F acc[R];
        multiply_tile<R>(linear, tile, x, row, acc);
        const int32_t columns = linear.outputs - tile * kTile;
        for (int r = 0; r < R; ++r) {
            float* to = out + (row + r) * stride + tile * kTile;
            if (columns >= kTile) {
                store(to, adds ? add(load(to), acc[r]) : acc[r]);
            } else {
                float part[kTile];
                store(part, acc[r]);
                for (int32_t c = 0; c < columns; ++c) to[c] = adds ? to[c] + part[c] : part[c];
            }
        }
    }
};

void linear(const Linear& linear, int32_t first, int32_t last, const Activations& x, int64_t begin, int64_t end,
            float* out, int64_t stride, bool adds) {
    for (int32_t tile = first; tile < last; ++tile) in_row_blocks(begin, end, TileUse{linear, tile, x, out, stride, adds});
}

struct GateUse {
    const Linear& gate_up;
    int32_t group;
    const Activations &x, &to;

    template <int R>
    void operator()(int64_t row) const {
        const int32_t tile = 2 * group, up_tile = tile + to.inputs / kTile;
        F low[R], high[R], up[R];
        multiply_tile<R>(gate_up, tile, x, row, low);
        multiply_tile<R>(gate_up, up_tile, x, row, up);
        for (int r = 0; r < R; ++r) low[r] = gated(low[r], up[r]);
        multiply_tile<R>(gate_up, tile + 1, x, row, high);
        multiply_tile<R>(gate_up, up_tile + 1, x, row, up);
        for (int r = 0; r < R; ++r) quantise_at(low[r], gated(high[r], up[r]), to, row + r, group);
    }
};

void gate_up(const Linear& gate_up, int32_t group, const Activations& x, int64_t begin, int64_t end,
             const Activations& to) {
    in_row_blocks(begin, end, GateUse{gate_up, group, x, to});
}

}  // namespace

}  // namespace kvr::KVR_ISA
