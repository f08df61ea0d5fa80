"""RMSNorm (Zhang and Sennrich, 2019)."""

import torch
from torch import Tensor

from kernels.reference.int8.elementary import fma, in_groups, tree16

LANES = 16


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x: [..., K] float32`, `weight: [K] float32` -> `[..., K] float32`; K a multiple of 16.

    Lane l of 16 sums the squares of elements l, l + 16, ...; the lanes are added as a tree.
    """
    lanes = in_groups(x, LANES)
    sums = torch.zeros_like(lanes[..., 0, :])
    for step in range(lanes.shape[-2]):
        squared = lanes[..., step, :]
        sums = fma(squared, squared, sums)
    mean = tree16(sums) / x.shape[-1]
    # Not torch's sqrt, which MKL rounds wrongly now and then. That of a float64 has bits enough to be rounded again.
    root = (mean + eps).double().sqrt().float()
    scale = 1.0 / root
    return x * scale[..., None] * weight
