// K and V on their way into pages and out of them: what is kept, scores, weights, sums. See kernels_impl.h.
#pragma once

#include <cfloat>

#include "elementary_impl.h"

namespace kvr::KVR_ISA {

namespace {

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
    int8_t whole[kMostDim];
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

/// Lane l of sixteen: the products of the queries l, l + 16, ... of `R` rows with those of 16 keys, one key a lane.
template <int R, int J>
inline void chains(const float* const* q, int32_t dim, const float* transposed, int32_t lane, F* acc) {
    const int32_t steps = J ? J : dim / 16;
    const F first = load(transposed + lane * kBlockKeys);
    KVR_UNROLL
    for (int r = 0; r < R; ++r) acc[r] = mul(set1(q[r][lane]), first);
    KVR_UNROLL
    for (int32_t j = 1; j < steps; ++j) {
        const F key = load(transposed + (16 * j + lane) * kBlockKeys);
        KVR_UNROLL
        for (int r = 0; r < R; ++r) acc[r] = fma(set1(q[r][16 * j + lane]), key, acc[r]);
    }
}

/// The chains of lanes `a` and `b`, added.
template <int R, int J>
inline void pair(const float* const* q, int32_t dim, const float* transposed, int32_t a, int32_t b, F* sum) {
    F other[R];
    chains<R, J>(q, dim, transposed, a, sum);
    chains<R, J>(q, dim, transposed, b, other);
    KVR_UNROLL
    for (int r = 0; r < R; ++r) sum[r] = add(sum[r], other[r]);
}

/// Scores of `R` rows with 16 keys: the sums of `tree16`, with keys in the lanes instead of dimensions.
template <int R, int J>
inline void scores16(const float* const* q, int32_t dim, const float* transposed, F* s) {
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

/// A block as float32: K with a dimension a row, [dim, 64], and V, [64, dim].
struct Widened {
    const float *transposed, *values;
    int32_t most;  // keys of it that somebody sees; those behind are 0 in `transposed`
    const float *k_scales, *v_scales;
};

/// `R` rows, each with its queries of [dim], against one block.
template <int R, int J>
inline void attend_quad(int32_t any_dim, const Widened& block, const float* const* q, const int32_t* seen,
                        const Partial* to) {
    const int32_t dim = J ? 16 * J : any_dim;
    const float* values = block.values;
    alignas(64) float s[R][kBlockKeys];
    for (int32_t begin = 0; begin < block.most; begin += 16) {
        asm volatile("" ::: "memory");  // or the compiler spreads the queries over the lanes once, on the stack
        F lanes[R];
        scores16<R, J>(q, dim, block.transposed + begin, lanes);
        for (int r = 0; r < R; ++r) store(s[r] + begin, lanes[r]);
    }
    for (int r = 0; r < R; ++r) {
        if (block.k_scales) times_scales(s[r], block.k_scales, seen[r]);
        softmax64(s[r], seen[r], to[r].largest, to[r].weight);
        if (block.v_scales) times_scales(s[r], block.v_scales, seen[r]);
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
            for (int j = 0; j < kColumns; ++j) store(to[r].sums + i + 16 * j, acc[r][j]);
    }
}

/// `scratch`: 3 * 64 * dim.
Widened widen_both(const KvShape& shape, const Keys& k, const Keys& v, int32_t most, float* scratch) {
    const int32_t dim = shape.dim;
    float *transposed = scratch, *values = transposed + kBlockKeys * dim, *wide = values + kBlockKeys * dim;
    widen(shape, k, most, wide);
    std::memset(wide + most * dim, 0, sizeof(float) * static_cast<size_t>((kBlockKeys - most) * dim));
    for (int32_t t = 0; t < most; t += 16)
        for (int32_t d = 0; d < dim; d += 16)
            transpose16(wide + t * dim + d, dim, transposed + d * kBlockKeys + t, kBlockKeys);
    widen(shape, v, most, values);
    return {transposed, values, most, k.scales, v.scales};
}

/// All rows of a block, four at a time. `at(row, q, seen, to)` says what row `row` has.
template <int J, typename At>
inline void attend_quads(int32_t dim, const Widened& block, int32_t rows, At at) {
    for (int32_t row = 0; row < rows;) {
        const int32_t count = rows - row >= 4 ? 4 : 1;
        const float* q[4];
        int32_t seen[4];
        Partial to[4];
        for (int32_t r = 0; r < count; ++r, ++row) at(row, &q[r], &seen[r], &to[r]);
        if (count == 4)
            attend_quad<4, J>(dim, block, q, seen, to);
        else
            attend_quad<1, J>(dim, block, q, seen, to);
    }
}

template <int J>
void attend_many_of(const KvShape& shape, Keys k, Keys v, const float* q, const int32_t* seen, int32_t rows, Partial to,
                    int64_t sums_step, int64_t each_step, float* scratch) {
    const int32_t dim = shape.dim;
    int32_t most = 0;
    for (int32_t r = 0; r < rows; ++r) most = seen[r] > most ? seen[r] : most;
    const Widened block = widen_both(shape, k, v, most, scratch);
    attend_quads<J>(dim, block, rows, [&](int32_t row, const float** its_q, int32_t* its_seen, Partial* its) {
        *its_q = q + row * dim;
        *its_seen = seen[row];
        *its = {to.sums + row * sums_step, to.largest + row * each_step, to.weight + row * each_step};
    });
}

/// Readers whose rows together are worth a transposed K.
template <int J>
void attend_together(const KvShape& shape, Keys k, Keys v, int32_t group, const Reader* readers, int32_t num_readers,
                     float* scratch) {
    const int32_t dim = shape.dim;
    int32_t most = 0;
    for (int32_t i = 0; i < num_readers; ++i) most = readers[i].seen > most ? readers[i].seen : most;
    const Widened block = widen_both(shape, k, v, most, scratch);
    attend_quads<J>(
        dim, block, group * num_readers, [&](int32_t row, const float** its_q, int32_t* its_seen, Partial* its) {
            const Reader& reader = readers[row / group];
            const int32_t h = row % group;
            *its_q = reader.q + h * dim;
            *its_seen = reader.seen;
            *its = {reader.sums + h * reader.sums_step, reader.largest + h * reader.each_step,
                    reader.weight + h * reader.each_step};
        });
}

constexpr int32_t kTogether = 12;  // rows from which a transposed K pays

void attend_few(const KvShape& shape, Keys k, Keys v, int32_t group, const Reader* readers, int32_t num_readers,
                float* scratch) {
    if (num_readers * group >= kTogether) {
        switch (shape.dim) {
            case 64: attend_together<4>(shape, k, v, group, readers, num_readers, scratch); break;
            case 128: attend_together<8>(shape, k, v, group, readers, num_readers, scratch); break;
            default: attend_together<0>(shape, k, v, group, readers, num_readers, scratch); break;
        }
        return;
    }
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
