"""The operations of `kernels.reference.int8` one by one, in C++: the same arguments, the same bits.

For tests and for who wants to look at one. A pass runs through `kernels.native.decoder`. `isa` switches the whole
process to one instruction set, see `kernels.native.library.use`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.native import decoder
from kernels.native.decoder import NativeLinear, floats
from kernels.native.library import ffi, load, use
from kernels.page_form import PageForm
from kernels.paging import SpanLike
from kernels.quantised_weight import QuantisedWeight
from kernels.reference.int8.activations import QuantisedRows


def exp(x: Tensor, isa: str | None = None) -> Tensor:
    _choose(isa)
    padded = torch.zeros(-(-x.numel() // 16) * 16)
    padded[: x.numel()] = x.flatten()
    out = torch.empty_like(padded)
    load().kvr_exp(floats(padded), floats(out), padded.numel())
    return out[: x.numel()].view(x.shape)


def rms_norm(x: Tensor, weight: Tensor, eps: float, isa: str | None = None) -> Tensor:
    _choose(isa)
    x, out = x.contiguous(), torch.empty(x.shape)
    load().kvr_rms_norm(floats(x), floats(weight.contiguous()), eps, *x.shape, floats(out))
    return out


def silu_gate(gate_up: Tensor, isa: str | None = None) -> Tensor:
    _choose(isa)
    gate_up = gate_up.contiguous()
    out = torch.empty(gate_up.shape[0], gate_up.shape[1] // 2)
    load().kvr_silu_gate(floats(gate_up), *out.shape, floats(out))
    return out


def quantise(x: Tensor, isa: str | None = None) -> QuantisedRows:
    _choose(isa)
    x = x.contiguous()
    rows, groups = x.shape[0], x.shape[1] // 32
    values = torch.empty(x.shape, dtype=torch.int8)
    scales, scaled, sums = (
        torch.empty(rows, groups),
        torch.empty(rows, groups),
        torch.empty(rows, groups, dtype=torch.int32),
    )
    whole, counts = ffi.cast("int8_t *", values.data_ptr()), ffi.cast("int32_t *", sums.data_ptr())
    load().kvr_quantise(floats(x), *x.shape, whole, floats(scales), floats(scaled), counts)
    return QuantisedRows(values, scales, scaled)


def linear(x: Tensor, weight: QuantisedWeight, bias: Tensor | None = None, isa: str | None = None) -> Tensor:
    _choose(isa)
    product, x = NativeLinear([weight], bias), x.contiguous()
    out = torch.empty(x.shape[0], product.outputs)
    load().kvr_linear_run(product.pointer, floats(x), x.shape[0], floats(out))
    return out


def embedding_rows(weight: QuantisedWeight, ids: Tensor, isa: str | None = None) -> Tensor:
    _choose(isa)
    product = NativeLinear([weight])
    out = torch.empty(len(ids), product.inputs)
    for row, token in enumerate(ids.tolist()):
        load().kvr_linear_row(product.pointer, token, floats(out[row]))
    return out


def rotate_(x: Tensor, cos: Tensor, sin: Tensor, isa: str | None = None) -> None:
    """`x: [R, heads, D]`; `cos`, `sin`: `[R, 1, D]`."""
    _choose(isa)
    assert x.is_contiguous()
    load().kvr_rotate(floats(x), *x.shape, floats(cos.contiguous()), floats(sin.contiguous()))


def write_kv(
    pool: Tensor, layer: int, kv: Tensor, spans: Sequence[SpanLike], form: PageForm, isa: str | None = None
) -> None:
    _choose(isa)
    kind, side_bytes = decoder.KV_FORMATS[form.quantisation], form.page_bytes // (2 * form.layers)
    kv = kv.contiguous().view(kv.shape[0], 2, form.kv_heads, form.head_dim)
    row = 0
    for span in spans:
        for position in range(span.start, span.start + span.rows):
            page, token = span.pages[position // form.page_tokens], position % form.page_tokens
            for which in range(2):
                at = page * form.page_bytes + (2 * layer + which) * side_bytes
                side = ffi.cast("uint8_t *", pool.data_ptr() + at)
                sizes = (form.kv_heads, form.page_tokens, form.head_dim)
                load().kvr_append(floats(kv[row, which]), kind, *sizes, side, token)
            row += 1


def attend(
    pool: Tensor,
    layer: int,
    queries: Tensor,
    spans: Sequence[SpanLike],
    form: PageForm,
    threads: int = 1,
    isa: str | None = None,
) -> Tensor:
    _choose(isa)
    return decoder.attend(pool, layer, queries, spans, form, threads)


def _choose(isa: str | None) -> None:
    if isa is not None and not use(isa):
        raise ValueError(f"this machine has no {isa}")
