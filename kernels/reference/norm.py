"""RMSNorm (Zhang and Sennrich, 2019), in the order of operations that transformers takes."""

from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x: [R, K] float32`, `weight: [K] float32` -> `[R, K] float32`.

    torch sums each contiguous row by itself. Spelled out, because `functional.rms_norm` takes twice as long for a row.
    """
    scale = (x * x).mean(1, keepdim=True).add_(eps).rsqrt_()
    return scale.mul(x).mul_(weight)


def head_norm_(x: Tensor, weight: Tensor, eps: float) -> None:
    """RMSNorm of each head by itself, in place: `x: [R, heads, D] float32`, `weight: [heads, D] float32`."""
    scale = (x * x).mean(2, keepdim=True).add_(eps).rsqrt_()
    x.mul_(scale).mul_(weight)
