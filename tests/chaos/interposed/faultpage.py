"""The page of shared memory that says which faults the processes under test have now.

Written by the driver, mapped by every process. Faults end by themselves at a time of the monotonic clock, so that
nothing stays broken when the driver dies.
"""

import mmap
import os
import struct
from typing import NamedTuple

ROLES = ("", "prefill", "decode", "gateway")
_LAYOUT = struct.Struct("=ddqqd")
PAGE_BYTES = 4096


class Faults(NamedTuple):
    """`clock_offset_s` is what process `clock_pid`, or all of `ROLES[clock_role]`, have the wall clock wrong by."""

    frozen_until_s: float = 0.0
    full_until_s: float = 0.0
    clock_pid: int = 0
    clock_role: int = 0
    clock_offset_s: float = 0.0


class FaultPage:
    def __init__(self, path: str) -> None:
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(fd, PAGE_BYTES)
        self._memory = mmap.mmap(fd, PAGE_BYTES)
        os.close(fd)

    def read(self) -> Faults:
        return Faults._make(_LAYOUT.unpack_from(self._memory))

    def write(self, faults: Faults) -> None:
        _LAYOUT.pack_into(self._memory, 0, *faults)
