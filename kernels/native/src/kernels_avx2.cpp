#if defined(__x86_64__)
#include "vec_avx2.h"
#include "kernels_impl.h"

namespace kvr {
KVR_TABLE(avx2);
}
#endif
