"""Rows of activations as whole numbers, a scale for each 32 neighbours."""

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.quantised_weight import BLOCK_VALUES
from kernels.reference.int8.elementary import in_groups

LEVELS = 127
_TOO_SMALL = 2.0**-100  # what could overflow 127 / max, and nobody misses


class QuantisedRows(NamedTuple):
    """x is about `values * scales`, group by group."""

    values: Tensor
    """`[R, K] int8`, -127 to 127."""
    scales: Tensor
    """`[R, G] float32`: NaN where the group holds NaN or infinity (then its values are 0), 0 where it is too small."""
    sums: Tensor
    """`[R, G] float32`: the scale times the sum of the group's values."""


def quantise(x: Tensor) -> QuantisedRows:
    """`x: [R, K] float32`, K a multiple of 32."""
    groups = in_groups(x, BLOCK_VALUES)
    largest = groups.abs().amax(-1)
    bad, small = ~largest.isfinite(), largest < _TOO_SMALL
    ordinary = torch.where(bad | small, 1.0, largest)
    scales = torch.where(bad, torch.nan, torch.where(small, 0.0, ordinary / LEVELS))
    # Not `LEVELS / ordinary`: torch makes that a reciprocal and a product, two roundings.
    inverse = torch.full_like(ordinary, LEVELS).div_(ordinary)
    rounded = torch.round(groups * inverse[..., None]).clamp_(-LEVELS, LEVELS)
    whole = torch.where((bad | small)[..., None], 0.0, rounded)
    return QuantisedRows(whole.to(torch.int8).flatten(-2), scales, scales * whole.sum(-1))
