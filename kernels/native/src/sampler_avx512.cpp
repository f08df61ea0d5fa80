#define KVR_PASSES avx512_passes
#include "sampler_passes_impl.h"
