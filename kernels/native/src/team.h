// The threads of one model: the caller and its helpers run the same function, phase after phase.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace kvr {

/// Returns when `*flag` is not 0, and sees what was written before it was set.
void wait_for(const int32_t* flag);

/// Threads that meet here go on together. Spins, for phases take microseconds; yields when that does not help, for a
/// thread whose core was taken away must get it back.
class Barrier {
  public:
    /// Returns when `count` threads have come; all of them say the same count. How long that took beyond the time that
    /// a phase may take, in ns: a thread was late by so much.
    int64_t wait(int32_t count);

  private:
    alignas(64) std::atomic<int32_t> waiting_{0};
    alignas(64) std::atomic<uint32_t> round_{0};
};

/// Work of one phase, taken piece by piece by whoever is free.
class Pieces {
  public:
    void reset() { next_.store(0, std::memory_order_relaxed); }
    /// The first of the next `size` pieces.
    int64_t take(int64_t size) { return next_.fetch_add(size, std::memory_order_relaxed); }

  private:
    alignas(64) std::atomic<int64_t> next_{0};
};

class Team {
  public:
    using Work = void (*)(void* context, int32_t thread, int32_t threads);

    /// Threads from number `own` on run on the cores `lent`, the others where the process does.
    Team(int32_t threads, int32_t own, const std::vector<int32_t>& lent);
    ~Team();
    Team(const Team&) = delete;

    int32_t size() const { return static_cast<int32_t>(helpers_.size()) + 1; }
    /// Runs `work` on the caller and on `threads` - 1 helpers; returns when all have.
    void run(Work work, void* context, int32_t threads);

  private:
    void help(int32_t thread, const std::vector<int32_t>& cores);

    std::vector<std::thread> helpers_;
    std::mutex mutex_;
    std::condition_variable called_;
    std::atomic<uint64_t> round_{0};
    std::atomic<int32_t> running_{0};
    Work work_ = nullptr;
    void* context_ = nullptr;
    int32_t threads_ = 1;
    bool closing_ = false;
};

}  // namespace kvr
