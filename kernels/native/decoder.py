"""A decoder in C++: weights laid out once, then one call for all rows of a pass.

The call is the three states of the step, fetch, compute and store, for the whole batch. It releases the GIL, takes no
memory once it has seen its largest pass, and gives the same bits with any number of threads.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.native.library import ffi, load
from kernels.page_form import PageForm
from kernels.paging import SpanLike
from kernels.quantised_weight import QuantisedWeight

FORMATS = {"Q4_0": 0, "Q4_1": 1, "Q8_0": 2}
KV_FORMATS = {"none": 0, "int8": 1, "int4": 2}
TILE = 16
"""Outputs that are computed together: all parts of a product but the last one are a multiple of this."""

MAX_HEAD_DIM = 256


class DecoderShape(NamedTuple):
    """`inner`: of the MLP; `positions`: how many the rotary table has."""

    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    positions: int
    norm_eps: float
    quantisation: str = "none"

    def refusal(self) -> str | None:
        """What the kernels cannot do with these sizes; None: nothing."""
        for name, size, multiple in (
            ("hidden", self.hidden, 32),
            ("inner", self.inner, 32),
            ("heads * head_dim", self.heads * self.head_dim, 32),
            ("head_dim", self.head_dim, 16),
        ):
            if size % multiple:
                return f"{name} {size} is no multiple of {multiple}"
        return None if self.head_dim <= MAX_HEAD_DIM else f"head_dim {self.head_dim} is above {MAX_HEAD_DIM}"


class NativeLinear:
    """One product: the rows of `parts` one after the other, plus `bias: [N] float32`. Raises `MemoryError`."""

    def __init__(self, parts: Sequence[QuantisedWeight], bias: Tensor | None = None) -> None:
        library = load()
        self.outputs, self.inputs = sum(part.outputs for part in parts), parts[0].inputs
        if any(part.inputs != self.inputs for part in parts) or any(part.outputs % TILE for part in parts[:-1]):
            raise ValueError(f"parts of {[(part.outputs, part.inputs) for part in parts]} make no product")
        self.pointer = ffi.gc(library.kvr_linear_new(self.outputs, self.inputs), library.kvr_linear_free)
        for part in parts:
            self._append(part)
        if bias is not None:
            kept = bias.float().contiguous()
            assert kept.shape == (self.outputs,)
            _check(library.kvr_linear_bias(self.pointer, floats(kept)))

    @property
    def num_bytes(self) -> int:
        """Of its weights in memory."""
        return int(load().kvr_linear_bytes(self.pointer))

    def packed(self, part: int = 0) -> Any:
        """The first byte of a part's weights, for tests that damage one."""
        return load().kvr_linear_quants(self.pointer, part)

    def _append(self, part: QuantisedWeight) -> None:
        order = None if part.row_order is None else part.row_order.to(torch.int64).contiguous()
        blocks = ffi.cast("const uint8_t *", part.blocks.data_ptr())
        rows = ffi.NULL if order is None else ffi.cast("const int64_t *", order.data_ptr())
        code = load().kvr_linear_append(self.pointer, FORMATS[part.format], blocks, rows, part.outputs)
        _check(code)


@dataclass(frozen=True)
class DecoderLayer:
    """Norms are float32 of [hidden], those of Q and K of [head_dim]."""

    attention_norm: Tensor
    mlp_norm: Tensor
    qkv: NativeLinear
    out: NativeLinear
    gate_up: NativeLinear
    down: NativeLinear
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None


class Decoder:
    """Not thread-safe: one pass at a time. `cores[i]`: where helper thread i + 1 stays."""

    def __init__(
        self,
        shape: DecoderShape,
        layers: Sequence[DecoderLayer],
        *,
        embedding: NativeLinear,
        norm: Tensor,
        head: NativeLinear,
        cos: Tensor,
        sin: Tensor,
        threads: int = 1,
        cores: Sequence[int] = (),
    ) -> None:
        """`cos`, `sin`: [positions, head_dim] float32, the sines signed. Raises `ValueError` and `MemoryError`."""
        if reason := shape.refusal():
            raise ValueError(reason)
        library = load()
        self.shape = shape
        self.threads = threads
        self._kept: list[Any] = [layers, embedding, norm, head, cos, sin]  # what the model points to
        pinned = ffi.new("int32_t[]", list(cores)) if len(cores) >= threads - 1 and cores else ffi.NULL
        made = library.kvr_model_new(ffi.new("kvr_shape *", _shape(shape)), threads, pinned)
        if made == ffi.NULL:
            raise MemoryError("no memory for a model")
        self._model = ffi.gc(made, library.kvr_model_free)
        for number, layer in enumerate(layers):
            norms = [floats(t) for t in (layer.attention_norm, layer.mlp_norm, layer.q_norm, layer.k_norm)]
            products = [product.pointer for product in (layer.qkv, layer.out, layer.gate_up, layer.down)]
            _check(library.kvr_model_layer(self._model, number, *norms, *products))
        ends = (embedding.pointer, floats(norm), head.pointer, floats(cos), floats(sin))
        library.kvr_model_ends(self._model, *ends)

    def logits(
        self,
        token_ids: Tensor,
        spans: Sequence[SpanLike],
        pool: Tensor,
        page_tokens: int,
        logit_rows: Tensor,
        threads: int | None = None,
    ) -> Tensor:
        """`token_ids: [R]`, the spans' rows one after the other -> `[len(logit_rows), V] float32`.

        Writes K and V of the rows to `pool`, whose pages are `PageForm`'s. The caller has checked all sizes.
        """
        call = Call(token_ids, spans, pool, page_tokens, logit_rows, threads or self.threads)
        logits = torch.empty(len(logit_rows), self.shape.vocab)
        call.fields.logits = floats(logits)
        self.run(call)
        return logits

    def run(self, call: "Call") -> None:
        """Raises `MemoryError`; then nothing was computed."""
        _check(load().kvr_model_run(self._model, call.fields))


class Call:
    """The arguments of one pass, in memory that C++ can read. `fields` is the `kvr_pass`."""

    def __init__(
        self,
        token_ids: Tensor,
        spans: Sequence[SpanLike],
        pool: Tensor,
        page_tokens: int,
        logit_rows: Tensor,
        threads: int,
    ) -> None:
        table = np.array([(span.start, span.rows, len(span.pages)) for span in spans], dtype=np.int32).reshape(-1, 3).T
        starts, rows, counts = np.ascontiguousarray(table)
        offsets = (np.cumsum(counts) - counts).astype(np.int32)
        pages = np.fromiter((page for span in spans for page in span.pages), dtype=np.int32)
        ids = token_ids.to(torch.int32).numpy()
        wanted = logit_rows.to(torch.int32).numpy()
        self._kept = [starts, rows, offsets, pages, ids, wanted, pool]
        self.fields = fields = ffi.new("kvr_pass *")
        fields.rows, fields.spans, fields.num_logits = len(ids), len(spans), len(wanted)
        fields.threads, fields.page_tokens = threads, page_tokens
        fields.token_ids, fields.span_start, fields.span_rows = ints(ids), ints(starts), ints(rows)
        fields.span_pages, fields.pages, fields.logit_rows = ints(offsets), ints(pages), ints(wanted)
        fields.pool = ffi.cast("uint8_t *", pool.data_ptr())


def attend(
    pool: Tensor, layer: int, queries: Tensor, spans: Sequence[SpanLike], form: PageForm, threads: int = 1
) -> Tensor:
    """Attention alone: `kernels.reference.int8.attend`."""
    rows, heads, dim = queries.shape
    shape = DecoderShape(form.layers, 32, 32, heads, form.kv_heads, dim, 16, 1, 0.0, form.quantisation)
    call = Call(torch.zeros(rows, dtype=torch.int32), spans, pool, form.page_tokens, torch.zeros(0), threads)
    queries = queries.contiguous()
    out = torch.empty(rows, heads * dim)
    c_shape = ffi.new("kvr_shape *", _shape(shape))
    _check(load().kvr_attend(c_shape, call.fields, layer, floats(queries), floats(out)))
    return out


def floats(tensor: Tensor | None) -> Any:
    if tensor is None:
        return ffi.NULL
    assert tensor.dtype == torch.float32 and tensor.is_contiguous()
    return ffi.cast("float *", tensor.data_ptr())


def ints(array: npt.NDArray[np.int32]) -> Any:
    assert array.dtype == np.int32
    return ffi.cast("const int32_t *", array.ctypes.data)


def _shape(shape: DecoderShape) -> dict[str, Any]:
    fields = shape._asdict()
    return fields | {"kv_format": KV_FORMATS[fields.pop("quantisation")]}


def _check(code: int) -> None:
    if code:
        raise MemoryError("no memory for the kernels")
