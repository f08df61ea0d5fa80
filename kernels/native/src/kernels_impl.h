// The kernels over sixteen lanes, compiled once for each instruction set. The order of every sum is the definition of
// the arithmetic (kernels/reference/int8): what may differ between instruction sets is only how lanes are held.
#pragma once

#include "attention_impl.h"
#include "elementary_impl.h"
#include "products_impl.h"

#define KVR_TABLE(isa)                                                                                              \
    const Kernels kernels_##isa = {#isa,      isa::exp_all, isa::rms_norm,  isa::quantise, isa::linear,             \
                                   isa::gate_up, isa::silu_gate, isa::rotate,  isa::scale,    isa::append,          \
                                   isa::attend_few, isa::attend_many, isa::combine}
