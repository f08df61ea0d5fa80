// What the processor and the operating system offer of the instruction sets that the kernels are built for. Asked of
// CPUID itself: not every compiler's runtime library that __builtin_cpu_supports needs can be linked into a library.
#pragma once

#include <cpuid.h>

namespace kvr {

struct Cpu {
    bool avx2 = false;    // with FMA and F16C
    bool avx512 = false;  // with F, BW, VL, DQ and VNNI
};

inline Cpu cpu() {
    const auto has = [](unsigned word, int bit) { return (word >> bit & 1) != 0; };
    Cpu found;
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !has(c, 27)) return found;  // 27: XGETBV may be asked
    const bool fma = has(c, 12), f16c = has(c, 29);
    unsigned saved = 0, high = 0;
    __asm__ volatile("xgetbv" : "=a"(saved), "=d"(high) : "c"(0));
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return found;
    found.avx2 = (saved & 0x06) == 0x06 && fma && f16c && has(b, 5);
    const bool parts = has(b, 16) && has(b, 17) && has(b, 30) && has(b, 31) && has(c, 11);
    found.avx512 = found.avx2 && (saved & 0xe6) == 0xe6 && parts;
    return found;
}

}  // namespace kvr
