"""Products with 4- and 8-bit weights: exact within a group of 32, one or two fused additions a group."""

import torch
from torch import Tensor

from kernels.linear import Linear
from kernels.quantised_weight import BLOCK_VALUES, QuantisedWeight
from kernels.reference.int8.activations import quantise
from kernels.reference.int8.elementary import fma

_SUMS_AT_ONCE = 1 << 16
"""Sums of one piece of a product. Changes no bits."""


def linear(x: Tensor, weight: QuantisedWeight, bias: Tensor | None = None) -> Tensor:
    """`x: [R, K] float32`, `weight: [N, K]`, `bias: [N] float32` -> `[R, N] float32`."""
    return product(weight, bias)(x)


def product(weight: QuantisedWeight, bias: Tensor | None = None) -> Linear:
    """`linear` of a weight that is taken apart once: a byte a value."""
    values = weight.whole().transpose(0, 1).contiguous()  # [G, N, 32]
    scales = weight.scales().T.contiguous()
    minima = weight.minima()
    minima = None if minima is None else minima.T.contiguous()

    def apply(x: Tensor) -> Tensor:
        return torch.cat([_outputs(x, part) for part in _parts(x.shape[0])], dim=1)

    def _parts(rows: int) -> list[slice]:
        step = max(64, _SUMS_AT_ONCE // max(1, rows))
        return [slice(begin, begin + step) for begin in range(0, weight.outputs, step)]

    def _outputs(x: Tensor, part: slice) -> Tensor:
        rows = quantise(x)
        grouped = rows.values.view(x.shape[0], weight.num_blocks, BLOCK_VALUES).float().transpose(0, 1)  # [G, R, 32]
        total = torch.zeros(x.shape[0], scales[0, part].shape[0])
        for group in range(weight.num_blocks):
            # Whole numbers below 2^24: exact in float32, whatever the order of additions.
            whole = grouped[group] @ values[group, part].float().T
            total = fma(whole, rows.scales[:, group, None] * scales[group, part], total)
            if minima is not None:
                total = fma(minima[group, part], rows.sums[:, group, None], total)
        return total if bias is None else total + bias[part]

    return apply


def embedding_rows(weight: QuantisedWeight, ids: Tensor) -> Tensor:
    """Rows `ids: [R] int64` of `weight: [V, K]`, `[R, K] float32`."""
    return weight.rows(ids).dequantise()
