"""exp for float32, defined operation by operation, so that it is the same on every machine and instruction set."""

import numpy as np
import numpy.typing as npt

Row = npt.NDArray[np.float32]

MIN_X, MAX_X = -86.0, 88.0  # below it exp is 0, above it infinite
LOG2_E = np.float32(1.44269504)
NEG_LN2_HIGH, NEG_LN2_LOW = np.float32(-0.693359375), np.float32(2.12194440e-4)
# Cephes' expf: exp(r) = 1 + r + r * r * p(r) for |r| <= ln(2) / 2
FIRST = np.float32(1.9875691500e-4)
COEFFICIENTS = [
    np.float32(c)
    for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
]  # fmt: skip

_MIDPOINT_MASK, _MIDPOINT = np.int64(0x1FFF_FFFF), np.int64(0x1000_0000)


def exp(x: Row) -> Row:
    """`x: [N] float32` -> `[N] float32`, every intermediate rounded to float32, `fma` once."""
    with np.errstate(over="ignore", invalid="ignore"):
        inside = np.where((x >= MIN_X) & (x <= MAX_X), x, np.float32(0.0))
    n = np.rint(inside * LOG2_E)
    r = fma(n, NEG_LN2_HIGH, inside)
    r = fma(n, NEG_LN2_LOW, r)
    p = np.full_like(r, FIRST)
    for coefficient in COEFFICIENTS:
        p = fma(p, r, coefficient)
    with np.errstate(under="ignore"):
        y = fma(p, r * r, r) + np.float32(1.0)
    y = (y.view(np.int32) + (n.astype(np.int32) << 23)).view(np.float32)
    return np.where(x < MIN_X, np.float32(0.0), np.where(x > MAX_X, np.float32(np.inf), np.where(x == x, y, x)))


def fma(a: Row, b: Row | np.float32, c: Row | np.float32) -> Row:
    """a * b + c with one rounding; numbers whose result is a normal float32 or exact.

    In float64 the product is exact and the sum is rounded, then rounded again. That differs from one rounding only
    where the first lands on the middle of two float32 (Boldo and Melquiond 2008): there the lost part decides.
    """
    product = np.asarray(a, dtype=np.float64) * np.asarray(b, dtype=np.float64)
    total = product + c
    middle = np.flatnonzero((total.view(np.int64) & _MIDPOINT_MASK) == _MIDPOINT)
    if len(middle):
        near, exact = total[middle], product[middle]
        addend = np.broadcast_to(np.asarray(c, dtype=np.float64), total.shape)[middle]
        part = near - exact
        lost = (exact - (near - part)) + (addend - part)  # Knuth's two-sum
        total[middle] = np.where(lost == 0.0, near, np.nextafter(near, np.copysign(np.inf, lost)))
    return total.astype(np.float32)
