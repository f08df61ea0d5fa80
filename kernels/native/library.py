"""The shared library of the kernels, as cffi sees it. Calls release the GIL."""

import os
from functools import cache
from pathlib import Path
from typing import Any

import cffi

from kernels.native import LIBRARY

HEADER = Path(__file__).parent / "src" / "api.h"
PATH_VARIABLE = "KVRELAY_KERNELS"  # another build of the library: sanitizers

ffi = cffi.FFI()
ffi.cdef(HEADER.read_text(encoding="utf-8").partition("// cffi begins")[2].partition("// cffi ends")[0])


class NoLibrary(OSError):
    """The library is missing or of another machine; the message says what to do."""


@cache
def load() -> Any:
    """Raises `NoLibrary`."""
    path = os.environ.get(PATH_VARIABLE) or str(Path(__file__).parent / LIBRARY)
    try:
        return ffi.dlopen(path)
    except OSError as error:
        raise NoLibrary(f"{error}: build it with `python -m kernels.native.build`") from error


def instruction_set() -> str:
    """ "avx512", "avx2" or "portable": the best of this machine, or what KVRELAY_ISA names."""
    name: bytes = ffi.string(load().kvr_isa())
    return name.decode()


def use(isa: str) -> bool:
    """Switches the whole process to `isa`; False, and nothing changed, where the machine lacks it. For tests."""
    return bool(load().kvr_use(isa.encode()) == 0)
