"""One arithmetic: the operations, in their order, by which a token's K, V and logits are made."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from kernels.linear import Linear
from kernels.page_form import PageForm
from kernels.paging import SpanLike
from kernels.quantised_weight import QuantisedWeight

Weight = Tensor | QuantisedWeight
"""`[N, K]`, of a floating-point type or in blocks."""

Embedding = Callable[[Tensor], Tensor]
"""`ids: [R] int64 -> [R, K] float32`."""


@dataclass(frozen=True)
class Shapes:
    """What of a model its arithmetic depends on: `linears` and `head` are (outputs N, inputs K) of each product."""

    linears: tuple[tuple[int, int], ...]
    head: tuple[int, int]
    heads: int
    kv_heads: int
    head_dim: int


class Pass(Protocol):
    """The rows of some spans over a pool, whatever is the same for them in each layer worked out once."""

    @property
    def positions(self) -> Tensor:
        """`[R] int64`."""
        ...

    def write_kv(self, layer: int, kv: Tensor) -> None:
        """Stores `kv: [R, 2 * H, D] float32`, K heads then V heads, which may be overwritten."""
        ...

    def attend(self, layer: int, queries: Tensor) -> Tensor:
        """`[R, heads, D] float32` against what is stored -> `[R, heads * D] float32`."""
        ...


class Arithmetic(Protocol):
    """Tensors between the operations are float32. Each row of a result is a function of that row's own inputs.

    `id`, of 8 bytes, tells arithmetics apart that differ in bits: equal ids on two machines mean equal bits.
    `kind` is how an operator asks for it: "int8", "bfloat16", "float32".
    `quantisation` ("none", "int8", "int4") says what the store keeps of K and V, and so what is attended to.
    """

    @property
    def name(self) -> str: ...
    @property
    def id(self) -> bytes: ...
    @property
    def kind(self) -> str: ...
    @property
    def quantisation(self) -> str: ...

    def unquantised(self) -> "Arithmetic":
        """The same with K and V as they are, to compare with: only its operations mean anything."""
        ...

    @property
    def takes_blocks(self) -> bool:
        """Whether it multiplies weights in the blocks of their file; otherwise they are floating-point numbers."""
        ...

    def page_form(self, layers: int, kv_heads: int, page_tokens: int, head_dim: int) -> PageForm: ...

    def embedding(self, weight: Weight) -> Embedding: ...

    def linear(self, weights: Sequence[Weight], bias: Tensor | None = None) -> Linear:
        """The product with all `weights`, the outputs of one behind those of the other, plus `bias: [N]`."""
        ...

    def head(self, weight: Weight) -> Linear: ...

    def norm(self, weight: Tensor) -> Tensor:
        """The weight of a norm as `rms_norm` takes it."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`[R, K]`, `[K]` -> `[R, K]`."""
        ...

    def head_norm_(self, x: Tensor, weight: Tensor, eps: float) -> None:
        """The norm of each head by itself, in place: `[R, heads, D]`, `[heads, D]`."""
        ...

    def silu_gate(self, gate_up: Tensor) -> Tensor:
        """`[R, 2 * I]`, gate first -> `[R, I]`."""
        ...

    def begin(self, spans: Sequence[SpanLike], pool: Tensor, form: PageForm, heads: int) -> Pass:
        """`pool` is of `form`; what lies in the pages behind the spans' ends is overwritten or not read."""
        ...
