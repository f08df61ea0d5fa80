"""One arithmetic: the floating-point operations, in their order, by which a token's K, V and logits are made."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.linear import Linear, LinearRecipe
from kernels.quantise import LEVELS, round_trip


@dataclass(frozen=True)
class Shapes:
    """What of a model its arithmetic depends on: `linears` and `head` are (outputs N, inputs K) of each product."""

    linears: tuple[tuple[int, int], ...]
    head: tuple[int, int]
    heads: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class Arithmetic:
    """Weights, K and V are rounded to `dtype`; everything between is float32, unless the recipe multiplies in `dtype`.

    With a `quantisation` other than "none", K and V are rounded to what the store will keep of them.

    `id` tells arithmetics apart that differ in bits: it is a digest of the recipe, the instruction set and of what
    the operations gave for fixed inputs, so that equal ids on two machines mean equal bits.
    """

    name: str
    id: bytes
    dtype: torch.dtype
    layer_recipe: LinearRecipe
    head_recipe: LinearRecipe
    quantisation: str = "none"

    @property
    def kv_dtype(self) -> torch.dtype:
        return self.dtype

    def as_stored(self, kv: Tensor) -> Tensor:
        """`kv: [..., D] float32`, which may be overwritten -> as pages hold it, `[..., D]` of `kv_dtype`."""
        if self.quantisation == "none":
            return kv.to(self.kv_dtype)
        return round_trip(kv, LEVELS[self.quantisation], self.kv_dtype)

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """The product with `weight: [N, K]` (and `bias: [N]`) rounded to `dtype`."""
        return self.layer_recipe.pack(weight.to(self.dtype), None if bias is None else bias.to(self.dtype))

    def head(self, weight: Tensor) -> Linear:
        """The product with the head's `weight: [V, K]`: a bfloat16 output would tie at 5.7 % of positions."""
        return self.head_recipe.pack(weight.to(self.dtype).float())
