// What the step is made of, one table an instruction set. Every function gives the same bits in every table.
#pragma once

#include <cstdint>

#include "inline.h"
#include "linear.h"

namespace kvr {

constexpr int kRows = 8;  // rows whose inputs lie together

/// Inputs of a product, in blocks of 8 rows: `q: [blocks, groups, 8, 32]`, and `[blocks, groups, 8]` of each group's
/// scale, scale * sum and sum. So a kernel steps through one piece of memory, whatever the rows are.
struct Activations {
    int8_t* q;
    float *scale, *scaled_sum;
    int32_t* sum;
    int32_t inputs;
    KVR_INLINE int32_t groups() const { return inputs / kGroup; }
    /// Number of a row's group among all: its values are `q + 32 * at`.
    KVR_INLINE int64_t at(int64_t row, int32_t group) const {
        return (row / kRows * groups() + group) * kRows + row % kRows;
    }
};

/// `rows`, rounded up to whole blocks.
KVR_INLINE int64_t whole_rows(int64_t rows) { return (rows + kRows - 1) / kRows * kRows; }

enum KvFormat : int32_t { KvBf16 = 0, KvInt8 = 1, KvInt4 = 2, KvFloat = 3 };

/// How K or V of one layer lie in a page: values [heads, tokens, dim], then for whole numbers scales [heads, tokens].
struct KvShape {
    KvFormat format;
    int32_t kv_heads, page_tokens, dim;
    KVR_INLINE int64_t token_bytes() const {
        return format == KvFloat ? 4 * dim : format == KvBf16 ? 2 * dim : format == KvInt8 ? dim : dim / 2;
    }
    KVR_INLINE bool scaled() const { return format == KvInt8 || format == KvInt4; }
    KVR_INLINE int64_t values_bytes() const { return static_cast<int64_t>(kv_heads) * page_tokens * token_bytes(); }
    KVR_INLINE int64_t side_bytes() const { return values_bytes() + (scaled() ? 4LL * kv_heads * page_tokens : 0); }
};

constexpr int32_t kMostDim = 256;  // of a head
constexpr int kBlockKeys = 64;  // keys whose weights are summed together: part of the arithmetic

/// Up to 64 consecutive keys of one head: `values` at token 0, `scales` (or null) likewise; `ahead`, or null: what will
/// be read next, as much, and had better be on its way.
struct Keys {
    const uint8_t* values;
    const float* scales;
    const uint8_t* ahead;
};

/// What a row and head have of one block of keys: [dim] sums, the largest score, the sum of weights.
struct Partial {
    float *sums, *largest, *weight;
};

/// One row that attends to a block: its queries of the heads that share the K head, [group, dim], already scaled;
/// it sees the first `seen` keys. The partial of head h of them is `sums + h * sums_step` and so on.
struct Reader {
    const float* q;
    int32_t seen;
    float *sums, *largest, *weight;
    int64_t sums_step, each_step;
};

struct Kernels {
    const char* name;

    void (*exp)(const float* x, float* y, int64_t count);  // count % 16 == 0
    /// x: [inputs] -> y: (x * 1 / rms) * weight
    void (*rms_norm)(const float* x, const float* weight, float eps, int32_t inputs, float* y);
    /// x: [inputs] -> row `row` of `to`
    void (*quantise)(const float* x, const Activations& to, int64_t row);
    /// Rows [begin, end), `begin` at a block's first, times tiles [first, last) -> out[row * stride + column], or added to what is there.
    void (*linear)(const Linear& linear, int32_t first, int32_t last, const Activations& x, int64_t begin, int64_t end,
                   float* out, int64_t stride, bool add);
    /// The same for `gate_up: [2 * inner, inputs]`: silu(gate) * up of group `group` of 32, quantised into `to`.
    void (*gate_up)(const Linear& gate_up, int32_t group, const Activations& x, int64_t begin, int64_t end,
                    const Activations& to);
    void (*silu_gate)(const float* gate, const float* up, int64_t count, float* y);
    /// heads of [dim], rotated in place by cos and signed sin: [dim] each
    void (*rotate)(float* x, int32_t heads, int32_t dim, const float* cos, const float* sin);
    void (*scale)(float* x, int64_t count, float by);
    /// K or V of one row, [heads, dim], into slot `token` of a page's `side`.
    void (*append)(const float* x, const KvShape& shape, uint8_t* side, int32_t token);
    /// A few rows against one block.
    void (*attend_few)(const KvShape& shape, Keys k, Keys v, int32_t group, const Reader* readers, int32_t num_readers,
                       float* scratch);
    /// Many rows against one block, `q: [rows, dim]` scaled, row r sees `seen[r]`; partials [rows] one after another.
    void (*attend_many)(const KvShape& shape, Keys k, Keys v, const float* q, const int32_t* seen, int32_t rows,
                        Partial to, int64_t sums_step, int64_t each_step, float* scratch);
    /// blocks of one row and head -> out: [dim]
    void (*combine)(const float* sums, const float* largest, const float* weight, int32_t blocks, int32_t dim, float* out);
};

constexpr int64_t kAttendScratch = 3 * kBlockKeys * kMostDim;  // floats

extern const Kernels kernels_portable;
#if defined(__x86_64__)
extern const Kernels kernels_avx2, kernels_avx512;
#endif

/// The table in use: the best that the machine has, or what KVRELAY_ISA or kvr_use names.
const Kernels& kernels();

}  // namespace kvr
