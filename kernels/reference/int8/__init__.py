"""The arithmetic "int8": int8 activations in groups of 32 times 4- or 8-bit weights, the rest in float32.

The definition. Whole numbers are summed exactly, in any order; everything that rounds is written out as single float32
operations in a fixed order, `fma` being one with a single rounding. So the bits of a result depend on nothing but its
inputs: not on the instruction set, the library or its version, the rows beside it or the threads. `kernels.native.ops`
has the same functions with the same arguments, in C++, and must give the same bits (any NaN being equal to any other).

    fma(a, b, c)                                        float32, broadcast
    tree16(v)                                           [..., 16] -> [...]
    exp(x)                                              float32 -> float32
    rms_norm(x, weight, eps)                            [R, K], [K] -> [R, K]; K % 16 == 0
    silu_gate(gate_up)                                  [R, 2 * I], gate first -> [R, I]
    quantise(x)                                         [R, K] -> QuantisedRows; K % 32 == 0
    linear(x, weight, bias=None)                        [R, K], QuantisedWeight [N, K], [N] -> [R, N]
    embedding_rows(weight, ids)                         QuantisedWeight [V, K], [R] int64 -> [R, K]
    write_kv(pool, layer, kv, spans, form)              kv [R, 2 * H, D], K heads then V heads
    attend(pool, layer, queries, spans, form)           [R, heads, D] -> [R, heads * D]

`spans` are `kernels.paging.SpanLike` (start, rows, pages), their rows one after the other. `pool` and `form` are those
of `kernels.page_form.PageForm`: pages of bfloat16, or quantised as they will be stored. Rotation is
`kernels.reference.rope.rotate_`; a residual is one addition.
"""

from kernels.reference.int8.activations import QuantisedRows, quantise
from kernels.reference.int8.attention import attend, write_kv
from kernels.reference.int8.elementary import exp, fma, tree16
from kernels.reference.int8.gate import silu_gate
from kernels.reference.int8.linear import embedding_rows, linear, product
from kernels.reference.int8.norm import rms_norm

__all__ = [
    "QuantisedRows",
    "attend",
    "embedding_rows",
    "exp",
    "fma",
    "linear",
    "product",
    "quantise",
    "rms_norm",
    "silu_gate",
    "tree16",
    "write_kv",
]
