#include "model.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "sampler.h"

namespace kvr {

namespace {

constexpr int32_t kFewRows = 8;      // a span of more rows attends in tiles
constexpr int32_t kTileRows = 32;    // divides 64, so that a tile's rows see the same blocks
constexpr int64_t kPanelRows = 256;  // activations that stay in the L2 cache while weights pass by
constexpr int32_t kLayerPhases = 11;  // calls of `in_pieces` in a layer whose pass has long spans and short ones
constexpr int32_t kOtherPhases = 5;   // before the layers and behind them

int64_t at_least_one(int64_t x) { return x < 1 ? 1 : x; }

}  // namespace

Model::Model(const kvr_shape& shape, int32_t threads, int32_t own, const std::vector<int32_t>& lent)
    : shape(shape), layers(static_cast<size_t>(shape.layers)), team_(threads, own, lent) {
    num_pieces_ = shape.layers * kLayerPhases + kOtherPhases;
    pieces_ = std::make_unique<Pieces[]>(static_cast<size_t>(num_pieces_));
}

int Model::run(const kvr_pass& pass) {
    only_attends_ = false;
    if (!prepare(pass)) return -1;
    team_.run([](void* self, int32_t thread, int32_t) { static_cast<Model*>(self)->work(thread); }, this, threads_);
    return 0;
}

int Model::attend_only(const kvr_pass& pass, int32_t layer, const float* q, float* out) {
    only_attends_ = true;
    if (!prepare(pass)) return -1;
    for (int64_t row = 0; row < pass.rows; ++row) {
        float* to = qkv_.get() + row * qkv_columns();
        std::memcpy(to, q + row * head_columns(), sizeof(float) * static_cast<size_t>(head_columns()));
        kernels().scale(to, head_columns(), static_cast<float>(1.0 / std::sqrt(static_cast<double>(shape.head_dim))));
    }
    struct Call {
        Model* model;
        int32_t layer;
    } call{this, layer};
    team_.run(
        [](void* context, int32_t thread, int32_t) {
            Call* call = static_cast<Call*>(context);
            Worker worker{thread, call->model->threads_, 0};
            call->model->attend(call->layer, worker);
        },
        &call, threads_);
    std::memcpy(out, attended_.get(), sizeof(float) * static_cast<size_t>(pass.rows) * static_cast<size_t>(head_columns()));
    return 0;
}

uint8_t* Model::side(int32_t page, int32_t layer, int32_t which) const {
    return pass_->pool + page * page_bytes_ + (2 * layer + which) * kv_.side_bytes();
}

Activations Model::inputs_of(int32_t columns) {
    return {narrow_q_.get(), narrow_scale_.get(), narrow_scaled_sum_.get(), narrow_sum_.get(), columns};
}

bool Model::prepare(const kvr_pass& pass) {
    pass_ = &pass;
    threads_ = std::clamp(pass.threads, 1, team_.size());
    kv_ = {static_cast<KvFormat>(shape.kv_format), shape.kv_heads, pass.page_tokens, shape.head_dim};
    page_bytes_ = 2LL * shape.layers * kv_.side_bytes();
    staying_ = threads_;
    waited_ns_.store(0, std::memory_order_relaxed);
    for (int32_t i = 0; i < num_pieces_; ++i) pieces_[i].reset();
    plan_rows(pass);
    plan_shared(pass);
    return reserve(pass);
}

void Model::plan_rows(const kvr_pass& pass) {
    positions_.clear();
    span_of_.clear();
    few_.clear();
    tiles_.clear();
    num_partials_ = tile_floats_ = 0;
    const int32_t group = shape.heads / shape.kv_heads;
    for (int32_t span = 0; span < pass.spans; ++span) {
        const int32_t begin = static_cast<int32_t>(positions_.size()), start = pass.span_start[span];
        const int32_t rows = pass.span_rows[span];
        for (int32_t i = 0; i < rows; ++i) {
            positions_.push_back(start + i);
            span_of_.push_back(span);
            if (rows > kFewRows) continue;
            const int32_t blocks = (start + i) / kBlockKeys + 1;
            few_.push_back({begin + i, blocks, num_partials_});
            num_partials_ += static_cast<int64_t>(blocks) * shape.heads;
        }
        for (int32_t i = 0; rows > kFewRows && i < rows;) {
            const int32_t to_edge = kTileRows - (start + i) % kTileRows, count = std::min(to_edge, rows - i);
            tiles_.push_back({span, begin + i, count});
            const int64_t blocks = (start + i) / kBlockKeys + 1, readers = static_cast<int64_t>(kTileRows) * group;
            tile_floats_ = std::max(tile_floats_, readers * (blocks * (shape.head_dim + 2) + shape.head_dim + 1));
            i += count;
        }
    }
    // The longest first: whoever is free last has little left to do.
    std::stable_sort(tiles_.begin(), tiles_.end(),
                     [this](const Tile& a, const Tile& b) { return positions_[a.row] > positions_[b.row]; });
}

/// Which short rows read the same pages: sequences with a common beginning read it once a step.
void Model::plan_shared(const kvr_pass& pass) {
    shared_.clear();
    readers_.clear();
    int32_t most = 0;
    for (const Few& few : few_) most = std::max(most, few.blocks);
    const bool whole = pass.page_tokens % kBlockKeys == 0;
    const auto pages_of = [&](const Few& few) { return pass.pages + pass.span_pages[span_of_[few.row]]; };
    for (int32_t block = 0; block < most; ++block) {
        const size_t first = shared_.size();
        for (size_t i = 0; i < few_.size(); ++i) {
            if (few_[i].blocks <= block) continue;
            const int32_t span = span_of_[few_[i].row], index = block * kBlockKeys / pass.page_tokens;
            size_t found = first;
            for (; found < shared_.size(); ++found) {
                if (shared_[found].span == span) break;
                const Few& other = few_[readers_[shared_[found].begin]];
                if (whole && pages_of(few_[i])[index] == pages_of(other)[index]) break;
            }
            if (found == shared_.size()) {
                readers_.push_back(static_cast<int32_t>(i));
                const int32_t end = static_cast<int32_t>(readers_.size());
                shared_.push_back({span, block, end - 1, end});
                continue;
            }
            // Lists lie one after the other: later ones move up by one.
            readers_.insert(readers_.begin() + shared_[found].end, static_cast<int32_t>(i));
            ++shared_[found].end;
            for (size_t later = found + 1; later < shared_.size(); ++later) {
                ++shared_[later].begin;
                ++shared_[later].end;
            }
        }
    }
}

bool Model::reserve(const kvr_pass& pass) {
    const int64_t rows = whole_rows(at_least_one(pass.rows)), logit_rows = whole_rows(at_least_one(pass.num_logits));
    const int64_t narrow = std::max(shape.hidden, head_columns()), most = std::max(rows, logit_rows);
    scratch_each_ = std::max<int64_t>(kAttendScratch + tile_floats_, shape.hidden + 64);
    scratch_each_ = (scratch_each_ + 15) / 16 * 16;
    sample_each_ = (sample_scratch_bytes(shape.vocab) + 63) / 64 * 64;
    bool ok = qkv_.reserve(rows * qkv_columns()) && attended_.reserve(rows * head_columns()) &&
              sums_.reserve(num_partials_ * shape.head_dim) && largest_.reserve(num_partials_) &&
              weight_.reserve(num_partials_) && scratch_.reserve(scratch_each_ * threads_);
    if (only_attends_) return ok;
    ok = ok && x_.reserve(rows * shape.hidden) && narrow_q_.reserve(most * narrow) &&
         narrow_scale_.reserve(most * narrow / kGroup) && narrow_scaled_sum_.reserve(most * narrow / kGroup) &&
         narrow_sum_.reserve(most * narrow / kGroup) && wide_q_.reserve(rows * shape.inner) &&
         wide_scale_.reserve(rows * shape.inner / kGroup) && wide_scaled_sum_.reserve(rows * shape.inner / kGroup) &&
         wide_sum_.reserve(rows * shape.inner / kGroup) && sample_scratch_.reserve(sample_each_ * threads_);
    return ok && (pass.logits != nullptr || logits_.reserve(logit_rows * shape.vocab));
}

template <typename Use>
void Model::in_pieces(Worker& worker, int64_t count, int64_t size, Use use) {
    if (worker.phase >= num_pieces_) std::abort();  // miscounted: better loud than into somebody's memory
    Pieces& pieces = pieces_[worker.phase++];
    for (int64_t i = pieces.take(size); i < count; i = pieces.take(size))
        for (int64_t j = i; j < std::min(i + size, count); ++j) use(j);
    meet(worker);
}

void Model::meet(const Worker& worker) {
    if (const int64_t waited = barrier_.wait(worker.threads)) waited_ns_.fetch_add(waited, std::memory_order_relaxed);
}

void Model::work(int32_t thread) {
    Worker worker{thread, threads_, 0};
    in_pieces(worker, pass_->rows, 4, [&](int64_t row) { embed(row); });
    for (int32_t number = 0; number < shape.layers; ++number) {
        if (leaves(worker)) return;
        compute_layer(number, worker);
    }
    finish(worker);
}

/// Helpers on lent cores leave when these are wanted back; the others go on.
bool Model::leaves(Worker& worker) {
    const int32_t own = std::clamp(pass_->own_threads, 1, worker.threads);
    if (pass_->revoked == nullptr || worker.threads == own) return false;
    if (worker.thread == 0 && __atomic_load_n(pass_->revoked, __ATOMIC_RELAXED) != 0) staying_ = own;
    meet(worker);
    worker.threads = staying_;
    return worker.thread >= worker.threads;
}

void Model::embed(int64_t row) { embedding->row(pass_->token_ids[row], x_.get() + row * shape.hidden); }

void Model::norm_row(const float* from, const float* weight, const Activations& to, int64_t row, float* scratch) {
    kernels().rms_norm(from, weight, shape.norm_eps, shape.hidden, scratch);
    kernels().quantise(scratch, to, row);
}

void Model::compute_layer(int32_t number, Worker& worker) {
    const Layer& layer = layers[number];
    const int64_t rows = pass_->rows;
    const int32_t hidden = shape.hidden;
    float* scratch = scratch_.get() + worker.thread * scratch_each_;
    const Activations x = inputs_of(hidden), heads = inputs_of(head_columns());
    const Activations inner{wide_q_.get(), wide_scale_.get(), wide_scaled_sum_.get(), wide_sum_.get(), shape.inner};

    in_pieces(worker, rows, 4, [&](int64_t row) {
        norm_row(x_.get() + row * hidden, layer.attention_norm, x, row, scratch);
    });
    multiply(*layer.qkv, x, rows, qkv_.get(), qkv_columns(), false, worker);
    in_pieces(worker, rows, 4, [&](int64_t row) { store_row(layer, number, row); });
    attend(number, worker);
    in_pieces(worker, rows, 4, [&](int64_t row) { kernels().quantise(attended_.get() + row * head_columns(), heads, row); });
    multiply(*layer.out, heads, rows, x_.get(), hidden, true, worker);
    in_pieces(worker, rows, 4, [&](int64_t row) { norm_row(x_.get() + row * hidden, layer.mlp_norm, x, row, scratch); });
    const int64_t panels = (rows + kPanelRows - 1) / kPanelRows, groups = shape.inner / kGroup;
    in_pieces(worker, panels * groups, rows > 32 ? 1 : 2, [&](int64_t piece) {
        const int64_t begin = piece / groups * kPanelRows;
        kernels().gate_up(*layer.gate_up, static_cast<int32_t>(piece % groups), x, begin,
                          std::min(begin + kPanelRows, rows), inner);
    });
    multiply(*layer.down, inner, rows, x_.get(), hidden, true, worker);
}

void Model::multiply(const Linear& linear, const Activations& x, int64_t rows, float* out, int64_t stride, bool adds,
                     Worker& worker) {
    const int32_t tiles = linear.num_tiles();
    const int32_t size = std::clamp(tiles / (8 * worker.threads), 1, 64), chunks = (tiles + size - 1) / size;
    const int64_t panels = (rows + kPanelRows - 1) / kPanelRows;
    in_pieces(worker, panels * chunks, 1, [&](int64_t piece) {
        const int64_t begin = piece / chunks * kPanelRows;
        const int32_t first = static_cast<int32_t>(piece % chunks) * size;
        kernels().linear(linear, first, std::min(first + size, tiles), x, begin, std::min(begin + kPanelRows, rows), out,
                         stride, adds);
    });
}

void Model::store_row(const Layer& layer, int32_t number, int64_t row) {
    const int32_t dim = shape.head_dim, position = positions_[row], span = span_of_[row];
    float* q = qkv_.get() + row * qkv_columns();
    float *k = q + head_columns(), *v = k + shape.kv_heads * dim;
    for (int32_t h = 0; layer.q_norm && h < shape.heads; ++h)
        kernels().rms_norm(q + h * dim, layer.q_norm, shape.norm_eps, dim, q + h * dim);
    for (int32_t h = 0; layer.k_norm && h < shape.kv_heads; ++h)
        kernels().rms_norm(k + h * dim, layer.k_norm, shape.norm_eps, dim, k + h * dim);
    const float *c = cos + static_cast<int64_t>(position) * dim, *s = sin + static_cast<int64_t>(position) * dim;
    kernels().rotate(q, shape.heads + shape.kv_heads, dim, c, s);
    kernels().scale(q, head_columns(), static_cast<float>(1.0 / std::sqrt(static_cast<double>(dim))));
    const int32_t page = pass_->pages[pass_->span_pages[span] + position / pass_->page_tokens];
    const int32_t token = position % pass_->page_tokens;
    kernels().append(k, kv_, side(page, number, 0), token);
    kernels().append(v, kv_, side(page, number, 1), token);
}

void Model::attend(int32_t number, Worker& worker) {
    const int64_t heads = shape.kv_heads, shared = static_cast<int64_t>(shared_.size()) * heads;
    float* scratch = scratch_.get() + worker.thread * scratch_each_;
    if (!tiles_.empty())
        in_pieces(worker, static_cast<int64_t>(tiles_.size()) * heads, 1, [&](int64_t i) {
            attend_tile(number, tiles_[i / heads], static_cast<int32_t>(i % heads), scratch);
        });
    if (few_.empty()) return;
    in_pieces(worker, shared, std::clamp<int64_t>(shared / (4 * worker.threads), 1, 12),
              [&](int64_t i) { attend_shared(number, i, scratch); });
    in_pieces(worker, static_cast<int64_t>(few_.size()), 1, [&](int64_t i) { combine_row(i); });
}

/// The first `count` keys of `block`, where they lie, or copied together when pages are no whole blocks.
Keys Model::keys_of(int32_t number, int32_t which, int32_t head, const int32_t* pages, int32_t block, int32_t count,
                    uint8_t* copy) const {
    const int32_t tokens = pass_->page_tokens, first = block * kBlockKeys;
    const int64_t each = kv_.token_bytes();
    if (tokens % kBlockKeys == 0) {
        const uint8_t* from = side(pages[first / tokens], number, which);
        const int64_t slot = static_cast<int64_t>(head) * tokens + first % tokens;
        const float* scales = reinterpret_cast<const float*>(from + kv_.values_bytes());
        return {from + slot * each, kv_.scaled() ? scales + slot : nullptr, nullptr};
    }
    float* scales = reinterpret_cast<float*>(copy + kBlockKeys * each);
    for (int32_t done = 0; done < count;) {
        const int32_t token = (first + done) % tokens, run = std::min(count - done, tokens - token);
        const uint8_t* from = side(pages[(first + done) / tokens], number, which);
        const int64_t slot = static_cast<int64_t>(head) * tokens + token;
        std::memcpy(copy + done * each, from + slot * each, static_cast<size_t>(run * each));
        if (kv_.scaled()) std::memcpy(scales + done, from + kv_.values_bytes() + 4 * slot, 4 * static_cast<size_t>(run));
        done += run;
    }
    return {copy, kv_.scaled() ? scales : nullptr, nullptr};
}

void Model::attend_shared(int32_t number, int64_t piece, float* scratch) {
    constexpr int32_t kMost = 32;
    const int32_t group = shape.heads / shape.kv_heads, dim = shape.head_dim;
    const Shared& shared = shared_[piece / shape.kv_heads];
    const int32_t head = static_cast<int32_t>(piece % shape.kv_heads);
    const bool is_last = piece + 1 == static_cast<int64_t>(shared_.size()) * shape.kv_heads;
    const Shared* next = is_last ? nullptr : &shared_[(piece + 1) / shape.kv_heads];
    const int32_t next_head = static_cast<int32_t>((piece + 1) % shape.kv_heads);
    const int32_t* pages = pass_->pages + pass_->span_pages[shared.span];
    alignas(64) uint8_t copies[2][kBlockKeys * (kMostDim * 4 + 4)];
    int32_t most = 0;
    for (int32_t i = shared.begin; i < shared.end; ++i)
        most = std::max(most, positions_[few_[readers_[i]].row] - shared.block * kBlockKeys + 1);
    most = std::min(most, kBlockKeys);
    Keys k = keys_of(number, 0, head, pages, shared.block, most, copies[0]);
    Keys v = keys_of(number, 1, head, pages, shared.block, most, copies[1]);
    if (next && pass_->page_tokens % kBlockKeys == 0) {
        const int32_t* next_pages = pass_->pages + pass_->span_pages[next->span];
        k.ahead = keys_of(number, 0, next_head, next_pages, next->block, 0, nullptr).values;
        v.ahead = keys_of(number, 1, next_head, next_pages, next->block, 0, nullptr).values;
    }
    for (int32_t begin = shared.begin; begin < shared.end; begin += kMost) {
        Reader readers[kMost];
        const int32_t count = std::min(kMost, shared.end - begin);
        for (int32_t i = 0; i < count; ++i) {
            const Few& few = few_[readers_[begin + i]];
            const int64_t partial = few.partials + static_cast<int64_t>(head) * group * few.blocks + shared.block;
            const int32_t seen = std::min(kBlockKeys, positions_[few.row] - shared.block * kBlockKeys + 1);
            readers[i] = {qkv_.get() + static_cast<int64_t>(few.row) * qkv_columns() + head * group * dim,
                          seen,
                          sums_.get() + partial * dim,
                          largest_.get() + partial,
                          weight_.get() + partial,
                          static_cast<int64_t>(few.blocks) * dim,
                          few.blocks};
        }
        kernels().attend_few(kv_, k, v, group, readers, count, scratch);
    }
}

void Model::combine_row(int64_t index) {
    const Few& few = few_[index];
    const int32_t dim = shape.head_dim;
    for (int32_t h = 0; h < shape.heads; ++h) {
        const int64_t partial = few.partials + static_cast<int64_t>(h) * few.blocks;
        kernels().combine(sums_.get() + partial * dim, largest_.get() + partial, weight_.get() + partial, few.blocks, dim,
                          attended_.get() + static_cast<int64_t>(few.row) * head_columns() + h * dim);
    }
}

void Model::attend_tile(int32_t number, const Tile& tile, int32_t head, float* scratch) {
    const int32_t group = shape.heads / shape.kv_heads, dim = shape.head_dim, readers = tile.rows * group;
    const int32_t blocks = positions_[tile.row] / kBlockKeys + 1;
    const int32_t* pages = pass_->pages + pass_->span_pages[tile.span];
    alignas(64) uint8_t copies[2][kBlockKeys * (kMostDim * 4 + 4)];
    float* q = scratch + kAttendScratch;
    int32_t* seen = reinterpret_cast<int32_t*>(q + static_cast<int64_t>(readers) * dim);
    float* sums = q + static_cast<int64_t>(readers) * (dim + 1);
    float* largest = sums + static_cast<int64_t>(readers) * blocks * dim;
    float* weight = largest + static_cast<int64_t>(readers) * blocks;
    for (int32_t r = 0; r < tile.rows; ++r)
        std::memcpy(q + r * group * dim,
                    qkv_.get() + static_cast<int64_t>(tile.row + r) * qkv_columns() + head * group * dim,
                    sizeof(float) * static_cast<size_t>(group * dim));
    for (int32_t block = 0; block < blocks; ++block) {
        int32_t most = 0;
        for (int32_t i = 0; i < readers; ++i) {
            seen[i] = std::min(kBlockKeys, positions_[tile.row + i / group] - block * kBlockKeys + 1);
            most = std::max(most, seen[i]);
        }
        const Keys k = keys_of(number, 0, head, pages, block, most, copies[0]);
        const Keys v = keys_of(number, 1, head, pages, block, most, copies[1]);
        kernels().attend_many(kv_, k, v, q, seen, readers, {sums + block * dim, largest + block, weight + block},
                              static_cast<int64_t>(blocks) * dim, blocks, scratch);
    }
    for (int32_t i = 0; i < readers; ++i)
        kernels().combine(sums + static_cast<int64_t>(i) * blocks * dim, largest + static_cast<int64_t>(i) * blocks,
                          weight + static_cast<int64_t>(i) * blocks, blocks, dim,
                          attended_.get() + static_cast<int64_t>(tile.row + i / group) * head_columns() +
                              (head * group + i % group) * dim);
}

void Model::finish(Worker& worker) {
    const kvr_pass& pass = *pass_;
    if (pass.finite)
        in_pieces(worker, pass.rows, 16, [&](int64_t row) {
            const float* x = x_.get() + row * shape.hidden;
            bool finite = true;
            for (int32_t i = 0; i < shape.hidden; ++i) finite &= std::isfinite(x[i]);
            pass.finite[row] = finite;
        });
    if (pass.num_logits == 0) return;
    float *scratch = scratch_.get() + worker.thread * scratch_each_, *logits = pass.logits ? pass.logits : logits_.get();
    const Activations x = inputs_of(shape.hidden);
    in_pieces(worker, pass.num_logits, 1, [&](int64_t i) {
        norm_row(x_.get() + static_cast<int64_t>(pass.logit_rows[i]) * shape.hidden, norm, x, i, scratch);
    });
    multiply(*head, x, pass.num_logits, logits, shape.vocab, false, worker);
    if (pass.num_draws == 0) return;
    if (pass.allowed_known != nullptr) wait_for(pass.allowed_known);
    in_pieces(worker, pass.num_draws, 1, [&](int64_t i) {
        const float* row = logits + static_cast<int64_t>(pass.draw_from[i]) * shape.vocab;
        void* own = sample_scratch_.get() + worker.thread * sample_each_;
        pass.status[i] = static_cast<uint8_t>(sample(row, shape.vocab, pass.draws[i], &pass.sampled[i], own));
    });
}

}  // namespace kvr
