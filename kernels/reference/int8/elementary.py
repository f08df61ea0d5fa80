"""The float32 operations that the rest is made of, each the same on every machine."""

import torch
from torch import Tensor

_LOW_BITS = (1 << 29) - 1  # of float64's mantissa, beyond float32's
_TIE = 1 << 28
_DENORMAL = 2.0**-125

_LOG2_E = 1.44269504
_LN2_HIGH, _LN2_LOW = -0.693359375, 2.12194440e-4
_FIRST, *_COEFFICIENTS = (
    1.9875691500e-4,
    1.3981999507e-3,
    8.3334519073e-3,
    4.1665795894e-2,
    1.6666665459e-1,
    5.0000001201e-1,
)
_SMALLEST, _LARGEST = -86.0, 88.0


def fma(a: Tensor | float, b: Tensor | float, c: Tensor | float) -> Tensor:
    """`a * b + c` of float32, rounded once. A float is rounded to float32 first.

    In float64 the product is exact and the sum is rounded to 53 bits. To round that to 24 bits again goes wrong only
    where it looks like a tie or the result is denormal: these few are rounded to odd first (Boldo and Melquiond, 2008).
    """
    product, c = _float64(a) * _float64(b), _float64(c)
    total = product + c
    result = total.float()
    ties = total.view(torch.int64).bitwise_and(_LOW_BITS).eq_(_TIE)
    denormal = result.abs() < _DENORMAL  # or zero, which is exact
    if ties.any() or denormal.any():
        doubtful = (ties != 0) | denormal & (total != 0)
        product, addend = product.expand_as(total)[doubtful], c.expand_as(total)[doubtful]
        result[doubtful] = _rounded_to_odd(product, addend, total[doubtful]).float()
    return result


def tree16(v: Tensor) -> Tensor:
    """`[..., 16] -> [...]`: halves added to halves."""
    for half in (8, 4, 2, 1):
        v = v[..., :half] + v[..., half:]
    return v[..., 0]


def in_groups(x: Tensor, size: int) -> Tensor:
    """`[..., K] -> [..., K / size, size]`."""
    return x.reshape(*x.shape[:-1], x.shape[-1] // size, size)


def exp(x: Tensor) -> Tensor:
    """Within 2 ulp of e^x; 0 below -86, infinity above 88 (Cephes' expf)."""
    inside = x.clamp(_SMALLEST, _LARGEST)
    n = torch.round(inside * _float32(_LOG2_E))
    r = fma(n, _LN2_LOW, fma(n, _LN2_HIGH, inside))
    p = torch.full_like(r, _FIRST)
    for coefficient in _COEFFICIENTS:
        p = fma(p, r, coefficient)
    y = fma(p, r * r, r) + 1.0
    exponents = n.nan_to_num(0.0).to(torch.int32) << 23
    y = (y.view(torch.int32) + exponents).view(torch.float32)
    y = torch.where(x < _SMALLEST, 0.0, y)
    return torch.where(x > _LARGEST, torch.inf, torch.where(x.isnan(), torch.nan, y))


def _float32(x: float) -> float:
    return float(torch.tensor(x, dtype=torch.float32))


def _float64(x: Tensor | float) -> Tensor:
    return torch.as_tensor(x, dtype=torch.float32).double()


def _rounded_to_odd(product: Tensor, addend: Tensor, total: Tensor) -> Tensor:
    """`total` with its last bit set if anything was lost: of the two float64 around the sum, the odd one."""
    back = total - product
    lost = (product - (total - back)) + (addend - back)  # Knuth's TwoSum: exact
    bits = total.view(torch.int64)
    away = torch.where((lost > 0) == (total > 0), 1, -1)
    to_nudge = (lost != 0) & total.isfinite() & (bits & 1 == 0)
    return torch.where(to_nudge, bits + away, bits).view(torch.float64)
