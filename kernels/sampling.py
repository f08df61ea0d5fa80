"""Chooses one id from a row of scores, in C++ where that is built; what it means is in kernels.reference.sampling."""

from collections.abc import Callable
from functools import cache

from kernels.native import sampler as native
from kernels.native.library import NoLibrary, load
from kernels.reference import sampling as reference
from kernels.reference.sampling import Draw, Mask, Row, masked

__all__ = ["Draw", "Mask", "Row", "choose", "masked"]


def choose(scores: Row, draw: Draw) -> int | None:
    """The id drawn from `scores: [V] float32`, contiguous; None if an allowed one is NaN or the largest is infinite."""
    return _chosen()(scores, draw)


@cache
def _chosen() -> Callable[[Row, Draw], int | None]:
    try:
        load()
    except NoLibrary:
        return reference.choose
    return native.choose
