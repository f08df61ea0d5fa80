"""`kernels.reference.sampling.choose` in C++: the same id, bit for bit, by partial selection."""

import threading
from typing import Any

import numpy as np
import numpy.typing as npt

from kernels.native.library import ffi, load
from kernels.reference.sampling import Draw, Mask

_thread = threading.local()


def choose(scores: npt.NDArray[np.float32], draw: Draw) -> int | None:
    """The id drawn from `scores: [V] float32`, contiguous; None if an allowed one is NaN or the largest is infinite.

    Raises `NoLibrary`.
    """
    library = load()
    found = ffi.new("uint32_t *")
    params = ffi.new("kvr_sampling *")
    fill(params, draw)
    row = ffi.from_buffer("float[]", scores)
    is_bad = library.kvr_sample(row, len(scores), params, found, _scratch(library, len(scores)))
    return None if is_bad else int(found[0])


def fill(params: Any, draw: Draw) -> None:
    """`params`: a `kvr_sampling` or a pointer to one. It points into `draw`, which must outlive its use."""
    params.inv_temperature = draw.inv_temperature
    params.top_k = draw.top_k
    params.top_p, params.min_p = draw.top_p, draw.min_p
    params.hash = draw.hash
    params.greedy = draw.greedy
    params.allowed = ffi.NULL if draw.allowed is None else _words(draw.allowed)


def _words(mask: Mask) -> Any:
    assert mask.dtype == np.uint32 and mask.flags.c_contiguous
    return ffi.cast("const uint32_t *", mask.ctypes.data)


def _scratch(library: Any, vocab: int) -> Any:
    """This thread's, for rows of `vocab`."""
    if getattr(_thread, "vocab", 0) < vocab:
        _thread.scratch = ffi.new("char[]", library.kvr_sample_scratch_bytes(vocab))
        _thread.vocab = vocab
    return _thread.scratch
