#include "vec_portable.h"
#include "kernels_impl.h"

namespace kvr {
KVR_TABLE(portable);
}
