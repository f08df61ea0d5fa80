"""Numbers of all sizes to compute with, and the comparison of what came out."""

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

KINDS = ("usual", "all sizes", "denormal", "huge", "zeros", "any bits", "few not finite")

seeds = st.integers(0, 2**32 - 1)
kinds = st.sampled_from(KINDS)


def numbers(shape: tuple[int, ...], kind: str, seed: int) -> Tensor:
    """float32 of one of `KINDS`."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape, np.float32)
    match kind:
        case "all sizes":
            x = np.ldexp(x, rng.integers(-60, 20, shape).astype(np.int32))
        case "denormal":
            x = np.ldexp(x, rng.integers(-150, -120, shape).astype(np.int32))
        case "huge":
            x = np.ldexp(x, rng.integers(50, 126, shape).astype(np.int32))
        case "zeros":
            x[rng.random(shape) < 0.9] = -0.0
        case "any bits":
            x = rng.integers(0, 2**32, shape, np.uint32).view(np.float32)
        case "few not finite":
            x[rng.random(shape) < 0.02] = rng.choice(np.float32([np.nan, np.inf, -np.inf]))
    return torch.from_numpy(np.ascontiguousarray(x, np.float32))


def same(found: Tensor, expected: Tensor) -> bool:
    """Bit for bit, any NaN being like any other: which of two it is that an addition keeps is nobody's promise."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    if not found.is_floating_point():
        return torch.equal(found, expected)
    nan = expected.isnan()
    words = torch.int32 if found.dtype == torch.float32 else torch.int16
    differ = (found.contiguous().view(words) != expected.contiguous().view(words)) & ~nan
    return torch.equal(found.isnan(), nan) and not bool(differ.any())
