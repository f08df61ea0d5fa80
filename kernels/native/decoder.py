"""A decoder in C++: weights laid out once, then one call for all rows of a pass.

The call is the three states of the step, fetch, compute and store, for the whole batch. It releases the GIL, takes no
memory once it has seen its largest pass, and gives the same bits with any number of threads.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.native.crowd import Crowd
from kernels.native.gate import DrawGate
from kernels.native.library import ffi, load
from kernels.native.sampler import fill
from kernels.page_form import PageForm
from kernels.paging import SpanLike
from kernels.quantised_weight import QuantisedWeight
from kernels.reference.sampling import Draw

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


class Lease(Protocol):
    """Threads for one pass; `revoked`: address of an int32 that is not 0 once the lent ones are wanted back."""

    @property
    def own(self) -> int: ...
    @property
    def lent(self) -> int: ...
    @property
    def revoked(self) -> int: ...


class Decoder:
    """Not thread-safe: one pass at a time. `threads` of its own, and one more for each core that may be `lent`."""

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
        lent: Sequence[int] = (),
    ) -> None:
        """`cos`, `sin`: [positions, head_dim] float32, the sines signed. Raises `ValueError` and `MemoryError`."""
        if reason := shape.refusal():
            raise ValueError(reason)
        library = load()
        self.shape = shape
        self.threads = threads
        self._crowd = Crowd()
        self._kept: list[Any] = [layers, embedding, norm, head, cos, sin]  # what the model points to
        total, cores = threads + len(lent), ffi.new("int32_t[]", list(lent))
        made = library.kvr_model_new(ffi.new("kvr_shape *", _shape(shape)), total, threads, cores, len(lent))
        if made == ffi.NULL:
            raise MemoryError("no memory for a model")
        self._model = ffi.gc(made, library.kvr_model_free)
        for number, layer in enumerate(layers):
            norms = [floats(t) for t in (layer.attention_norm, layer.mlp_norm, layer.q_norm, layer.k_norm)]
            products = [product.pointer for product in (layer.qkv, layer.out, layer.gate_up, layer.down)]
            _check(library.kvr_model_layer(self._model, number, *norms, *products))
        ends = (embedding.pointer, floats(norm), head.pointer, floats(cos), floats(sin))
        library.kvr_model_ends(self._model, *ends)

    def run(self, call: "Call", lease: Lease | None = None) -> None:
        """With its own threads, or those of `lease`, or alone where they would only wait for one another.

        Raises `MemoryError`; then nothing was computed.
        """
        fields = call.fields
        wanted = lease.own + lease.lent if lease else self.threads
        began_s = time.monotonic()
        fields.threads = self._crowd.threads(wanted, began_s)
        fields.own_threads = lease.own if lease else self.threads
        if lease:
            fields.revoked = ffi.cast("const int32_t *", lease.revoked)
        library = load()
        _check(library.kvr_model_run(self._model, fields))
        if fields.threads > 1:
            ended_s = time.monotonic()
            self._crowd.note(ended_s - began_s, library.kvr_model_waited_ns(self._model) / 1e9, ended_s)


class Call:
    """The arguments of one pass, in memory that C++ can read. `fields` is the `kvr_pass`.

    K and V of the rows go to `pool`, whose pages are `PageForm`'s. `logit_rows` ascend. Whoever makes a call has
    checked all sizes: C++ checks none.
    """

    def __init__(
        self,
        token_ids: Sequence[int] | Tensor,
        spans: Sequence[SpanLike],
        pool: Tensor,
        page_tokens: int,
        logit_rows: Sequence[int] | Tensor,
    ) -> None:
        table = np.array([(span.start, span.rows, len(span.pages)) for span in spans], dtype=np.int32).reshape(-1, 3).T
        starts, rows, counts = np.ascontiguousarray(table)
        offsets = (np.cumsum(counts) - counts).astype(np.int32)
        pages = np.fromiter((page for span in spans for page in span.pages), dtype=np.int32)
        ids, wanted = np.asarray(token_ids, dtype=np.int32), np.asarray(logit_rows, dtype=np.int32)
        self._kept: list[Any] = [starts, rows, offsets, pages, ids, wanted, pool]
        self.fields = fields = ffi.new("kvr_pass *")
        fields.rows, fields.spans, fields.num_logits, fields.page_tokens = (
            len(ids),
            len(spans),
            len(wanted),
            page_tokens,
        )
        fields.token_ids, fields.span_start, fields.span_rows = ints(ids), ints(starts), ints(rows)
        fields.span_pages, fields.pages, fields.logit_rows = ints(offsets), ints(pages), ints(wanted)
        fields.pool = ffi.cast("uint8_t *", pool.data_ptr())

    def check(self, vocab: int) -> None:
        """Raises `ValueError` for an id or a row that is none."""
        ids, wanted = self._kept[4], self._kept[5]
        if ids.min() < 0 or ids.max() >= vocab:
            raise ValueError(f"token ids from {ids.min()} to {ids.max()}, the vocabulary has {vocab}")
        if len(wanted) and (wanted.min() < 0 or wanted.max() >= len(ids)):
            raise ValueError(f"logits of rows {wanted.min()} to {wanted.max()} of {len(ids)}")

    def ask_logits(self, vocab: int) -> Tensor:
        """Where they will be: `[logit rows, V] float32`."""
        logits = torch.empty(self.fields.num_logits, vocab)
        self._kept.append(logits)
        self.fields.logits = floats(logits)
        return logits

    def ask_finite(self) -> npt.NDArray[np.bool_]:
        """Where it will be said of each row whether its K and V are numbers: `[R]`."""
        finite = np.empty(self.fields.rows, dtype=np.bool_)
        self._kept.append(finite)
        self.fields.finite = ffi.cast("uint8_t *", finite.ctypes.data)
        return finite

    def ask_draws(self, draws: Sequence[tuple[int, Draw]]) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint8]]:
        """`draws`: which of the logit rows, and how. Where ids and statuses will be (not 0: not finite)."""
        origin = np.array([index for index, _ in draws], dtype=np.int32)
        params = ffi.new("kvr_sampling[]", len(draws))
        for number, (_, draw) in enumerate(draws):
            fill(params[number], draw)
        ids, status = np.empty(len(draws), dtype=np.uint32), np.empty(len(draws), dtype=np.uint8)
        self._kept += [origin, params, ids, status, [draw.allowed for _, draw in draws]]
        fields = self.fields
        fields.num_draws, fields.draw_from, fields.draws = len(draws), ints(origin), params
        fields.sampled = ffi.cast("uint32_t *", ids.ctypes.data)
        fields.status = ffi.cast("uint8_t *", status.ctypes.data)
        return ids, status

    def draw_behind(self, gate: DrawGate) -> None:
        """What the draws allow is written until that is open."""
        self._kept.append(gate)
        self.fields.allowed_known = gate.flag


def attend(
    pool: Tensor, layer: int, queries: Tensor, spans: Sequence[SpanLike], form: PageForm, threads: int = 1
) -> Tensor:
    """Attention alone: `kernels.reference.int8.attend`."""
    rows, heads, dim = queries.shape
    shape = DecoderShape(form.layers, 32, 32, heads, form.kv_heads, dim, 16, 1, 0.0, form.quantisation)
    call = Call([0] * rows, spans, pool, form.page_tokens, [])
    call.fields.threads = threads
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
