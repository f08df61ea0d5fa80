"""Linear products whose rows do not depend on the rows beside them, one class a recipe.

Why more than one: a matrix library picks its kernel, and with it the order of a row's additions, by the number of
rows and by the instruction set. `kernels.exactness` finds out which recipe is exact on this machine.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

Linear = Callable[[Tensor], Tensor]
"""`x: [R, K] float32 -> [R, N] float32`. Any number of rows, also none."""

# oneDNN lays a packed weight out for a number of rows it is told to expect; the bits are the same for any, see 0001.
EXPECTED_ROWS = 8


class LinearRecipe(Protocol):
    """How weights are kept and multiplied. `name` goes into the arithmetic id; factors are rounded to `dtype`."""

    name: str
    dtype: torch.dtype

    def pack(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """The product with `weight: [N, K]`, kept in the recipe's own layout, plus `bias: [N]`."""
        ...


class PackedFloat32:
    """float32 through oneDNN with the weight laid out once, fewer than `min_rows` rows padded to so many.

    With AVX2 every number of rows is exact where measured, with AVX-512 all but a lone row of a long sum (0001).
    """

    dtype = torch.float32

    def __init__(self, min_rows: int = 1) -> None:
        self.name = "packed-f32" if min_rows == 1 else f"packed-f32-min{min_rows}"
        self._min_rows = min_rows

    def pack(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        # The op is torch's own (inductor uses it for frozen weights) but has no public name.
        product: Any = torch.ops.mkldnn._linear_pointwise
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.float().contiguous(), EXPECTED_ROWS)
        bias = None if bias is None else bias.float().contiguous()

        def linear(x: Tensor) -> Tensor:
            rows = x.shape[0]
            y: Tensor = product(pad_rows(x, few_counts(max(rows, self._min_rows))), packed, bias, "none", [], "")
            return y[:rows]

        return linear


class PaddedFloat32:
    """float32 `linear` with the rows padded to a multiple of 8: exact with MKL on AVX2, not on AVX-512."""

    name = "padded-f32"
    dtype = torch.float32

    def pack(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        weight = weight.float().contiguous()
        bias = None if bias is None else bias.float().contiguous()

        def linear(x: Tensor) -> Tensor:
            rows = x.shape[0]
            return functional.linear(pad_rows(x, -(-rows // 8) * 8), weight, bias)[:rows]

        return linear


class NativeBfloat16:
    """bfloat16 `linear`, a lone row padded to two: fast where the machine has tiles for it."""

    name = "native-bf16"
    dtype = torch.bfloat16

    def pack(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        weight = weight.bfloat16().contiguous()
        bias = None if bias is None else bias.bfloat16().contiguous()

        def linear(x: Tensor) -> Tensor:
            rows = x.shape[0]
            return functional.linear(pad_rows(x.bfloat16(), few_counts(max(rows, 2))), weight, bias)[:rows].float()

        return linear


def few_counts(rows: int) -> int:
    """At least `rows`: one of 50 counts up to 1,024, each of those up to 16.

    For each count that it has not seen oneDNN compiles a kernel, 5 to 15 ms and 0.5 MB a product, and keeps up to
    1,024 of them: a worker would grow by half a gigabyte within its first hours, and so many passes would wait.
    """
    if rows <= 16:
        return rows
    step = 8 if rows <= 128 else 32 if rows <= 512 else 64
    return -(-rows // step) * step


def pad_rows(x: Tensor, rows: int) -> Tensor:
    """`x: [R, K]` with rows of zeros added up to `rows`."""
    return x if x.shape[0] == rows else functional.pad(x, (0, 0, 0, rows - x.shape[0]))
