#include "team.h"

#include <pthread.h>
#include <sched.h>

#include <chrono>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kvr {

namespace {

constexpr int kSpins = 4000;  // some 100 us: longer than any phase of a step that runs undisturbed

void pause_briefly() {
#if defined(__x86_64__)
    _mm_pause();
#else
    std::this_thread::yield();
#endif
}

/// How long it took beyond the spins, in ns.
template <typename Ready>
int64_t wait_until(Ready ready) {
    for (int i = 0; i < kSpins; ++i) {
        if (ready()) return 0;
        pause_briefly();
    }
    const auto began = std::chrono::steady_clock::now();
    while (!ready()) std::this_thread::yield();
    return std::chrono::nanoseconds(std::chrono::steady_clock::now() - began).count();
}

void stay_on(const std::vector<int32_t>& cores) {
#if defined(__linux__)
    if (cores.empty()) return;
    cpu_set_t set;
    CPU_ZERO(&set);
    for (const int32_t core : cores) CPU_SET(static_cast<size_t>(core), &set);
    pthread_setaffinity_np(pthread_self(), sizeof set, &set);
#else
    (void)cores;
#endif
}

}  // namespace

void wait_for(const int32_t* flag) {
    wait_until([&] { return __atomic_load_n(flag, __ATOMIC_ACQUIRE) != 0; });
}

int64_t Barrier::wait(int32_t count) {
    if (count == 1) return 0;
    const uint32_t round = round_.load(std::memory_order_acquire);
    if (waiting_.fetch_add(1, std::memory_order_acq_rel) + 1 == count) {
        waiting_.store(0, std::memory_order_relaxed);
        round_.store(round + 1, std::memory_order_release);
        return 0;
    }
    return wait_until([&] { return round_.load(std::memory_order_acquire) != round; });
}

Team::Team(int32_t threads, int32_t own, const std::vector<int32_t>& lent) {
    for (int32_t i = 1; i < threads; ++i)
        helpers_.emplace_back(&Team::help, this, i, i < own ? std::vector<int32_t>{} : lent);
}

Team::~Team() {
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        closing_ = true;
    }
    called_.notify_all();
    for (std::thread& helper : helpers_) helper.join();
}

void Team::run(Work work, void* context, int32_t threads) {
    threads = threads < 1 ? 1 : threads > size() ? size() : threads;
    if (threads > 1) {
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            work_ = work;
            context_ = context;
            threads_ = threads;
            running_.store(threads - 1, std::memory_order_relaxed);
            round_.fetch_add(1, std::memory_order_release);
        }
        called_.notify_all();
    }
    work(context, 0, threads);
    if (threads > 1) wait_until([&] { return running_.load(std::memory_order_acquire) == 0; });
}

void Team::help(int32_t thread, const std::vector<int32_t>& cores) {
    stay_on(cores);
    uint64_t seen = 0;
    for (;;) {
        Work work;
        void* context;
        int32_t threads;
        {
            std::unique_lock<std::mutex> lock(mutex_);
            called_.wait(lock, [&] { return closing_ || round_.load(std::memory_order_relaxed) != seen; });
            if (closing_) return;
            seen = round_.load(std::memory_order_relaxed);
            work = work_;
            context = context_;
            threads = threads_;
        }
        if (thread >= threads) continue;
        work(context, thread, threads);
        running_.fetch_sub(1, std::memory_order_release);
    }
}

}  // namespace kvr
