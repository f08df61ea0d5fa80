#include "sampler.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>

#include "kernels.h"
#include "sampler_passes.h"

namespace kvr {
namespace sampling {
namespace {

constexpr double kWeightOne = 1099511627776.0;  // 2^40
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int kDigits = 2048;
static_assert(kBuckets <= kDigits);
/// Below the best by so many temperatures lies most of a nucleus; where not, more is looked at.
constexpr float kNearBest[] = {3.0f, 8.0f};
constexpr int64_t kFew = 4096;  // ids that are worth being looked at one by one

/// The ids of a row that are allowed, where these are few: a row of its own, in the caller's scratch before all else.
struct Allowed {
    uint32_t ids[kFew];  // ascending
    float scores[kFew];
    int64_t count;

    /// False: they are many.
    bool collect(const float* logits, int64_t vocab, const uint32_t* allowed) {
        count = 0;
        for (int64_t word = 0; word * 32 < vocab; ++word) {
            for (uint32_t bits = allowed[word]; bits != 0; bits &= bits - 1) {
                const int64_t id = word * 32 + __builtin_ctz(bits);
                if (id >= vocab) break;
                if (count == kFew) return false;
                ids[count] = static_cast<uint32_t>(id);
                scores[count++] = logits[id];
            }
        }
        return true;
    }
};

/// Parts of the caller's scratch for a row of `vocab` scores.
struct Scratch {
    Allowed* allowed;
    uint64_t* weights;    // [vocab + kSpill], of `ids`
    uint64_t* sums;       // [ceil(vocab / kSumGroup)], of all scores
    uint64_t* histogram;  // [2 * kDigits]
    uint64_t* walked;     // [kSumGroup + kSpill]
    uint32_t* ids;        // [vocab + kSpill], ascending
    float* scores;        // [vocab + kSpill], of `ids`
    float* maxima;        // [ceil(vocab / kMaxGroup)]
    float* ranked;        // the same, in another order
    float* masked;        // [vocab], the row as far as its ids are allowed

    static int64_t groups(int64_t vocab, int64_t size) { return (vocab + size - 1) / size; }

    static int64_t bytes(int64_t vocab) {
        const int64_t longs = vocab + groups(vocab, kSumGroup) + 2 * kDigits + kSumGroup + 2 * kSpill;
        const int64_t ints = 2 * (vocab + kSpill) + 2 * groups(vocab, kMaxGroup) + vocab;
        return static_cast<int64_t>(sizeof(Allowed)) + 8 * longs + 4 * ints + 8;
    }

    Scratch(void* memory, int64_t vocab) {
        const uintptr_t at = (reinterpret_cast<uintptr_t>(memory) + 7) & ~uintptr_t{7};
        allowed = reinterpret_cast<Allowed*>(at);
        weights = reinterpret_cast<uint64_t*>(allowed + 1);
        sums = weights + vocab + kSpill;
        histogram = sums + groups(vocab, kSumGroup);
        walked = histogram + 2 * kDigits;
        ids = reinterpret_cast<uint32_t*>(walked + kSumGroup + kSpill);
        scores = reinterpret_cast<float*>(ids + vocab + kSpill);
        maxima = scores + vocab + kSpill;
        ranked = maxima + groups(vocab, kMaxGroup);
        masked = ranked + groups(vocab, kMaxGroup);
    }
};

/// Unsigned, ascending with the score; zeros of both signs are equal.
inline uint32_t rank_of(float score) {
    const float zeros_equal = score + 0.0f;
    uint32_t bits;
    std::memcpy(&bits, &zeros_equal, sizeof bits);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

/// Where a best-first run ends: behind it everything that ranks higher, and of what ranks equal, by id, as many as it
/// takes to measure `left`.
struct Edge {
    uint32_t rank;
    uint64_t left;
};

/// One row and what is kept of it so far: `kept` ids of the scratch, with their scores.
class Row {
   public:
    Row(const Passes& passes, const float* logits, int64_t vocab, const kvr_sampling& params, void* memory)
        : passes_(passes), vocab_(vocab), params_(params), at_(memory, vocab), logits_(row_of(logits)) {}

    int choose(uint32_t* id) {
        if (!passes_.group_maxima(logits_, vocab_, at_.maxima)) return 1;
        const float best = *std::max_element(at_.maxima, at_.maxima + Scratch::groups(vocab_, kMaxGroup));
        if (!std::isfinite(best)) return 1;
        if (params_.greedy) {
            *id = first_of(best);
            return 0;
        }
        scale_ = {best, params_.inv_temperature};
        least_ = params_.min_p > 0.0 ? static_cast<uint64_t>(params_.min_p * kWeightOne) : 0;
        const bool top_k = params_.top_k > 0 && params_.top_k < vocab_, top_p = params_.top_p < 1.0;
        if (!top_k && !top_p) {
            *id = draw_from_all();
            return 0;
        }
        if (top_k) {
            keep_top_k();
            if (top_p) keep_top_p(wanted(total_of_kept()));
        } else {
            const uint64_t target = wanted(total_of_all(0, -kInfinity));
            if (!collect_nucleus(target)) {
                *id = draw_from_many(target);
                return 0;
            }
            keep_top_p(target);
        }
        *id = draw_from_kept();
        return 0;
    }

   private:
    const float* row_of(const float* logits) const {
        if (params_.allowed == nullptr) return logits;
        passes_.mask(logits, vocab_, params_.allowed, at_.masked);
        return at_.masked;
    }

    uint32_t first_of(float best) const {
        int64_t group = 0;
        while (at_.maxima[group] != best) ++group;
        int64_t id = group * kMaxGroup;
        while (logits_[id] != best) ++id;
        return static_cast<uint32_t>(id);
    }

    uint64_t point(uint64_t total) const {
        return static_cast<uint64_t>((static_cast<unsigned __int128>(params_.hash) * total) >> 64);
    }

    uint64_t wanted(uint64_t total) const {
        const auto target = static_cast<uint64_t>(params_.top_p * static_cast<double>(total));
        return std::clamp<uint64_t>(target, 1, total);  // one at least; and rounding may ask for more than there is
    }

    uint64_t total_of_all(uint64_t least, float cut) {
        passes_.group_sums(logits_, vocab_, scale_, least, cut, at_.sums);
        uint64_t total = 0;
        for (int64_t group = 0; group < Scratch::groups(vocab_, kSumGroup); ++group) total += at_.sums[group];
        return total;
    }

    uint64_t total_of_kept() const {
        uint64_t total = 0;
        for (int64_t i = 0; i < kept_; ++i) total += at_.weights[i];
        return total;
    }

    uint32_t draw_from_all() {
        const uint64_t total = total_of_all(least_, -kInfinity);
        return draw_from_groups(total, -kInfinity, vocab_);
    }

    /// `at_.sums` add up to `total`: of scores that are `cut` at least, and of those equal to it ids below `end` only.
    uint32_t draw_from_groups(uint64_t total, float cut, int64_t end) {
        uint64_t left = point(total);
        int64_t group = 0;
        while (at_.sums[group] <= left) left -= at_.sums[group++];
        const int64_t start = group * kSumGroup, count = std::min(kSumGroup, vocab_ - start);
        passes_.weights(logits_ + start, count, scale_, at_.walked);
        for (int64_t i = 0; i < count; ++i) {
            const float score = logits_[start + i];
            if (score < cut || (score == cut && start + i >= end)) at_.walked[i] = 0;
        }
        return static_cast<uint32_t>(start + walk(at_.walked, left));
    }

    /// A nucleus of many ids is cut by a table of weights; only ids near the cut are looked at one by one.
    uint32_t draw_from_many(uint64_t target) {
        uint64_t* sums = at_.histogram;
        passes_.bucket_sums(logits_, vocab_, scale_, sums);
        for (int32_t bucket = 0; bucket < kBuckets; ++bucket) sums[bucket] += sums[kBuckets + bucket];
        int32_t bucket = 0;
        for (; sums[bucket] < target; ++bucket) target -= sums[bucket];
        kept_ = passes_.collect_bucket(logits_, vocab_, scale_, bucket, at_.ids, at_.scores);
        passes_.weights(at_.scores, kept_, scale_, at_.weights);
        Edge edge = edge_of(target, [this](int64_t i) { return at_.weights[i]; });

        const float cut = *std::find_if(at_.scores, at_.scores + kept_, [&](float x) { return rank_of(x) == edge.rank; });
        uint64_t total = total_of_all(least_, cut);
        int64_t end = 0;
        for (int64_t i = 0; i < kept_; ++i) {
            if (at_.scores[i] != cut) continue;
            const uint64_t weight = at_.weights[i];
            if (edge.left > 0) {
                edge.left -= std::min(edge.left, weight);
                end = at_.ids[i] + 1;
            } else if (weight >= least_) {
                total -= weight;
                at_.sums[at_.ids[i] / kSumGroup] -= weight;
            }
        }
        return draw_from_groups(total, cut, end);
    }

    uint32_t draw_from_kept() const {
        uint64_t total = 0;
        for (int64_t i = 0; i < kept_; ++i) total += at_.weights[i] >= least_ ? at_.weights[i] : 0;
        return at_.ids[walk(at_.weights, point(total))];
    }

    int64_t walk(const uint64_t* weights, uint64_t left) const {
        int64_t i = 0;
        for (;; ++i) {
            const uint64_t weight = weights[i] >= least_ ? weights[i] : 0;
            if (weight > left) return i;
            left -= weight;
        }
    }

    void collect(float cut) {
        kept_ = passes_.collect(logits_, vocab_, cut, at_.ids, at_.scores);
        passes_.weights(at_.scores, kept_, scale_, at_.weights);
    }

    /// As many groups have a score of at least the k-th largest maximum, so as many scores do.
    void keep_top_k() {
        const int64_t groups = Scratch::groups(vocab_, kMaxGroup), k = params_.top_k;
        float cut = -kInfinity;
        if (k <= groups) {
            std::copy(at_.maxima, at_.maxima + groups, at_.ranked);
            std::nth_element(at_.ranked, at_.ranked + (k - 1), at_.ranked + groups, std::greater<>());
            cut = at_.ranked[k - 1];
        }
        collect(cut);
        const auto one = [](int64_t) -> uint64_t { return 1; };
        keep(edge_of(static_cast<uint64_t>(k), one), one);
    }

    /// A few of the best whose weights are `target` at least; false where that takes many.
    bool collect_nucleus(uint64_t target) {
        for (const float near : kNearBest) {
            kept_ = passes_.collect(logits_, vocab_, scale_.best - near / scale_.inv_temperature, at_.ids, at_.scores);
            if (kept_ > kFew) return false;
            passes_.weights(at_.scores, kept_, scale_, at_.weights);
            if (total_of_kept() >= target) return true;
        }
        return false;
    }

    void keep_top_p(uint64_t target) {
        const auto weight = [this](int64_t i) { return at_.weights[i]; };
        keep(edge_of(target, weight), weight);
    }

    /// Of the kept: where the shortest best-first run ends whose `measure` is at least `target`, which there is.
    template <typename Measure>
    Edge edge_of(uint64_t target, Measure measure) {
        uint32_t prefix = 0, decided = 0;
        for (const int shift : {21, 10, 0}) {
            const uint32_t digits = shift ? kDigits - 1 : 1023;
            std::memset(at_.histogram, 0, kDigits * sizeof *at_.histogram);
            for (int64_t i = 0; i < kept_; ++i) {
                const uint32_t rank = rank_of(at_.scores[i]);
                if ((rank & decided) == prefix) at_.histogram[(rank >> shift) & digits] += measure(i);
            }
            uint32_t digit = digits;
            while (at_.histogram[digit] < target) target -= at_.histogram[digit--];
            prefix |= digit << shift;
            decided |= digits << shift;
        }
        return {prefix, target};
    }

    template <typename Measure>
    void keep(Edge edge, Measure measure) {
        int64_t kept = 0;
        for (int64_t i = 0; i < kept_; ++i) {
            const uint32_t rank = rank_of(at_.scores[i]);
            if (rank < edge.rank || (rank == edge.rank && edge.left == 0)) continue;
            if (rank == edge.rank) edge.left -= std::min(edge.left, measure(i));
            at_.ids[kept] = at_.ids[i];
            at_.scores[kept] = at_.scores[i];
            at_.weights[kept++] = at_.weights[i];
        }
        kept_ = kept;
    }

    const Passes& passes_;
    const int64_t vocab_;
    const kvr_sampling& params_;
    const Scratch at_;
    const float* logits_;
    Scale scale_{};
    uint64_t least_ = 0;
    int64_t kept_ = 0;
};

const Passes& passes() {
#if defined(__x86_64__)
    if (&kernels() == &kernels_avx512) return avx512_passes;
    if (&kernels() == &kernels_avx2) return avx2_passes;
#endif
    return portable_passes;
}

}  // namespace
}  // namespace sampling

int64_t sample_scratch_bytes(int64_t vocab) { return sampling::Scratch::bytes(vocab); }

int sample(const float* logits, int64_t vocab, const kvr_sampling& params, uint32_t* id, void* scratch) {
    const sampling::Passes& passes = sampling::passes();
    if (params.allowed != nullptr) {
        sampling::Allowed* few = sampling::Scratch(scratch, vocab).allowed;
        if (few->collect(logits, vocab, params.allowed)) {
            // What is not allowed weighs nothing, so leaving it out changes no sum and no order.
            kvr_sampling alone = params;
            alone.allowed = nullptr;
            uint32_t chosen = 0;
            if (few->count == 0 || sampling::Row(passes, few->scores, few->count, alone, scratch).choose(&chosen)) return 1;
            *id = few->ids[chosen];
            return 0;
        }
    }
    return sampling::Row(passes, logits, vocab, params, scratch).choose(id);
}

}  // namespace kvr
