"""RMSNorm (Zhang and Sennrich, 2019), in float32 whatever the residual stream is kept in."""

from torch import Tensor
from torch.nn import functional


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x: [R, K]` any dtype, `weight: [K] float32` -> `[R, K] float32`.

    torch reduces each contiguous row by itself and splits none over threads below 32,768 elements.
    """
    return functional.rms_norm(x.float(), weight.shape, weight, eps)
