"""Rotary positions (Su et al., 2021) in the half-split layout of Hugging Face checkpoints."""

import math

import numpy as np
import torch
from torch import Tensor

from kernels.rope_scaling import RopeScaling


def inverse_frequencies(head_dim: int, theta: float, scaling: RopeScaling) -> Tensor:
    """`[D / 2] float32`, by the steps that `transformers` takes (modeling_rope_utils)."""
    if scaling.kind == "ntk":
        theta = theta * scaling.factor ** (head_dim / (head_dim - 2))
    wavelengths = theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)
    if scaling.kind == "factors":
        return 1.0 / (torch.tensor(scaling.factors) * wavelengths)
    if scaling.kind == "yarn":
        return _yarn(wavelengths, theta, scaling)
    inv_freq = 1.0 / wavelengths
    if scaling.kind == "linear":
        return inv_freq / scaling.factor
    return _llama3(inv_freq, scaling) if scaling.kind == "llama3" else inv_freq


def _llama3(inv_freq: Tensor, scaling: RopeScaling) -> Tensor:
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    wavelen = 2 * math.pi / inv_freq
    smooth = (scaling.original_context / wavelen - low) / (high - low)
    smoothed = (1 - smooth) * inv_freq / scaling.factor + smooth * inv_freq
    scaled = torch.where(wavelen > scaling.original_context / low, inv_freq / scaling.factor, inv_freq)
    medium = (wavelen >= scaling.original_context / high) & (wavelen <= scaling.original_context / low)
    return torch.where(medium, smoothed, scaled)


def _yarn(wavelengths: Tensor, theta: float, scaling: RopeScaling) -> Tensor:
    """Peng et al., 2023: dimensions that turn often keep their frequency, others are stretched, a ramp between."""
    dim = 2 * wavelengths.shape[0]

    def dimension_of(rotations: float) -> float:
        """The one that turns so often within the original context."""
        return dim * math.log(scaling.original_context / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension_of(scaling.beta_fast), dimension_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = (torch.arange(dim // 2).float() - low) / (high - low if high != low else 0.001)
    kept = 1 - ramp.clamp(0, 1)
    return 1.0 / (scaling.factor * wavelengths) * (1 - kept) + 1.0 / wavelengths * kept


class RopeTable:
    """Cosines and signed sines of every position, `[context, D] float32` each."""

    def __init__(self, head_dim: int, context: int, theta: float, scaling: RopeScaling) -> None:
        positions = torch.arange(context).float()
        angles = (positions[:, None] * inverse_frequencies(head_dim, theta, scaling)).numpy().astype(np.float64)
        # numpy, in float64: one thread and one rounding, so that the table cannot depend on the thread count.
        size = scaling.attention_factor
        cos, sin = (np.cos(angles) * size).astype(np.float32), (np.sin(angles) * size).astype(np.float32)
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
