"""The arithmetic "int8" by its definition, in plain torch: each rounding is written out, there is nothing to try."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from kernels.arithmetic import Embedding, Weight
from kernels.linear import Linear
from kernels.page_form import PageForm
from kernels.paging import SpanLike
from kernels.quantised_weight import QuantisedWeight
from kernels.reference import int8

NAME = "int8"
VERSION = 1
"""Of the definition in `kernels.reference.int8`: another number whenever a bit of any result changes."""


@dataclass(frozen=True)
class Int8Arithmetic:
    """Weights stay in their blocks, K and V are bfloat16 or, with a `quantisation`, what the store keeps of them.

    The id is one of the definition: instruction sets, libraries and their versions change no bits.
    """

    quantisation: str = "none"

    takes_blocks = True
    kind = NAME

    def unquantised(self) -> "Int8Arithmetic":
        return Int8Arithmetic()

    @property
    def name(self) -> str:
        return NAME if self.quantisation == "none" else f"{NAME}.{self.quantisation}"

    @property
    def id(self) -> bytes:
        return hashlib.blake2b(f"kvrelay {NAME} {VERSION} {self.quantisation}".encode(), digest_size=8).digest()

    def page_form(self, layers: int, kv_heads: int, page_tokens: int, head_dim: int) -> PageForm:
        return PageForm(layers, kv_heads, page_tokens, head_dim, torch.bfloat16, self.quantisation)

    def embedding(self, weight: Weight) -> Embedding:
        return partial(int8.embedding_rows, _blocks(weight))

    def linear(self, weights: Sequence[Weight], bias: Tensor | None = None) -> Linear:
        products, end = [], 0
        for blocks in map(_blocks, weights):
            begin, end = end, end + blocks.outputs
            products.append(int8.product(blocks, None if bias is None else bias[begin:end].float()))
        return lambda x: torch.cat([product(x) for product in products], dim=1)

    def head(self, weight: Weight) -> Linear:
        return int8.product(_blocks(weight))

    def norm(self, weight: Tensor) -> Tensor:
        return weight.float()

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return int8.rms_norm(x, weight, eps)

    def head_norm_(self, x: Tensor, weight: Tensor, eps: float) -> None:
        x.copy_(int8.rms_norm(x, weight, eps))

    def silu_gate(self, gate_up: Tensor) -> Tensor:
        return int8.silu_gate(gate_up)

    def begin(self, spans: Sequence[SpanLike], pool: Tensor, form: PageForm, heads: int) -> "Int8Pass":
        return Int8Pass(list(spans), pool, form)


@dataclass(frozen=True)
class Int8Pass:
    spans: list[SpanLike]
    pool: Tensor
    form: PageForm

    @property
    def positions(self) -> Tensor:
        return torch.cat([torch.arange(span.start, span.start + span.rows) for span in self.spans])

    def write_kv(self, layer: int, kv: Tensor) -> None:
        int8.write_kv(self.pool, layer, kv, self.spans, self.form)

    def attend(self, layer: int, queries: Tensor) -> Tensor:
        return int8.attend(self.pool, layer, queries, self.spans, self.form)


def _blocks(weight: Weight) -> QuantisedWeight:
    if isinstance(weight, QuantisedWeight):
        return weight
    raise ValueError(f"{NAME} multiplies weights in blocks, not {weight.dtype} ones")
