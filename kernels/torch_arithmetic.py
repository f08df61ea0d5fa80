"""Arithmetic by a library's products, which a machine has to prove exact (`kernels.exactness`)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kernels.arithmetic import Embedding, Weight
from kernels.linear import Linear, LinearRecipe
from kernels.page_form import PageForm
from kernels.paging import PassPlan, PoolGeometry, SpanLike, plan_pass, scrub_tails
from kernels.quantise import LEVELS, round_trip
from kernels.quantised_weight import QuantisedWeight
from kernels.reference.attention import attend, write_kv
from kernels.reference.gate import silu_gate
from kernels.reference.norm import head_norm_, rms_norm


@dataclass(frozen=True)
class TorchArithmetic:
    """Weights, K and V are rounded to `dtype`; everything between is float32, unless the recipe multiplies in `dtype`.

    With a `quantisation` other than "none", K and V are rounded to what the store will keep of them. The id is a digest
    of the recipe, the instruction set, torch's version and of what the operations gave for fixed inputs.
    """

    name: str
    id: bytes
    dtype: torch.dtype
    layer_recipe: LinearRecipe
    head_recipe: LinearRecipe
    quantisation: str = "none"

    takes_blocks = False

    @property
    def kind(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def unquantised(self) -> "TorchArithmetic":
        return replace(self, quantisation="none")

    def page_form(self, layers: int, kv_heads: int, page_tokens: int, head_dim: int) -> PageForm:
        return PageForm(layers, kv_heads, page_tokens, head_dim, self.dtype)

    def embedding(self, weight: Weight) -> Embedding:
        rounded = _values(weight).to(self.dtype)
        return lambda ids: rounded[ids].float()

    def linear(self, weights: Sequence[Weight], bias: Tensor | None = None) -> Linear:
        """Weights and bias are rounded to `dtype`."""
        values = [_values(weight).to(self.dtype) for weight in weights]
        return self.layer_recipe.pack(torch.cat(values), None if bias is None else bias.to(self.dtype))

    def head(self, weight: Weight) -> Linear:
        """A bfloat16 output would tie at 5.7 % of positions."""
        return self.head_recipe.pack(_values(weight).to(self.dtype).float())

    def norm(self, weight: Tensor) -> Tensor:
        return weight.to(self.dtype).float()

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(x, weight, eps)

    def head_norm_(self, x: Tensor, weight: Tensor, eps: float) -> None:
        head_norm_(x, weight, eps)

    def silu_gate(self, gate_up: Tensor) -> Tensor:
        return silu_gate(gate_up)

    def as_stored(self, kv: Tensor) -> Tensor:
        """`kv: [..., D] float32`, which may be overwritten -> as pages hold it, `[..., D]` of `dtype`."""
        if self.quantisation == "none":
            return kv.to(self.dtype)
        return round_trip(kv, LEVELS[self.quantisation], self.dtype)

    def begin(self, spans: Sequence[SpanLike], pool: Tensor, form: PageForm, heads: int) -> "TorchPass":
        geometry = PoolGeometry(form.layers, form.kv_heads, form.page_tokens, form.head_dim, heads)
        scrub_tails(spans, pool)
        return TorchPass(self, pool, plan_pass(spans, geometry))


@dataclass(frozen=True)
class TorchPass:
    arithmetic: TorchArithmetic
    pool: Tensor
    plan: PassPlan

    @property
    def positions(self) -> Tensor:
        return self.plan.positions

    def write_kv(self, layer: int, kv: Tensor) -> None:
        write_kv(self.pool, layer, self.arithmetic.as_stored(kv), self.plan)

    def attend(self, layer: int, queries: Tensor) -> Tensor:
        return attend(self.pool, layer, queries, self.plan)


def _values(weight: Weight) -> Tensor:
    return weight.dequantise() if isinstance(weight, QuantisedWeight) else weight
