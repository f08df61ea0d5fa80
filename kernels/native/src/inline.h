// For functions in headers that files of several instruction sets include.
#pragma once

/// Never a function by itself: of those the linker keeps one copy, perhaps one that this processor cannot run.
#define KVR_INLINE inline __attribute__((always_inline))
