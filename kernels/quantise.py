"""Rounds K and V to what a quantised store keeps of them, so that a step attends to what a later one will load.

A vector (one token in one head) becomes whole numbers from -`levels` to `levels` times one float32 scale. That is
causal: what is kept of a token never changes when later ones come. And it is a fixed point: rounding again changes
nothing, in any dtype of the pages, so a block can be quantised, loaded and quantised again (decision 0030).
"""

import torch
from torch import Tensor

LEVELS = {"int8": 127, "int4": 7}
"""Largest whole number of each quantisation: symmetric, so that a sign costs nothing."""

_SCALE_BITS = -128  # int32: all but the lowest 7 bits
_EXACT_BELOW = 2.0**-132  # a scale this small has few bits by itself
_SMALLEST = 2.0**-149  # keeps 0 / 0 away


def round_trip(x: Tensor, levels: int, dtype: torch.dtype) -> Tensor:
    """`x: [..., D] float32`, overwritten -> what comes back of it from the store, `[..., D] dtype`.

    NaN and infinity make their whole vector NaN. No zero is negative: a whole number has no such thing.
    """
    largest = x.abs().amax(-1, keepdim=True).to(dtype).float()
    scale = _scale(largest, levels)
    whole = x.div_(largest.clamp_min_(_SMALLEST)).mul_(levels).round_().clamp_(-levels, levels)
    return whole.mul_(scale).to(dtype).add_(0.0)


def whole_and_scale(x: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """`x: [..., D] float32` -> what is stored of it, `[..., D] int8` and `[...] float32`; their product is what
    `round_trip` gives in float32. Where a vector is not finite its scale is NaN and the rest 0."""
    largest = x.abs().amax(-1, keepdim=True)
    largest = torch.where(largest.isfinite(), largest, torch.nan)
    scale = _scale(largest, levels)
    whole = torch.round(x / largest.clamp_min(_SMALLEST) * levels).clamp_(-levels, levels)
    whole = torch.where((scale == 0) | scale.isnan(), 0.0, whole)
    return whole.to(torch.int8), scale.squeeze(-1)


def _scale(largest: Tensor, levels: int) -> Tensor:
    """Cut to 17 significant bits."""
    scale = largest / levels
    cut = scale.view(torch.int32).bitwise_and(_SCALE_BITS).view(torch.float32)
    return torch.where(scale < _EXACT_BELOW, scale, cut)
