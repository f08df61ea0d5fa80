// Memory that is taken once, aligned to cache lines, and asked to lie in huge pages where it is large.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "inline.h"

namespace kvr {

template <typename T>
class Block {
  public:
    Block() = default;
    Block(const Block&) = delete;
    Block& operator=(const Block&) = delete;
    Block(Block&& other) noexcept { swap(other); }
    Block& operator=(Block&& other) noexcept {
        swap(other);
        return *this;
    }
    ~Block() { std::free(data_); }

    /// At least `count` items, zeroed if they are new; what was there is lost when it grows. False: out of memory.
    bool reserve(int64_t count) {
        if (count <= count_) return true;
        std::free(std::exchange(data_, nullptr));
        count_ = 0;
        const size_t huge = size_t{1} << 21, bytes = static_cast<size_t>(count) * sizeof(T);
        const size_t align = bytes >= huge ? huge : 64;
        void* fresh = std::aligned_alloc(align, (bytes + align - 1) / align * align);
        if (fresh == nullptr) return false;
        if (bytes >= huge) madvise(fresh, (bytes + align - 1) / align * align, MADV_HUGEPAGE);
        std::memset(fresh, 0, bytes);
        data_ = static_cast<T*>(fresh);
        count_ = count;
        return true;
    }
    KVR_INLINE T* get() const { return data_; }
    KVR_INLINE T& operator[](int64_t i) const { return data_[i]; }
    KVR_INLINE explicit operator bool() const { return data_ != nullptr; }
    KVR_INLINE int64_t size() const { return count_; }

  private:
    void swap(Block& other) {
        std::swap(data_, other.data_);
        std::swap(count_, other.count_);
    }
    T* data_ = nullptr;
    int64_t count_ = 0;
};

}  // namespace kvr
