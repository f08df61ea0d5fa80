"""Rotary positions (Su et al., 2021) in the half-split layout of Hugging Face checkpoints."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class RopeScaling:
    """Scaling that leaves a position's rotation a function of the position alone, so that KV can be cut anywhere."""

    kind: str = "default"  # "default" | "linear" | "llama3"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192


def inverse_frequencies(head_dim: int, theta: float, scaling: RopeScaling) -> Tensor:
    """`[D / 2] float32`, by the steps that `transformers` takes (modeling_rope_utils)."""
    inv_freq = 1.0 / (theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim))
    if scaling.kind == "linear":
        return inv_freq / scaling.factor
    if scaling.kind == "llama3":
        return _llama3(inv_freq, scaling)
    return inv_freq


def _llama3(inv_freq: Tensor, scaling: RopeScaling) -> Tensor:
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    wavelen = 2 * math.pi / inv_freq
    smooth = (scaling.original_context / wavelen - low) / (high - low)
    smoothed = (1 - smooth) * inv_freq / scaling.factor + smooth * inv_freq
    scaled = torch.where(wavelen > scaling.original_context / low, inv_freq / scaling.factor, inv_freq)
    medium = (wavelen >= scaling.original_context / high) & (wavelen <= scaling.original_context / low)
    return torch.where(medium, smoothed, scaled)


class RopeTable:
    """Cosines and signed sines of every position, `[context, D] float32` each."""

    def __init__(self, head_dim: int, context: int, theta: float, scaling: RopeScaling) -> None:
        positions = torch.arange(context).float()
        angles = (positions[:, None] * inverse_frequencies(head_dim, theta, scaling)).numpy().astype(np.float64)
        # numpy, in float64: one thread and one rounding, so that the table cannot depend on the thread count.
        cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        self.cos = torch.from_numpy(np.concatenate([cos, cos], axis=1))
        self.sin = torch.from_numpy(np.concatenate([-sin, sin], axis=1))

    def rows(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines for `positions: [R]`, each `[R, 1, D]`."""
        return self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)


def rotate_(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotates `x: [R, heads, D] float32` in place; `cos`, `sin` from `RopeTable.rows`."""
    half = x.shape[2] // 2
    turned = x.roll(half, dims=2).mul_(sin)
    x.mul_(cos).add_(turned)  # not addcmul: a fused multiply-add would round vector and scalar elements differently
