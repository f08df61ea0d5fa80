// A decoder and its step: fetch pages, compute the layers, store K and V, for all rows of a pass in one call.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "api.h"
#include "kernels.h"
#include "team.h"

namespace kvr {

struct Layer {
    const float *attention_norm = nullptr, *mlp_norm = nullptr, *q_norm = nullptr, *k_norm = nullptr;
    const Linear *qkv = nullptr, *out = nullptr, *gate_up = nullptr, *down = nullptr;
};

/// A row of a short span. Its partial of head h and block b is number `partials + h * blocks + b`.
struct Few {
    int32_t row, blocks;
    int64_t partials;
};

/// The short rows `readers_[begin, end)` read the same keys of `block`, those of `span`'s pages.
struct Shared {
    int32_t span, block, begin, end;
};

/// Rows of a long span, inside one block, that attend together.
struct Tile {
    int32_t span, row, rows;
};

/// Where a thread is in a pass.
struct Worker {
    int32_t thread, threads, phase;
};

class Model {
  public:
    Model(const kvr_shape& shape, int32_t threads, int32_t own, const std::vector<int32_t>& lent);

    /// 0, or -1 when memory ran out: then nothing was written.
    int run(const kvr_pass& pass);
    /// Attention alone, for tests: `q`, `out`: [rows, heads * dim].
    int attend_only(const kvr_pass& pass, int32_t layer, const float* q, float* out);
    /// In the last pass, of all threads together, beyond what a phase may take.
    int64_t waited_ns() const { return waited_ns_.load(std::memory_order_relaxed); }

    kvr_shape shape;
    std::vector<Layer> layers;
    const float *norm = nullptr, *cos = nullptr, *sin = nullptr;
    const Linear *embedding = nullptr, *head = nullptr;

  private:
    int32_t head_columns() const { return shape.heads * shape.head_dim; }
    int32_t qkv_columns() const { return head_columns() + 2 * shape.kv_heads * shape.head_dim; }
    Activations inputs_of(int32_t columns);
    uint8_t* side(int32_t page, int32_t layer, int32_t which) const;

    bool prepare(const kvr_pass& pass);
    void plan_rows(const kvr_pass& pass);
    void plan_shared(const kvr_pass& pass);
    bool reserve(const kvr_pass& pass);

    void work(int32_t thread);
    void compute_layer(int32_t number, Worker& worker);
    void finish(Worker& worker);
    bool leaves(Worker& worker);
    void embed(int64_t row);
    void norm_row(const float* from, const float* weight, const Activations& to, int64_t row, float* scratch);
    void store_row(const Layer& layer, int32_t number, int64_t row);
    void attend(int32_t number, Worker& worker);
    void attend_shared(int32_t number, int64_t piece, float* scratch);
    void attend_tile(int32_t number, const Tile& tile, int32_t head, float* scratch);
    Keys keys_of(int32_t number, int32_t which, int32_t head, const int32_t* pages, int32_t block, int32_t count,
                 uint8_t* copy) const;
    void combine_row(int64_t few);
    void multiply(const Linear& linear, const Activations& x, int64_t rows, float* out, int64_t stride, bool adds,
                  Worker& worker);

    /// `use(i)` for all pieces of a phase, `size` at a time, shared among the threads, who then meet.
    template <typename Use>
    void in_pieces(Worker& worker, int64_t count, int64_t size, Use use);
    void meet(const Worker& worker);

    Team team_;
    const kvr_pass* pass_ = nullptr;
    KvShape kv_{};
    int64_t page_bytes_ = 0;
    int32_t threads_ = 1;
    bool only_attends_ = false;
    int32_t staying_ = 1;  // threads that go on after a revocation
    Barrier barrier_;
    std::atomic<int64_t> waited_ns_{0};

    std::vector<int32_t> positions_, span_of_;  // of each row
    std::vector<Few> few_;
    std::vector<Tile> tiles_;
    std::vector<Shared> shared_;
    std::vector<int32_t> readers_;  // of `shared_`: indices into `few_`
    int64_t num_partials_ = 0, tile_floats_ = 0;

    Block<float> x_, qkv_, attended_, sums_, largest_, weight_, scratch_, logits_;
    Block<int8_t> narrow_q_, wide_q_;
    Block<float> narrow_scale_, narrow_scaled_sum_, wide_scale_, wide_scaled_sum_;
    Block<int32_t> narrow_sum_, wide_sum_;
    Block<uint8_t> sample_scratch_;
    int64_t scratch_each_ = 0, sample_each_ = 0;
    std::unique_ptr<Pieces[]> pieces_;
    int32_t num_pieces_ = 0;
};

}  // namespace kvr
