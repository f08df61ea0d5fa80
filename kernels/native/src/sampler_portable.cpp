#define KVR_PASSES portable_passes
#include "sampler_passes_impl.h"
