// The kernels over sixteen lanes, compiled once for each instruction set. The order of every sum is the definition of
// the arithmetic (kernels/reference/int8): what may differ between instruction sets is only how lanes are held.
#include <cfloat>
#include <cmath>

#include "kernels.h"

// Loops over what lies in registers: left rolled, a compiler keeps it in memory. Without vectors there are no registers
// to fill, and unrolled lanes would take minutes to compile.
#if defined(KVR_ROLLED)
#define KVR_UNROLL
#elif defined(__clang__)
#define KVR_UNROLL _Pragma("unroll")
#else
#define KVR_UNROLL _Pragma("GCC unroll 16")
#endif

namespace kvr::KVR_ISA {

namespace {

constexpr int kTileRows = KVR_TILE_ROWS;  // rows that share unpacked weights, as the registers allow: 8 or 4

/// exp of what is at most 88. NaN stays: `max` and `if_below` let it through.
inline F exp_below(F x) {
    const F lowest = set1(-86.0f), clamped = max(lowest, x), n = rint(mul(clamped, set1(1.44269504f)));
    const F r = fma(n, set1(2.12194440e-4f), fma(n, set1(-0.693359375f), clamped));
    F p = set1(1.9875691500e-4f);
    p = fma(p, r, set1(1.3981999507e-3f));
    p = fma(p, r, set1(8.3334519073e-3f));
    p = fma(p, r, set1(4.1665795894e-2f));
    p = fma(p, r, set1(1.6666665459e-1f));
    p = fma(p, r, set1(5.0000001201e-1f));
    const F y = add(fma(p, mul(r, r), r), set1(1.0f));
    return if_below(x, lowest, zero(), times_power(y, n));
}

inline F exp16(F x) { return if_below(set1(88.0f), x, set1(INFINITY), exp_below(x)); }

void exp_all(const float* x, float* y, int64_t count) {
    for (int64_t i = 0; i < count; i += 16) store(y + i, exp16(load(x + i)));
}

void rms_norm(const float* x, const float* weight, float eps, int32_t inputs, float* y) {
    F squares = zero();
    for (int32_t i = 0; i < inputs; i += 16) {
        const F v = load(x + i);
        squares = fma(v, v, squares);
    }
    const float mean = tree16(squares) / static_cast<float>(inputs);
    const F scale = set1(1.0f / std::sqrt(mean + eps));
    for (int32_t i = 0; i < inputs; i += 16) store(y + i, mul(mul(load(x + i), scale), load(weight + i)));
}

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

inline F gated(F gate, F up) { return mul(div(gate, add(set1(1.0f), exp16(neg(gate)))), up); }

void silu_gate(const float* gate, const float* up, int64_t count, float* y) {
    for (int64_t i = 0; i < count; i += 16) store(y + i, gated(load(gate + i), load(up + i)));
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

void rotate(float* x, int32_t heads, int32_t dim, const float* cos, const float* sin) {
    const int32_t half = dim / 2;
    for (int32_t h = 0; h < heads; ++h, x += dim)
        for (int32_t i = 0; i < half; ++i) {  // no fma: -ffp-contract=off
            const float a = x[i], b = x[half + i];
            x[i] = a * cos[i] + b * sin[i];
            x[half + i] = b * cos[half + i] + a * sin[half + i];
        }
}

void scale(float* x, int64_t count, float by) {
    for (int64_t i = 0; i < count; i += 16) store(x + i, mul(load(x + i), set1(by)));
}

/// One vector to whole numbers and a scale: `kernels.quantise.round_trip` before it multiplies them again.
void whole_numbers(const float* x, int32_t dim, int32_t levels, int8_t* whole, float* scale) {
    I top = set1(0);
    for (int32_t i = 0; i < dim; i += 16) top = max(top, magnitude_bits(load(x + i)));
    const int32_t largest_bits = max_lane(top);
    if (largest_bits >= 0x7f800000) {
        std::memset(whole, 0, static_cast<size_t>(dim));
        *scale = NAN;
        return;
    }
    float largest;
    std::memcpy(&largest, &largest_bits, 4);
    float s = largest / static_cast<float>(levels);
    if (s >= 1.8367099231598242e-40f) {  // 2^-132: a smaller scale has few bits by itself
        int32_t cut;
        std::memcpy(&cut, &s, 4);
        cut &= -128;
        std::memcpy(&s, &cut, 4);
    }
    *scale = s;
    const F by = set1(largest > FLT_TRUE_MIN ? largest : FLT_TRUE_MIN), times = set1(static_cast<float>(levels));
    for (int32_t i = 0; i < dim; i += 16) store_int8(whole + i, to_int(mul(div(load(x + i), by), times)));
}

void append(const float* x, const KvShape& shape, uint8_t* side, int32_t token) {
    int8_t whole[256];
    float* scales = reinterpret_cast<float*>(side + shape.values_bytes());
    for (int32_t h = 0; h < shape.kv_heads; ++h, x += shape.dim) {
        const int64_t slot = static_cast<int64_t>(h) * shape.page_tokens + token;
        uint8_t* to = side + slot * shape.token_bytes();
        switch (shape.format) {
            case KvFloat: std::memcpy(to, x, sizeof(float) * static_cast<size_t>(shape.dim)); break;
            case KvBf16:
                for (int32_t i = 0; i < shape.dim; i += 16) store_bf16(reinterpret_cast<uint16_t*>(to) + i, load(x + i));
                break;
            case KvInt8: whole_numbers(x, shape.dim, 127, reinterpret_cast<int8_t*>(to), scales + slot); break;
            case KvInt4:
                whole_numbers(x, shape.dim, 7, whole, scales + slot);
                for (int32_t i = 0; i < shape.dim / 2; ++i)
                    to[i] = static_cast<uint8_t>((whole[2 * i] & 15) | (whole[2 * i + 1] & 15) << 4);
                break;
        }
    }
}

template <KvFormat Fmt>
inline F values16(const uint8_t* token, int32_t i) {
    switch (Fmt) {
        case KvBf16: return load_bf16(reinterpret_cast<const uint16_t*>(token) + i);
        case KvInt8: return load_int8(reinterpret_cast<const int8_t*>(token) + i);
        case KvInt4: return load_int4(token + i / 2);
        default: return load(reinterpret_cast<const float*>(token) + i);
    }
}

template <KvFormat Fmt>
inline int64_t bytes_of(int32_t dim) {
    return Fmt == KvFloat ? 4LL * dim : Fmt == KvBf16 ? 2LL * dim : Fmt == KvInt8 ? dim : dim / 2;
}

/// A head's block is too short for the processor to see that it will be read on and on.
inline void prefetch_token(const uint8_t* token, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) prefetch(token + i);
}

/// Scores of up to 64 keys, the others made -infinity -> weights in place; the largest score, the sum of weights.
inline void softmax64(float* s, int32_t seen, float* largest, float* weight) {
    for (int32_t k = seen; k < kBlockKeys; ++k) s[k] = -INFINITY;
    F v[4];
    for (int i = 0; i < 4; ++i) v[i] = load(s + 16 * i);
    const float m = max_lane(max(max(v[0], v[1]), max(v[2], v[3])));
    F sum = zero();
    for (int i = 0; i < 4; ++i) {
        v[i] = exp_below(sub(v[i], set1(m)));
        sum = add(sum, v[i]);
        store(s + 16 * i, v[i]);
    }
    *largest = m;
    *weight = tree16(sum);
}

inline void times_scales(float* s, const float* scales, int32_t count) {
    for (int32_t k = 0; k < count; ++k) s[k] *= scales[k];
}

constexpr int kHeads = 4;  // heads of a row that are computed together

/// `H` heads of one row, queries [H, dim], dim = 16 * `J` (0: any).
template <KvFormat Fmt, int H, int J>
inline void attend_row(const KvShape& shape, Keys k, Keys v, const float* q, int32_t seen, float* const* sums,
                       float* const* largest, float* const* weight) {
    const int32_t dim = J ? 16 * J : shape.dim;
    const int64_t stride = bytes_of<Fmt>(dim);
    alignas(64) float s[H][kBlockKeys];
    for (int32_t begin = 0; begin < seen; begin += 16) {
        F lanes[H][16];
        const int32_t end = seen - begin < 16 ? seen - begin : 16;
        for (int32_t t = 0; t < end; ++t) {
            const uint8_t* token = k.values + (begin + t) * stride;
            if (k.ahead) prefetch_token(k.ahead + (begin + t) * stride, stride);
            F acc[H];
            for (int h = 0; h < H; ++h) acc[h] = zero();
            for (int32_t i = 0; i < dim; i += 16) {
                const F key = values16<Fmt>(token, i);
                for (int h = 0; h < H; ++h) acc[h] = fma(load(q + h * dim + i), key, acc[h]);
            }
            for (int h = 0; h < H; ++h) lanes[h][t] = acc[h];
        }
        for (int32_t t = end; t < 16; ++t)
            for (int h = 0; h < H; ++h) lanes[h][t] = zero();
        for (int h = 0; h < H; ++h) store(s[h] + begin, tree16_each(lanes[h]));
    }
    for (int h = 0; h < H; ++h) {
        if (k.scales) times_scales(s[h], k.scales, seen);
        softmax64(s[h], seen, largest[h], weight[h]);
        if (v.scales) times_scales(s[h], v.scales, seen);
    }
    constexpr int kColumns = J % 4 == 0 && J > 0 ? 4 : 1;
    for (int32_t i = 0; i < dim; i += 16 * kColumns) {
        F acc[H][kColumns];
        for (int h = 0; h < H; ++h)
            for (int j = 0; j < kColumns; ++j) acc[h][j] = zero();
        for (int32_t t = 0; t < seen; ++t) {
            const uint8_t* token = v.values + t * stride;
            if (v.ahead && i == 0) prefetch_token(v.ahead + t * stride, stride);
            KVR_UNROLL
            for (int j = 0; j < kColumns; ++j) {
                const F value = values16<Fmt>(token, i + 16 * j);
                for (int h = 0; h < H; ++h) acc[h][j] = fma(set1(s[h][t]), value, acc[h][j]);
            }
        }
        for (int h = 0; h < H; ++h)
            for (int j = 0; j < kColumns; ++j) store(sums[h] + i + 16 * j, acc[h][j]);
    }
}

template <KvFormat Fmt, int J>
void attend_rows(const KvShape& shape, Keys k, Keys v, int32_t group, const Reader* readers, int32_t num_readers) {
    for (const Reader* reader = readers; reader < readers + num_readers; ++reader)
        for (int32_t h = 0; h < group; h += kHeads) {
            const int32_t heads = group - h < kHeads ? group - h : kHeads;
            float *sums[kHeads], *largest[kHeads], *weight[kHeads];
            for (int i = 0; i < heads; ++i) {
                sums[i] = reader->sums + (h + i) * reader->sums_step;
                largest[i] = reader->largest + (h + i) * reader->each_step;
                weight[i] = reader->weight + (h + i) * reader->each_step;
            }
            const float* q = reader->q + h * shape.dim;
            switch (heads) {
                case 1: attend_row<Fmt, 1, J>(shape, k, v, q, reader->seen, sums, largest, weight); break;
                case 2: attend_row<Fmt, 2, J>(shape, k, v, q, reader->seen, sums, largest, weight); break;
                case 3: attend_row<Fmt, 3, J>(shape, k, v, q, reader->seen, sums, largest, weight); break;
                default: attend_row<Fmt, 4, J>(shape, k, v, q, reader->seen, sums, largest, weight); break;
            }
        }
}

/// The first `count` tokens as float32, [count, dim].
void widen(const KvShape& shape, const Keys& keys, int32_t count, float* to) {
    const int64_t stride = shape.token_bytes();
    const uint8_t* values = keys.values;
    for (int32_t t = 0; t < count; ++t, values += stride, to += shape.dim) {
        if (keys.ahead) prefetch_token(keys.ahead + t * stride, stride);
        for (int32_t i = 0; i < shape.dim; i += 16) switch (shape.format) {
                case KvBf16: store(to + i, values16<KvBf16>(values, i)); break;
                case KvInt8: store(to + i, values16<KvInt8>(values, i)); break;
                case KvInt4: store(to + i, values16<KvInt4>(values, i)); break;
                case KvFloat: store(to + i, values16<KvFloat>(values, i)); break;
            }
    }
}

template <KvFormat Fmt>
void attend_rows_of(const KvShape& shape, Keys k, Keys v, int32_t group, const Reader* readers, int32_t num) {
    switch (shape.dim) {
        case 64: attend_rows<Fmt, 4>(shape, k, v, group, readers, num); break;
        case 128: attend_rows<Fmt, 8>(shape, k, v, group, readers, num); break;
        default: attend_rows<Fmt, 0>(shape, k, v, group, readers, num); break;
    }
}

void attend_few(const KvShape& shape, Keys k, Keys v, int32_t group, const Reader* readers, int32_t num_readers,
                float* scratch) {
    if (num_readers > 1) {  // widened once for all of them
        int32_t most = 0;
        for (int32_t i = 0; i < num_readers; ++i) most = readers[i].seen > most ? readers[i].seen : most;
        KvShape wide = shape;
        wide.format = KvFloat;
        float *keys = scratch, *values = scratch + kBlockKeys * shape.dim;
        widen(shape, k, most, keys);
        widen(shape, v, most, values);
        k.ahead = v.ahead = nullptr;
        k.values = reinterpret_cast<const uint8_t*>(keys);
        v.values = reinterpret_cast<const uint8_t*>(values);
        attend_rows_of<KvFloat>(wide, k, v, group, readers, num_readers);
        return;
    }
    switch (shape.format) {
        case KvBf16: attend_rows_of<KvBf16>(shape, k, v, group, readers, 1); break;
        case KvInt8: attend_rows_of<KvInt8>(shape, k, v, group, readers, 1); break;
        case KvInt4: attend_rows_of<KvInt4>(shape, k, v, group, readers, 1); break;
        case KvFloat: attend_rows_of<KvFloat>(shape, k, v, group, readers, 1); break;
    }
}

/// Lane l of sixteen: the products of the queries l, l + 16, ... of `R` rows with those of 16 keys, one key a lane.
template <int R, int J>
inline void chains(const float* q, int32_t dim, const float* transposed, int32_t lane, F* acc) {
    const int32_t steps = J ? J : dim / 16;
    const F first = load(transposed + lane * kBlockKeys);
    KVR_UNROLL
    for (int r = 0; r < R; ++r) acc[r] = mul(set1(q[r * dim + lane]), first);
    KVR_UNROLL
    for (int32_t j = 1; j < steps; ++j) {
        const F key = load(transposed + (16 * j + lane) * kBlockKeys);
        KVR_UNROLL
        for (int r = 0; r < R; ++r) acc[r] = fma(set1(q[r * dim + 16 * j + lane]), key, acc[r]);
    }
}

/// The chains of lanes `a` and `b`, added.
template <int R, int J>
inline void pair(const float* q, int32_t dim, const float* transposed, int32_t a, int32_t b, F* sum) {
    F other[R];
    chains<R, J>(q, dim, transposed, a, sum);
    chains<R, J>(q, dim, transposed, b, other);
    KVR_UNROLL
    for (int r = 0; r < R; ++r) sum[r] = add(sum[r], other[r]);
}

/// Scores of `R` rows with 16 keys: the sums of `tree16`, with keys in the lanes instead of dimensions.
template <int R, int J>
inline void scores16(const float* q, int32_t dim, const float* transposed, F* s) {
    F half[2][R];
    KVR_UNROLL
    for (int i = 0; i < 2; ++i) {
        F b[R], c[R];
        pair<R, J>(q, dim, transposed, i, i + 8, half[i]);
        pair<R, J>(q, dim, transposed, i + 4, i + 12, b);
        KVR_UNROLL
        for (int r = 0; r < R; ++r) half[i][r] = add(half[i][r], b[r]);
        pair<R, J>(q, dim, transposed, i + 2, i + 10, b);
        pair<R, J>(q, dim, transposed, i + 6, i + 14, c);
        KVR_UNROLL
        for (int r = 0; r < R; ++r) half[i][r] = add(half[i][r], add(b[r], c[r]));
    }
    KVR_UNROLL
    for (int r = 0; r < R; ++r) s[r] = add(half[0][r], half[1][r]);
}

template <int R, int J>
inline void attend_quad(int32_t any_dim, int32_t most, const float* transposed, const float* values, const Keys& k,
                        const Keys& v, const float* q, const int32_t* seen, Partial to, int64_t sums_step,
                        int64_t each_step) {
    const int32_t dim = J ? 16 * J : any_dim;
    alignas(64) float s[R][kBlockKeys];
    for (int32_t begin = 0; begin < most; begin += 16) {
        asm volatile("" ::: "memory");  // or the compiler spreads the queries over the lanes once, on the stack
        F lanes[R];
        scores16<R, J>(q, dim, transposed + begin, lanes);
        for (int r = 0; r < R; ++r) store(s[r] + begin, lanes[r]);
    }
    for (int r = 0; r < R; ++r) {
        if (k.scales) times_scales(s[r], k.scales, seen[r]);
        softmax64(s[r], seen[r], to.largest + r * each_step, to.weight + r * each_step);
        if (v.scales) times_scales(s[r], v.scales, seen[r]);
    }
    int32_t least = seen[0];
    for (int r = 1; r < R; ++r) least = seen[r] < least ? seen[r] : least;
    constexpr int kColumns = J % 4 == 0 && J > 0 ? 4 : 1;
    for (int32_t i = 0; i < dim; i += 16 * kColumns) {
        F acc[R][kColumns];
        for (int r = 0; r < R; ++r)
            for (int j = 0; j < kColumns; ++j) acc[r][j] = zero();
        for (int32_t t = 0; t < least; ++t) {
            F value[kColumns];
            KVR_UNROLL
            for (int j = 0; j < kColumns; ++j) value[j] = load(values + t * dim + i + 16 * j);
            KVR_UNROLL
            for (int r = 0; r < R; ++r)
                for (int j = 0; j < kColumns; ++j) acc[r][j] = fma(set1(s[r][t]), value[j], acc[r][j]);
        }
        // A value that a row may not see is in no sum of it, not even times 0: it may be infinite, or 0 be negative.
        for (int r = 0; r < R; ++r)
            for (int32_t t = least; t < seen[r]; ++t)
                for (int j = 0; j < kColumns; ++j)
                    acc[r][j] = fma(set1(s[r][t]), load(values + t * dim + i + 16 * j), acc[r][j]);
        for (int r = 0; r < R; ++r)
            for (int j = 0; j < kColumns; ++j) store(to.sums + r * sums_step + i + 16 * j, acc[r][j]);
    }
}

template <int J>
void attend_many_of(const KvShape& shape, Keys k, Keys v, const float* q, const int32_t* seen, int32_t rows, Partial to,
                    int64_t sums_step, int64_t each_step, float* scratch) {
    const int32_t dim = shape.dim;
    int32_t most = 0;
    for (int32_t r = 0; r < rows; ++r) most = seen[r] > most ? seen[r] : most;
    float *transposed = scratch, *values = transposed + kBlockKeys * dim, *wide = values + kBlockKeys * dim;
    widen(shape, k, most, wide);
    std::memset(wide + most * dim, 0, sizeof(float) * static_cast<size_t>((kBlockKeys - most) * dim));
    for (int32_t t = 0; t < most; t += 16)
        for (int32_t d = 0; d < dim; d += 16)
            transpose16(wide + t * dim + d, dim, transposed + d * kBlockKeys + t, kBlockKeys);
    widen(shape, v, most, values);
    while (rows > 0) {
        const int32_t count = rows >= 4 ? 4 : 1;
        if (count == 4)
            attend_quad<4, J>(dim, most, transposed, values, k, v, q, seen, to, sums_step, each_step);
        else
            attend_quad<1, J>(dim, most, transposed, values, k, v, q, seen, to, sums_step, each_step);
        q += count * dim;
        seen += count;
        to.sums += count * sums_step;
        to.largest += count * each_step;
        to.weight += count * each_step;
        rows -= count;
    }
}

void attend_many(const KvShape& shape, Keys k, Keys v, const float* q, const int32_t* seen, int32_t rows, Partial to,
                 int64_t sums_step, int64_t each_step, float* scratch) {
    switch (shape.dim) {
        case 64: attend_many_of<4>(shape, k, v, q, seen, rows, to, sums_step, each_step, scratch); break;
        case 128: attend_many_of<8>(shape, k, v, q, seen, rows, to, sums_step, each_step, scratch); break;
        default: attend_many_of<0>(shape, k, v, q, seen, rows, to, sums_step, each_step, scratch); break;
    }
}

void combine(const float* sums, const float* largest, const float* weight, int32_t blocks, int32_t dim, float* out) {
    float top = largest[0];
    for (int32_t b = 1; b < blocks; ++b) top = largest[b] > top ? largest[b] : top;
    float total = 0.0f;
    for (int32_t i = 0; i < dim; i += 16) store(out + i, zero());
    for (int32_t b = 0; b < blocks; ++b) {
        const F c = exp_below(set1(largest[b] - top));
        alignas(64) float lanes[16];
        store(lanes, c);
        total = std::fmaf(lanes[0], weight[b], total);
        for (int32_t i = 0; i < dim; i += 16) store(out + i, fma(c, load(sums + b * dim + i), load(out + i)));
    }
    const F by = set1(1.0f / total);
    for (int32_t i = 0; i < dim; i += 16) store(out + i, mul(load(out + i), by));
}

}  // namespace

}  // namespace kvr::KVR_ISA

#define KVR_TABLE(isa)                                                                                              \
    const Kernels kernels_##isa = {#isa,      isa::exp_all, isa::rms_norm,  isa::quantise, isa::linear,             \
                                   isa::gate_up, isa::silu_gate, isa::rotate,  isa::scale,    isa::append,          \
                                   isa::attend_few, isa::attend_many, isa::combine}
