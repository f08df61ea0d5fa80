#define KVR_PASSES avx2_passes
#include "sampler_passes_impl.h"
